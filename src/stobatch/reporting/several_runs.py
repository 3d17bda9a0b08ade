"""Several runs in one report: a row for each, the span of their accuracies, and accuracy against ε."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stobatch.reporting.comparison import ComparisonSection, comparison_section
from stobatch.reporting.figures import Chart, epsilon_curves
from stobatch.reporting.format import percent, spoken
from stobatch.reporting.header import Lead
from stobatch.reporting.summary import Facts, common_function, common_radii
from stobatch.reporting.table import DASH, Cell, Table
from stobatch.reporting.tables import gap_cell, share_cell
from stobatch.results import WORST, Comparison, at_radius


@dataclass(frozen=True)
class SeveralRuns:
    """What stands above the runs one by one; `section` is None where they cannot be compared."""

    lead: Lead
    runs: Table
    epsilons: Chart | None
    section: ComparisonSection | None


def several_runs(runs: Sequence[Facts], comparison: Comparison | None) -> SeveralRuns:
    function, radius = common_function(runs), next(iter(common_radii(runs)), None)
    section = comparison_section(comparison) if comparison else None
    return SeveralRuns(
        _lead(runs, function, radius), _table(runs, function, radius), _epsilons(runs, function, radius), section
    )


def _lead(runs: Sequence[Facts], function: str, radius: float | None) -> Lead:
    """Return one sentence: the span of accuracies under each protocol."""
    spans: list[str] = []
    for protocol in ("published", "adaptive") if radius is not None else ():
        shares = [share for facts in runs if (share := at_radius(facts.worst(protocol, function), radius or 0.0))]
        if shares:
            low, high = (end(shares, key=lambda share: share.value) for end in (min, max))
            of_what = "" if spans else " of test images"
            spans.append(f"{percent(low)} to {percent(high)}{of_what} under the {protocol} protocol")
    if not spans:
        return Lead("These runs were not attacked at a common radius.", "")
    start = f"At radius {radius:g} ({runs[0].unit}) on the {spoken(function)}, these runs are right on "
    return Lead(start, ", and on ".join(spans), ".")


def _table(runs: Sequence[Facts], function: str, radius: float | None) -> Table:
    headings = ["run", "method", "ε and its status", "seed", "test images", "clean"]
    if radius is None:
        caption = (
            "Accuracy in %, 95% interval in brackets. The runs share no function, radius and unit to be compared at."
        )
        rows = [row for place, facts in enumerate(runs, 1) for row in (_identity(place, facts), *_prior(facts))]
        return Table.of(caption, headings, rows)
    kinds = list(dict.fromkeys((kind.name, kind.function) for facts in runs for kind in facts.all_kinds))
    headings += ["published protocol", "adaptive protocol", "gap"]
    headings += [f"certified, {rule} rule, {spoken(certified)}" for rule, certified in kinds]
    caption = (
        f"Accuracy on the {spoken(function)} at radius {radius:g} ({runs[0].unit}), worst attack for each example, "
        "and certified accuracy of clean inputs at that radius, in %; gap in percentage points; 95% interval in "
        "brackets. Numbers are of as many test images as the row says, or as stands beside them."
    )
    rows = []
    for place, facts in enumerate(runs, 1):
        rows.append([*_identity(place, facts), *_attacked(facts, function, radius, kinds)])
        rows += [[*own, *_attacked_prior(facts, function, radius, kinds)] for own in _prior(facts)]
    return Table.of(caption, headings, rows)


def _prior(facts: Facts) -> list[list[Cell]]:
    """Return the row of a run's prior by itself, or none where it has none."""
    own = facts.scores.prior
    if own is None:
        return []
    of = f"{own.name}, weights {own.weights_sha256[:12]}…"
    clean = share_cell(own.clean_accuracy)
    epsilon = Cell(DASH if own.conflict else "0", own.budget if own.conflict or own.tuned else "")
    about = [Cell(f"prior of {facts.name}", of), Cell("public weights"), epsilon, Cell(DASH)]
    return [[*about, Cell(f"{own.rows:,}"), clean]]


def _attacked_prior(facts: Facts, function: str, radius: float, kinds: Sequence[tuple[str, str]]) -> list[Cell]:
    own, certificates = facts.scores.prior, facts.certificates.prior if facts.certificates else None
    assert own is not None
    found = at_radius(own.of_attack(WORST), radius) if own.function == function else None
    worst = [found if own.protocol.name == protocol else None for protocol in ("published", "adaptive")]
    certified = certificates.certified_accuracy if certificates else {}
    statuses = {kind.name: kind.status for kind in certificates.kinds} if certificates else {}
    shares = [(rule, at_radius(certified.get(rule, ()), radius)) for rule, _ in kinds]
    cells = [*map(share_cell, worst), Cell(DASH)]
    for rule, share in shares:
        cell = share_cell(share)
        cells.append(Cell(cell.text, cell.detail, statuses[rule]) if share is not None else Cell(DASH))
    return cells


def _identity(place: int, facts: Facts) -> list[Cell]:
    return [
        Cell(facts.name, facts.scores.training_hash, href=f"#run-{place}"),
        Cell(facts.method),
        Cell("" if facts.epsilon is None else f"{facts.epsilon:g}", status=facts.status),
        Cell("secret" if facts.seed is None else str(facts.seed)),
        Cell(f"{facts.same_images(facts.main_function).rows:,}"),
        share_cell(facts.clean(facts.main_function)),
    ]


def _attacked(facts: Facts, function: str, radius: float, kinds: Sequence[tuple[str, str]]) -> list[Cell]:
    gap = facts.gap(function, radius)
    worst = [share_cell(at_radius(facts.worst(p, function), radius)) for p in ("published", "adaptive")]
    return [*worst, gap_cell(gap.gap if gap else None), *(_certified(facts, radius, *kind) for kind in kinds)]


def _certified(facts: Facts, radius: float, rule: str, function: str) -> Cell:
    """Return what one rule certifies at this radius, with its status in this run; a dash where it says nothing."""
    kind = next((kind for kind in facts.kinds(function) if kind.name == rule), None)
    share = at_radius(facts.certified(kind) or facts.all_certified(kind), radius) if kind else None
    if kind is None or share is None:
        return Cell(DASH)
    cell = share_cell(share)
    same = share.total == facts.same_images(facts.main_function).rows
    return Cell(cell.text, cell.detail if same else f"{cell.detail} of {share.total:,} images", kind.status)


def _epsilons(runs: Sequence[Facts], function: str, radius: float | None) -> Chart | None:
    budgeted = [facts for facts in runs if facts.epsilon is not None]
    if not budgeted:
        return None
    where = "" if radius is None else f" on the {spoken(function)}, worst attack at radius {radius:g} ({runs[0].unit})"
    left_out = len(runs) - len(budgeted)
    caption = f"Accuracy against ε{where}. Each dot is a run; lines join the means over seeds of the same setting."
    caption += f" Runs without any privacy guarantee are not on it: {left_out}." if left_out else ""
    return epsilon_curves(budgeted, function, radius, "epsilon").captioned(caption)
