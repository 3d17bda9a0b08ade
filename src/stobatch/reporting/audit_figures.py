"""The pictures of an audit: how far scores lie apart, what was bounded, and how well members were told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, floor, log, log10
from typing import Any

from stobatch.reporting.figures import canvas, inline, shared_legend
from stobatch.reporting.markup import Html
from stobatch.reporting.style import LIGHT

_SIDES = {"without": ("one data set", "clean"), "with": ("its neighbour", "attack-2")}
_LINE = 0.42
"""Inches for each row of bars."""


@dataclass(frozen=True)
class Bounded:
    """A finding about an ε: bounds from below, each with whether it assumes anything, and the ε they are held to."""

    label: str
    verdict: str
    bounds: Sequence[tuple[float, bool]]
    audited: float | None


def score_histograms(histogram: dict[str, Any], name: str) -> Html:
    """The attack's scores of both kinds of models; where the two do not overlap, nothing is hidden."""
    with canvas(1, 6.2, 2.9) as (figure, (axes,)):
        for side, (label, colour) in _SIDES.items():
            counts, edges = histogram[side], histogram["edges"]
            axes.stairs(counts, edges, fill=True, color=LIGHT[colour], alpha=0.4)
            axes.stairs(counts, edges, color=LIGHT[colour], linewidth=1.2, label=f"models trained on {label}")
        axes.set(xlabel="score of the attack", ylabel="models")
        shared_legend(figure, [axes])
        return inline(figure, name)


def bounds_found(findings: Sequence[Bounded], words: str, name: str) -> Html:
    """Bars that grow from 0 to what was shown, against the ε that they were held to."""
    with canvas(1, 8.2, 1.1 + _LINE * len(findings)) as (figure, (axes,)):
        widest = max(x for found in findings for x in (*(e for e, _ in found.bounds), found.audited or 0.0, 0.1))
        for row, found in enumerate(findings):
            colour = LIGHT.get(found.verdict, LIGHT["muted"])
            # Faint where something is assumed, and below, so that what needs no assumption shows.
            for epsilon, assumes in sorted(found.bounds, key=lambda bound: not bound[1]):
                axes.barh(row, epsilon, height=0.46, color=colour, alpha=0.35 if assumes else 1.0)
            best, line = max(epsilon for epsilon, _ in found.bounds), found.audited or 0.0
            # A line just behind the bar would cross its number.
            end = line if best <= line < best + 0.15 * widest else best
            axes.text(end + 0.015 * widest, row, f"≥ {best:.3g}", va="center", color=colour)
            if found.audited is not None:
                label = words if found is _first_held(findings) else None
                ends = row - 0.4, row + 0.4
                axes.plot([found.audited] * 2, ends, color=LIGHT["ink"], linewidth=2, label=label)
        axes.set_yticks(range(len(findings)), [found.label for found in findings])
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.set(xlabel="ε", xlim=(0, 1.14 * widest), ylim=(len(findings) - 0.4, -0.6))
        if _first_held(findings):
            shared_legend(figure, [axes])
        return inline(figure, name)


def _first_held(findings: Sequence[Bounded]) -> Bounded | None:
    return next((found for found in findings if found.audited is not None), None)


def membership_curve(roc: dict[str, list[float]], budget: tuple[float, float] | None, words: str, name: str) -> Html:
    """True against false positives where false ones are rare, and the most that (ε, δ) allows."""
    rates, hits = roc["false_positive_rate"], roc["true_positive_rate"]
    lowest = min(rates)
    with canvas(1, 5.4, 4.4) as (figure, (axes,)):
        # A logarithm has no place for 0.
        shown = [(x, y) for x, y in zip(rates, hits, strict=True) if y > 0]
        axes.plot([lowest, 1], [lowest, 1], color=LIGHT["clean"], linestyle="--", linewidth=1.1, label="guessing")
        axes.plot(*zip(*shown, strict=True), color=LIGHT["attack-2"], label="the attack")
        if budget:
            epsilon, delta = budget
            ceiling = [min(1.0, exp(min(0.0, epsilon + log(x))) + delta) for x in rates]
            axes.plot(rates, ceiling, color=LIGHT["ink"], linestyle="-.", linewidth=1.1, label=words)
        axes.set(xscale="log", yscale="log", xlim=(lowest, 1), ylim=(lowest, 1.3))
        decades = [10.0**power for power in range(floor(log10(lowest)) + (log10(lowest) % 1 > 0), 1)]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(decades, [f"{decade:g}" for decade in decades])
        axes.minorticks_off()
        axes.grid(visible=True, axis="both")
        axes.set(xlabel="false-positive rate", ylabel="true-positive rate")
        shared_legend(figure, [axes])
        return inline(figure, name)
