"""Audits: what was tried against each claim of a run, what it showed, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, floor, log, log10
from typing import Any

from stobatch.reporting.figures import Chart, canvas, inline, shared_legend
from stobatch.reporting.format import STATUS_WORDS, interval, number, percent
from stobatch.reporting.page import LIGHT
from stobatch.reporting.summary import Facts
from stobatch.reporting.table import DASH, Cell, Entry, Table
from stobatch.results import (
    CertificateDetails,
    Finding,
    FindingDetails,
    Histogram,
    MembershipDetails,
    PrivacyDetails,
    Roc,
    name_of,
    overall_verdict,
    untested,
)
from stobatch.types import Verdict

_SCORES = (
    "The attack's scores of models that were trained on one data set, and on another that differs in one record. "
    "Privacy means that the two cannot be told apart well."
)
_MEMBERSHIP = (
    "Training records told from others, both rates on a logarithmic scale: what matters is how many are found where "
    "false positives are rare."
)
_INSTRUMENTS = {
    "release": "one release",
    "many_runs": "many trainings",
    "one_run": "canaries in this training",
    "membership": "membership inference",
    "certificates": "attacks inside certified balls",
}
_COUNTS = {
    "certified": "certified balls",
    "attacked": "balls attacked",
    "broken": "balls broken",
    "broken_float64": "balls broken in float64",
    "broken_by": "broken by",
    "smallest_margin": "smallest margin left to a label",
    "smallest_radius": "smallest radius attacked, units as in the claim",
    "largest_radius": "largest radius attacked, units as in the claim",
    "failure_probability": "a certificate may fail with probability",
    "retests": "broken inputs certified again, times",
    "overclaims": "beyond a point known to be bad, times",
    "allowed_overclaims": "chance explains up to",
    "right": "told apart rightly",
    "auroc": "area under the curve (AUROC)",
    "auroc_interval": "its interval",
    "variance": "variances of the scores",
    "num_shadows": "shadow models",
    "num_targets": "models attacked",
    "num_examples": "records guessed",
    "could_not_refute": "it could not have refuted the claim",
}
_TOLD_ELSEWHERE = {
    *("bounds", "histogram", "roc", "tpr_at", "fpr_at"),
    *("claimed_epsilon", "claimed_delta", "confidence"),
}


@dataclass(frozen=True)
class DetailedFinding:
    """One finding in full, under the line that names it."""

    title: Cell
    pairs: tuple[tuple[str, str], ...]
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Audits:
    """Every claim with its verdict, then what was found."""

    outcome: str
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...]
    details: tuple[DetailedFinding, ...]


def audits_of(facts: Facts, name: str) -> Audits | None:
    """Return the section on audits; None where nothing is claimed and nothing was found."""
    if not facts.findings and not facts.claims:
        return None
    tables = [_claims(facts)] if facts.claims else []
    tables += [_overview(facts)] if facts.findings else []
    details = tuple(map(_details, facts.findings))
    return Audits(_outcome(facts), tuple(tables), tuple(_figures(facts, name)), details)


def _outcome(facts: Facts) -> str:
    refuted = list(dict.fromkeys(name_of(finding) for finding in facts.findings if finding.verdict is Verdict.REFUTED))
    if facts.claims and overall_verdict(facts.claims, facts.findings) is Verdict.NOT_TESTED:
        return "No claim of this run was tested."
    missing = [f"Not tested: {'; '.join(untested(facts.claims))}."] if untested(facts.claims) else []
    return " ".join([f"Refuted here: {', '.join(refuted)}." if refuted else "Nothing was refuted here.", *missing])


def _claims(facts: Facts) -> Table:
    caption = "Every claim of this run. Consistent: attacks that could have refuted it did not, which proves nothing."
    rows: list[list[Entry]] = [[name_of(claim), Cell("", status=claim.verdict), claim.reason] for claim in facts.claims]
    return Table.of(caption, ["claim", "verdict", "why it was not tested"], rows)


def _instrument(finding: Finding) -> str:
    words = _INSTRUMENTS.get(finding.instrument, finding.instrument.replace("_", " "))
    release = finding.details.release if isinstance(finding.details, PrivacyDetails) else None
    return f"{words}: {release}" if release else words


def _overview(facts: Facts) -> Table:
    caption = (
        "One row for each finding. Bounds say that ε is at least this large, with the confidence stated; they are held "
        "against the ε beside them. Statuses are those after the audits. Evidence files lie in the run's directory."
    )
    headings = ["attack by", "claim", "verdict", "found", "held against", "false alarm, at most", "evidence"]
    rows: list[list[Entry]] = [
        [
            _instrument(finding),
            name_of(finding),
            Cell("", status=finding.verdict),
            _finding_cells(finding),
            _claimed_cell(facts, finding),
            f"{100 * (1 - finding.confidence):.3g}%",
            finding.evidence,
        ]
        for finding in facts.findings
    ]
    return Table.of(caption, headings, rows)


def _finding_cells(finding: Finding) -> Sequence[Cell]:
    details = finding.details
    if isinstance(details, CertificateDetails):
        attacked = details.attacked
        broken = f"{details.broken} of {attacked} balls broken" if attacked else "no ball to break"
        return [Cell(broken, f"{details.certified} certified")]
    return [
        Cell(
            f"ε ≥ {bound.epsilon:.3g}",
            f"δ = {bound.delta:.3g}, {100 * bound.confidence:.4g}% confidence"
            f"{', under an assumption' if bound.assumes else ''}",
        )
        for bound in finding.bounds
    ]


def _claimed_cell(facts: Facts, finding: Finding) -> Cell:
    if isinstance(finding.details, CertificateDetails):
        statuses = {kind.name: kind.status for kind in facts.all_kinds}
        return Cell("", status=statuses[finding.about]) if finding.about in statuses else Cell(DASH)
    budget = finding.claimed_budget
    if budget is None:
        return Cell("nothing is claimed")
    epsilon, delta = budget
    return Cell(f"ε = {epsilon:.4g}", f"δ = {delta:.3g}, {finding.details.neighbours}", facts.status)


def _figures(facts: Facts, name: str) -> Iterator[Chart]:
    bounded = [finding for finding in facts.findings if finding.bounds]
    if bounded:
        yield _bounds_figure(facts, bounded, f"{name}-bounds")
    for place, finding in enumerate(facts.findings):
        details = finding.details
        if isinstance(details, PrivacyDetails) and details.histogram is not None:
            yield score_histograms(details.histogram, f"{name}-scores-{place}").with_caption(_SCORES)
        if isinstance(details, MembershipDetails):
            yield _membership_figure(facts, details, finding.claimed_budget, f"{name}-membership-{place}")


def _bounds_figure(facts: Facts, findings: list[Finding], name: str) -> Chart:
    rows = []
    for finding in findings:
        bounds = [(bound.epsilon, bool(bound.assumes)) for bound in finding.bounds]
        budget = finding.claimed_budget
        rows.append(Bounded(_instrument(finding), finding.verdict, bounds, budget[0] if budget else None))
    caption = "What attacks showed ε to be at least."
    if any(row.audited is not None for row in rows):
        caption += " The line is the ε they are held against, as in the table: a bar that passes it refutes the claim."
    if any(assumes for row in rows for _, assumes in row.bounds):
        caption += " Faint bars hold under an assumption, which the details name."
    return bounds_found(rows, f"ε of the guarantee ({STATUS_WORDS[facts.status]})", name).with_caption(caption)


def _membership_figure(
    facts: Facts, details: MembershipDetails, budget: tuple[float, float] | None, name: str
) -> Chart:
    words, caption = "", _MEMBERSHIP
    if budget:
        epsilon, delta = budget
        words = f"most that ε = {epsilon:.4g} allows ({STATUS_WORDS[facts.status]})"
        caption += (
            f" The ceiling is e^ε times the false-positive rate, plus δ = {delta:.3g}, for replacing a record: a curve "
            "above it by more than chance refutes the claim."
        )
    return membership_curve(details.roc, budget, words, name).with_caption(caption)


def _details(finding: Finding) -> DetailedFinding:
    pairs = (
        ("found", finding.statement),
        ("claim, before audits", finding.claim),
        ("the attacker", finding.threat_model),
        ("the attack", finding.attack),
        ("confidence", f"{100 * finding.confidence:.4g}%"),
        *((_COUNTS.get(key, key.replace("_", " ")), _value(value)) for key, value in _numbers(finding.details)),
    )
    tables = [_bounds_table(finding)] if finding.bounds else []
    tables += [_rates_table(finding.details)] if isinstance(finding.details, MembershipDetails) else []
    title = Cell(f"{_instrument(finding)}, {name_of(finding)}", status=finding.verdict)
    return DetailedFinding(title, pairs, tuple(tables))


def _numbers(details: FindingDetails) -> list[tuple[str, Any]]:
    items = details.to_dict().items()
    return [(key, value) for key, value in items if key not in _TOLD_ELSEWHERE and value is not None]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{str(key).replace('_', ' ')} {_value(item)}" for key, item in value.items()) or "nothing"
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return number(value) if isinstance(value, (int, float)) else str(value).replace("_", " ")


def _bounds_table(finding: Finding) -> Table:
    caption = "Bounds on ε from below; all of them hold at once with the confidence stated."
    rows = [
        [
            bound.name.replace("_", " "),
            f"ε ≥ {bound.epsilon:.4g}",
            f"{bound.delta:.3g}",
            f"{100 * bound.confidence:.4g}%",
            bound.assumes or "nothing",
            _value(bound.details.to_dict()),
        ]
        for bound in finding.bounds
    ]
    return Table.of(caption, ["bound", "found", "δ", "confidence", "assumes", "counted"], rows)


def _rates_table(details: MembershipDetails) -> Table:
    sure = f"{100 * details.confidence:.4g}% interval in brackets"
    caption = f"Members found at thresholds that the shadow models chose; mean over the models attacked, {sure}."
    rows: list[list[Entry]] = [
        [rate, *(Cell(percent(rates[rate]), interval(rates[rate])) for rates in (details.tpr_at, details.fpr_at))]
        for rate in details.tpr_at
    ]
    return Table.of(caption, ["false-positive rate wanted", "true-positive rate", "false-positive rate there"], rows)


_LINE = 0.42
"""Inches for each row of bars."""


@dataclass(frozen=True)
class Bounded:
    """A finding about an ε: bounds from below, each with whether it assumes anything, and the ε they are held to."""

    label: str
    verdict: str
    bounds: Sequence[tuple[float, bool]]
    audited: float | None


def score_histograms(histogram: Histogram, name: str) -> Chart:
    """Draw the attack's scores of both kinds of models; where the two do not overlap, nothing is hidden."""
    with canvas(1, 4.8, 2.7) as (figure, (axes,)):
        edges = histogram.edges
        sides = ((histogram.without, "one data set", "clean"), (histogram.with_, "its neighbour", "attack-2"))
        for counts, label, colour in sides:
            axes.stairs(counts, edges, fill=True, color=LIGHT[colour], alpha=0.4)
            axes.stairs(counts, edges, color=LIGHT[colour], linewidth=1.2, label=f"models trained on {label}")
        axes.set(xlabel="score of the attack", ylabel="models")
        shared_legend(figure, [axes])
        return inline(figure, name)


