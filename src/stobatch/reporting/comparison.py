"""Runs and settings side by side, for a terminal and for a page: tables, figures, t-tests, and what is promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stobatch.files import write_atomically
from stobatch.reporting.comparison_figures import PROTOCOLS, methods_figure, methods_svg, radius_curves, radius_unit
from stobatch.reporting.figures import Chart, epsilon_curves
from stobatch.reporting.format import STATUS_WORDS, interval, percent, points, privacy_words, title_of
from stobatch.reporting.guarantee import GuaranteeCard, card_of, guarantee_line
from stobatch.reporting.header import Lead
from stobatch.reporting.page import render
from stobatch.reporting.summary import Facts, common_function, common_radii
from stobatch.reporting.table import DASH, Cell, Column, Entry, Heading, Table
from stobatch.reporting.tables import gap_cell, share_cell
from stobatch.results import WORST, ComparedRow, ComparedTest, Comparison, Spread, at_radius

if TYPE_CHECKING:
    from rich.console import RenderableType


_SHOWN = 10
"""T-tests that a terminal prints, smallest p-value first."""
_FEWEST_SEEDS = 3
"""Of each side of a t-test that is shown."""
_LEVEL = 0.05
"""The p-value below which people begin to look."""


@dataclass(frozen=True)
class ComparisonSection:
    """What a page shows of a comparison."""

    main: Table
    others: tuple[tuple[str, Table], ...]
    """The same at the other radii, each with the line to fold it under."""
    methods: Chart
    curves: Chart
    flags: tuple[str, ...]
    by_chance: str
    t_tests: Table | None


def comparison_section(document: Comparison) -> ComparisonSection:
    first, *others = document.radii
    tests = telling_tests(document)
    figure = (
        f"Every method at radius {first:g}; whiskers reach from the least seed to the best. Filled diamonds are "
        "proved, hollow ones only claimed, crosses refuted. Behind each name stands who vouches for its privacy."
    )
    curves = (
        "Means over seeds; bands reach from the least seed to the best. Certified accuracy is of clean inputs: solid "
        "where proved, dashed where only claimed, dotted where refuted."
    )
    return ComparisonSection(
        methods_table(document, first),
        tuple((f"The same at radius {radius:g}", methods_table(document, radius)) for radius in others),
        methods_figure(document, "methods").with_caption(figure),
        radius_curves(document, "radii").with_caption(curves),
        flag_lines(document),
        by_chance(document),
        t_tests_table(tests) if tests else None,
    )


def comparison_tables(document: Comparison) -> RenderableType:
    """Return the comparison for a terminal; of many t-tests those with the smallest p-values."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [methods_table(document, radius).to_rich() for radius in document.radii]
    parts += [Text(f"{name} protocol: {meaning}") for name, meaning in document.protocols.items()]
    parts += [Text(line, "red") for line in flag_lines(document)]
    tests = sorted(telling_tests(document), key=lambda test: test.t_test.p_value)
    if tests:
        parts.append(t_tests_table(tests[:_SHOWN], of=len(tests)).to_rich())
    return Group(*parts, Text(by_chance(document)))


def lead(document: Comparison) -> Lead:
    """Return one sentence that says how many are private, by whose word."""
    statuses = {row.name: row.guarantees for row in document.rows}
    kinds = [privacy_words(held.guarantee.status for held in guarantees) for guarantees in statuses.values()]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    parts = [f"{count} {'without any' if kind == 'no privacy' else kind}" for kind, count in counts.items()]
    return Lead(f"{document.data}, {over_seeds(document)}. Privacy of the methods: ", "; ".join(parts), ".")


def methods_table(document: Comparison, radius: float) -> Table:
    """Return a row for each setting and deployed function, in the order they were asked for."""
    caption = (
        f"Accuracy at radius {radius:g} ({radius_unit(document)}), worst attack for each example; certified: "
        f"right and certified at that radius, clean inputs. {over_seeds(document).capitalize()}. "
        "Seconds and memory of training are those since its last start; memory of different things does not compare; "
        "of runs with secret seeds both stay private."
    )
    numbers = [Column(text, is_number=True) for text in ("clean", "published protocol", "adaptive protocol")]
    headings: list[Heading] = ["method and what is deployed", "privacy", *numbers, "certified"]
    headings += [Column("training", is_number=True), "peak memory"]
    return Table.of(caption, headings, [_row(document, row, radius) for row in document.rows])


