"""A comparison in a terminal: a table for each radius, and the t-tests in short."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stobatch.reporting.format import STATUS_WORDS, spoken, unit
from stobatch.reporting.terminal import STATUS_STYLES, guarantee_line
from stobatch.results import CertifiedSpread, ComparedFlag, ComparedRow, ComparedTest, Comparison, Spread
from stobatch.types import Status

_SHOWN = 10
"""T-tests that are printed, smallest p-value first."""
_HEADINGS = (
    *("method", "privacy", "clean", "published protocol", "adaptive protocol", "certified, clean inputs"),
    *("training", "peak memory"),
)


def comparison_tables(document: Comparison) -> RenderableType:
    """A row for each method and deployed function, in the order they were asked for."""
    parts: list[RenderableType] = [_at_radius(document, radius) for radius in document.radii]
    parts += [Text(f"{name} protocol: {meaning}") for name, meaning in document.protocols.items()]
    parts.append(Text("training: seconds and memory since its last start; memory of different things does not compare"))
    return Group(*parts, *_flags(document), *_t_tests(document))


def _at_radius(document: Comparison, radius: float) -> Table:
    table = Table(
        title=f"accuracy at radius {radius:g} ({radius_unit(document)}), worst attack for each example, "
        f"{over_seeds(document)}",
        title_justify="left",
        show_lines=True,
    )
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    for row in document.rows:
        table.add_row(
            f"{row.name}\n{spoken(row.function)}, {row.test_examples:,} test examples",
            _lines([(STATUS_STYLES[status], said) for status, said in budgets(document, row)]),
            share(row.clean),
            *(share(row.attacked_at(protocol, radius)) for protocol in PROTOCOLS),
            _certified(row, radius),
            amount(row.training_seconds, 1, " s"),
            memory(row),
        )
    return table


def _certified(row: ComparedRow, radius: float) -> Text:
    """What each rule certifies, with who vouches for it."""
    found = [(STATUS_STYLES[entry.status], _rule(entry)) for entry in row.certified_at(radius)]
    return _lines(found or [("dim", "no certificate")])


def _rule(entry: CertifiedSpread) -> str:
    return f"{entry.rule} rule ({STATUS_WORDS[entry.status]}): {share(entry)}"


def _lines(styled: list[tuple[str, str]]) -> Text:
    return Text("\n").join(Text(said, style=style) for style, said in styled)


def _flags(document: Comparison) -> list[Text]:
    return [
        Text(f"{flag.level.upper()}, {flagged(document, flag)}: {flag.name}. {flag.evidence}", "red")
        for flag in document.flags
    ]


def _t_tests(document: Comparison) -> list[RenderableType]:
    tests = sorted(document.t_tests, key=lambda test: test.t_test.p_value)
    summary = Text(by_chance(document))
    if not tests:
        return [summary]
    some = f", the {_SHOWN} smallest p-values of {len(tests)}" if len(tests) > _SHOWN else ""
    table = Table(title=f"two-tailed t-tests, first minus second{some}", title_justify="left")
    for heading in ("first", "second", "measure", "difference, points", "p-value"):
        table.add_column(heading)
    for test in tests[:_SHOWN]:
        found = test.t_test
        table.add_row(
            *(test.first, test.second, measure(test)),
            f"{100 * found.difference:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]",
            f"{found.p_value:.2g}",
        )
    return [table, summary]


def measure(test: ComparedTest) -> str:
    """What a t-test compares."""
    return "clean" if test.radius is None else f"{test.measure} protocol at radius {test.radius:g}"


PROTOCOLS = ("published", "adaptive")


def radius_unit(document: Comparison) -> str:
    return unit(document.norm, document.input_range)


def over_seeds(document: Comparison) -> str:
    """What the ± of the numbers means."""
    seeds = document.seeds
    named = document.named_seeds(seeds)
    kind = "public" if document.public_seeds else "secret"
    spread = named if len(seeds) == 1 else f"mean ± standard deviation over {named}"
    return f"{spread} ({kind} seeds)"


def share(spread: Spread | None) -> str:
    """An accuracy over seeds.

    >>> one = Spread(mean=0.9012, stddev=None, min=0.9, max=0.9, per_seed={})
    >>> share(one.replace(stddev=0.0044)), share(one), share(None)
    ('90.1 ± 0.4%', '90.1%', '–')
    """
    return amount(spread, 100, "%")


def amount(spread: Spread | None, factor: float, unit_name: str) -> str:
    if spread is None:
        return "–"
    more = "" if spread.stddev is None else f" ± {factor * spread.stddev:,.1f}"
    return f"{factor * spread.mean:,.1f}{more}{unit_name}"


def budgets(document: Comparison, row: ComparedRow) -> list[tuple[str, str]]:
    """Status and words of each guarantee that a seed of the row has; the budget never without its status."""
    found = []
    for held in row.guarantees:
        status = held.guarantee.status
        words = "no privacy" if status is Status.NONE else guarantee_line(held.guarantee)
        some = f" ({document.named_seeds(held.seeds)})" if len(row.guarantees) > 1 else ""
        found.append((str(status), words + some))
    return found


def flagged(document: Comparison, flag: ComparedFlag) -> str:
    return f"{flag.row}, {document.named_seeds([flag.seed])}"


def memory(row: ComparedRow) -> str:
    return f"{amount(row.peak_memory_mb, 1, ' MiB')} ({' / '.join(row.peak_memory_of) or 'not measured'})"


def by_chance(document: Comparison) -> str:
    """How many t-tests there are, how many look like findings, and how many would if there were none."""
    count = len(document.t_tests)
    if not count:
        return "No t-tests: they need two seeds of each method or more."
    return (
        f"{count} two-tailed t-tests over seeds: {document.t_tests_below_level} have p < 0.05, where "
        f"{document.t_tests_below_level_by_chance:g} would by chance if nothing differed."
    )