def bounds_found(findings: Sequence[Bounded], words: str, name: str) -> Chart:
    """Draw bars from 0 to the ε that was shown, against the ε that they are held to."""
    with canvas(1, 7.2, 1.1 + _LINE * len(findings)) as (figure, (axes,)):
        widest = max(x for finding in findings for x in (*(e for e, _ in finding.bounds), finding.audited or 0.0, 0.1))
        for row, finding in enumerate(findings):
            colour = LIGHT.get(finding.verdict, LIGHT["muted"])
            # Faint where something is assumed, and below, so that what needs no assumption shows.
            for epsilon, assumes in sorted(finding.bounds, key=lambda bound: not bound[1]):
                axes.barh(row, epsilon, height=0.46, color=colour, alpha=0.35 if assumes else 1.0)
            best, line = max(epsilon for epsilon, _ in finding.bounds), finding.audited or 0.0
            # A line just behind the bar would cross its number.
            end = line if best <= line < best + 0.15 * widest else best
            axes.text(end + 0.015 * widest, row, f"≥ {best:.3g}", va="center", color=colour)
            if finding.audited is not None:
                label = words if finding is _first_with_claim(findings) else None
                ends = row - 0.4, row + 0.4
                axes.plot([finding.audited] * 2, ends, color=LIGHT["ink"], linewidth=2, label=label)
        axes.set_yticks(range(len(findings)), [finding.label for finding in findings])
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.set(xlabel="ε", xlim=(0, 1.14 * widest), ylim=(len(findings) - 0.4, -0.6))
        if _first_with_claim(findings):
            shared_legend(figure, [axes])
        return inline(figure, name)


def _first_with_claim(findings: Sequence[Bounded]) -> Bounded | None:
    return next((finding for finding in findings if finding.audited is not None), None)


def membership_curve(roc: Roc, budget: tuple[float, float] | None, words: str, name: str) -> Chart:
    """Draw true against false positives where false ones are rare, and the most that (ε, δ) allows."""
    rates, hits = roc.false_positive_rate, roc.true_positive_rate
    lowest = min(rates)
    with canvas(1, 4.8, 4.2) as (figure, (axes,)):
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