def _row(document: Comparison, row: ComparedRow, radius: float) -> list[Entry]:
    return [
        [Cell(row.name), Cell(f"{title_of(row.function)}, {row.test_examples:,} test images")],
        budgets(document, row),
        share(row.clean),
        *(share(row.attacked_at(protocol, radius)) for protocol in PROTOCOLS),
        _certified_cells(row, radius),
        amount(row.training_seconds, 1, " s"),
        f"{amount(row.peak_memory_mb, 1, ' MiB')} ({' / '.join(row.peak_memory_of) or 'not told'})",
    ]


def _certified_cells(row: ComparedRow, radius: float) -> list[Cell]:
    """Return what each rule certifies, each with its status; never one number for several."""
    cells = [Cell(share(entry), f"{entry.rule} rule", entry.status) for entry in row.certified_at(radius)]
    return cells or [Cell("no certificate")]


def budgets(document: Comparison, row: ComparedRow) -> list[Cell]:
    """Return each guarantee that a seed of the row has; the budget never without its status."""
    return [
        Cell(
            guarantee_line(held.guarantee),
            f"({document.named_seeds(held.seeds)})" if len(row.guarantees) > 1 else "",
            held.guarantee.status,
        )
        for held in row.guarantees
    ]


def flag_lines(document: Comparison) -> tuple[str, ...]:
    return tuple(
        f"{flag.level.upper()}, {flag.row}, {document.named_seeds([flag.seed])}: {flag.name}. {flag.evidence} "
        f"{flag.remedy}"
        for flag in document.flags
    )


def t_tests_table(tests: Sequence[ComparedTest], of: int | None = None) -> Table:
    """Return the differences over seeds with their p-values, and how to read them."""
    total = of or len(tests)
    some = f" The {len(tests)} smallest p-values of {total}." if total > len(tests) else ""
    caption = (
        "First minus second, accuracy in percentage points with its 95% interval. Paired where both have the same "
        f"seeds, else Welch's test. Of {total} tests, {total / 20:.1f} would come out below p = 0.05 by chance if "
        f"nothing differed.{some}"
    )
    headings: list[Heading] = [
        "first",
        "second",
        "measure",
        "difference",
        Column("p-value", is_number=True),
        "test",
        "seeds",
    ]
    rows: list[list[Entry]] = [
        [
            test.first,
            test.second,
            measure(test),
            Cell(points(test.t_test.difference), interval(test.t_test)),
            f"{test.t_test.p_value:.2g}",
            "paired" if test.t_test.paired else "Welch",
            " and ".join(str(seeds) for seeds in test.t_test.num_seeds),
        ]
        for test in tests
    ]
    return Table.of(caption, headings, rows)


def measure(test: ComparedTest) -> str:
    """Return what a t-test compares."""
    return "clean" if test.radius is None else f"{test.measure} protocol at radius {test.radius:g}"


def guarantee_cards(document: Comparison) -> tuple[GuaranteeCard, ...]:
    """Return a card for each guarantee of each method, with its objections."""
    by_name = {row.name: row.guarantees for row in document.rows}
    return tuple(
        card_of(
            held.guarantee,
            f"{name} ({privacy_words([held.guarantee.status])}), {document.named_seeds(held.seeds)}",
        )
        for name, guarantees in by_name.items()
        for held in guarantees
    )


def sources(document: Comparison) -> tuple[str, ...]:
    """Return what each protocol means, and where each rule of certification comes from."""
    protocols = [f"{name} protocol: {meaning}." for name, meaning in document.protocols.items()]
    rules = dict.fromkeys(
        f"{entry.rule} rule ({STATUS_WORDS[entry.status]}): {entry.source}."
        for row in document.rows
        for entry in row.certified
    )
    return (*protocols, *rules)


def over_seeds(document: Comparison) -> str:
    """Return what the ± of the numbers means."""
    seeds = document.seeds
    named = document.named_seeds(seeds)
    kind = "public" if document.public_seeds else "secret"
    spread = named if len(seeds) == 1 else f"mean ± standard deviation over {named}"
    return f"{spread} ({kind} seeds)"


