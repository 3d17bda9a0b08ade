"""The figures of a comparison: every row at one radius, and each against radius."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stobatch.reporting.figures import (
    PROTOCOL_MARKERS,
    STATUS_LOOKS,
    Chart,
    Curve,
    Panel,
    Point,
    canvas,
    draw,
    inline,
    shared_legend,
    standalone,
)
from stobatch.reporting.format import STATUS_WORDS, unit
from stobatch.reporting.page import LIGHT
from stobatch.results import ComparedRow, Comparison, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PROTOCOLS = ("published", "adaptive")
_CERTIFIED_LOOKS: dict[str, dict[str, Any]] = {
    "proved": {"marker": "D", "markersize": 6},
    "claimed": {"marker": "D", "markersize": 6, "markerfacecolor": "none"},
    "refuted": {"marker": "x", "markersize": 6},
}
"""Filled is proved and nothing else."""
_HEIGHTS = {"clean": -0.34, "published": -0.17, "adaptive": 0.0, "proved": 0.17, "claimed": 0.34, "refuted": 0.34}
"""Where a row's marks stand in it, so that equal ones do not hide each other."""
_PRIVACY_COLOURS = {"none": "refuted"}


def methods_figure(document: Comparison, name: str) -> Chart:
    with _dots(document) as figure:
        return inline(figure, name)


def methods_svg(document: Comparison, name: str) -> bytes:
    with _dots(document) as figure:
        return standalone(figure, name)


def radius_curves(document: Comparison, name: str) -> Chart:
    """Draw accuracy against radius, a panel for each row: attacked under each protocol, and certified."""
    panels = [Panel(row.label, f"radius, {radius_unit(document)}", _method_curves(row)) for row in document.rows]
    return draw(panels, name)


def _method_curves(row: ComparedRow) -> list[Curve]:
    curves = []
    for protocol in PROTOCOLS:
        rows = [_point(entry, entry.radius) for entry in row.attacked if entry.protocol == protocol]
        if rows:
            look = {"color": LIGHT[protocol], "marker": PROTOCOL_MARKERS[protocol]}
            curves.append(Curve(f"{protocol} protocol, worst attack", [_point(row.clean, 0.0), *_sorted(rows)], look))
    for rule, status in dict.fromkeys((entry.rule, entry.status) for entry in row.certified):
        own = [entry for entry in row.certified if (entry.rule, entry.status) == (rule, status)]
        look = {"color": LIGHT[status], "marker": "D", **STATUS_LOOKS[status]}
        label = f"certified, {rule} rule ({STATUS_WORDS[status]})"
        curves.append(Curve(label, _sorted(_point(entry, entry.radius) for entry in own), look))
    return curves


def _point(spread: Spread, radius: float) -> Point:
    return Point(radius, spread.mean, spread.min, spread.max)


def _sorted(rows: Iterable[Point]) -> list[Point]:
    return sorted(rows, key=lambda row: row.radius)


@contextmanager
def _dots(document: Comparison) -> Iterator[Figure]:
    """Draw a line for each row at the first radius: clean, attacked, certified; whiskers span the seeds."""
    rows, radius = document.rows, document.radii[0]
    with canvas(1, 10.4, 1.7 + 0.62 * len(rows)) as (figure, (axes,)):
        for place, row in enumerate(rows):
            _draw_row(axes, row, place, radius)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        for label, row in zip(axes.get_yticklabels(), rows, strict=True):
            status = str(row.guarantees[0].guarantee.status)
            label.set_color(LIGHT[_PRIVACY_COLOURS.get(status, status)])
        axes.set(xlim=(-2, 102), ylim=(len(rows) - 0.5, -0.5))
        axes.set_xlabel(f"accuracy at radius {radius:g} ({radius_unit(document)}), %")
        axes.grid(axis="x")
        shared_legend(figure, [axes])
        yield figure


def _draw_row(axes: Axes, row: ComparedRow, place: int, radius: float) -> None:
    _mark(axes, row.clean, place + _HEIGHTS["clean"], "clean", {"color": LIGHT["clean"], "marker": "o"})
    for protocol in PROTOCOLS:
        look = {"color": LIGHT[protocol], "marker": PROTOCOL_MARKERS[protocol]}
        spread = row.attacked_at(protocol, radius)
        if spread is not None:
            _mark(axes, spread, place + _HEIGHTS[protocol], f"{protocol} protocol", look)
    for entry in row.certified_at(radius):
        look = {"color": LIGHT[entry.status], **_CERTIFIED_LOOKS[entry.status]}
        label = f"certified ({STATUS_WORDS[entry.status]})"
        _mark(axes, entry, place + _HEIGHTS[entry.status], label, look)


def _mark(axes: Axes, spread: Spread, height: float, label: str, look: dict[str, Any]) -> None:
    axes.plot([100 * spread.min, 100 * spread.max], [height, height], color=look["color"], linewidth=1.1)
    axes.plot([100 * spread.mean], [height], linestyle="", label=label, **look)


def radius_unit(document: Comparison) -> str:
    return unit(document.norm, document.input_range)