def share(spread: Spread | None) -> str:
    """Return an accuracy over seeds.

    >>> one = Spread(mean=0.9012, stddev=None, min=0.9, max=0.9, per_seed={})
    >>> share(one.replace(stddev=0.0044)), share(one), share(None)
    ('90.1 ± 0.4%', '90.1%', '–')
    """
    return amount(spread, 100, "%")


def amount(spread: Spread | None, factor: float, unit_name: str) -> str:
    if spread is None:
        return DASH
    more = "" if spread.stddev is None else f" ± {factor * spread.stddev:,.1f}"
    return f"{factor * spread.mean:,.1f}{more}{unit_name}"


def telling_tests(document: Comparison) -> list[ComparedTest]:
    """Return the t-tests over three seeds or more: with two, intervals are wider than any difference."""
    return [test for test in document.t_tests if min(test.t_test.num_seeds) >= _FEWEST_SEEDS]


def by_chance(document: Comparison) -> str:
    """Return how many t-tests there are, how many look like findings, and how many would if there were none."""
    tests = telling_tests(document)
    withheld = len(document.t_tests) - len(tests)
    if not document.t_tests:
        return "No t-tests: they need two seeds of each method or more."
    why = (
        f"{withheld} two-tailed t-tests over two seeds are withheld: two seeds leave one degree of freedom, so that "
        "intervals are wider than differences of accuracies can be, and a small p-value is luck. Train three seeds of "
        "each or more."
    )
    if not tests:
        return why
    below = sum(test.t_test.p_value < _LEVEL for test in tests)
    sentence = (
        f"{len(tests)} two-tailed t-tests over seeds: {below} have p < 0.05, where {_LEVEL * len(tests):.2g} would by "
        "chance if nothing differed."
    )
    return f"{sentence} {why}" if withheld else sentence


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
    start = f"At radius {radius:g} ({runs[0].unit}) on the {title_of(function)}, these runs are right on "
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
    headings += [f"certified, {rule} rule, {title_of(certified)}" for rule, certified in kinds]
    caption = (
        f"Accuracy on the {title_of(function)} at radius {radius:g} ({runs[0].unit}), worst attack for each example, "
        "and certified accuracy of clean inputs at that radius, in %; gap in percentage points; 95% interval in "
        "brackets. Numbers are of as many test images as the row says, or as stands beside them."
    )
    rows = []
    for place, facts in enumerate(runs, 1):
        rows.append([*_identity(place, facts), *_attacked_cells(facts, function, radius, kinds)])
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
    attacked = at_radius(own.of_attack(WORST), radius) if own.function == function else None
    worst = [attacked if own.protocol.name == protocol else None for protocol in ("published", "adaptive")]
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


def _attacked_cells(facts: Facts, function: str, radius: float, kinds: Sequence[tuple[str, str]]) -> list[Cell]:
    gap = facts.gap(function, radius)
    worst = [share_cell(at_radius(facts.worst(p, function), radius)) for p in ("published", "adaptive")]
    return [*worst, gap_cell(gap.gap if gap else None), *(_certified_cell(facts, radius, *kind) for kind in kinds)]


def _certified_cell(facts: Facts, radius: float, rule: str, function: str) -> Cell:
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
    where = (
        "" if radius is None else f" on the {title_of(function)}, worst attack at radius {radius:g} ({runs[0].unit})"
    )
    left_out = len(runs) - len(budgeted)
    caption = f"Accuracy against ε{where}. Each dot is a run; lines join the means over seeds of the same setting."
    caption += f" Runs without any privacy guarantee are not on it: {left_out}." if left_out else ""
    return epsilon_curves(budgeted, function, radius, "epsilon").with_caption(caption)


NAMES = ("comparison.html", "comparison.svg")


def write_comparison(document: Comparison, folder: Path) -> list[Path]:
    """Write the page and its first figure, and return their paths; the same document gives the same bytes."""
    page = render(
        "comparison.html",
        title=f"{len({row.name for row in document.rows})} methods compared",
        eyebrow="stobatch comparison",
        source="from the runs' own files",
        lead=lead(document),
        section=comparison_section(document),
        guarantees=guarantee_cards(document),
        sources=sources(document),
    )
    figure = methods_svg(document, "comparison")
    paths = [folder / name for name in NAMES]
    write_atomically(paths[0], lambda file: file.write(page))
    write_atomically(paths[1], lambda file: file.write(figure))
    return paths
