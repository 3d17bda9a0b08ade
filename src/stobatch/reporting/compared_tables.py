"""A comparison in a terminal: a table for each radius, and the t-tests in short."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stobatch.reporting import compared_words as words
from stobatch.reporting.tables import STATUS_STYLES
from stobatch.reporting.words import STATUS_WORDS, spoken

_SHOWN = 10
"""T-tests that are printed, smallest p-value first."""
_HEADINGS = (
    *("method", "privacy", "clean", "published protocol", "adaptive protocol", "certified, clean inputs"),
    *("training", "peak memory"),
)


def comparison_tables(document: dict[str, Any]) -> RenderableType:
    """A row for each method and deployed function, in the order they were asked for."""
    parts: list[RenderableType] = [_at_radius(document, radius) for radius in document["radii"]]
    parts += [Text(f"{name} protocol: {meaning}") for name, meaning in document["protocols"].items()]
    parts.append(Text("training: seconds and memory since its last start; memory of different things does not compare"))
    return Group(*parts, *_flags(document), *_t_tests(document))


def _at_radius(document: dict[str, Any], radius: float) -> Table:
    table = Table(
        title=f"accuracy at radius {radius:g} ({words.radius_unit(document)}), worst attack for each example, "
        f"{words.over_seeds(document)}",
        title_justify="left",
        show_lines=True,
    )
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    for row in document["rows"]:
        table.add_row(
            f"{row['name']}\n{spoken(row['function'])}, {row['test_examples']:,} test examples",
            _lines([(STATUS_STYLES[status], said) for status, said in words.budgets(document, row)]),
            words.share(row["clean"]),
            *(words.share(words.attacked(row, protocol, radius)) for protocol in words.PROTOCOLS),
            _certified(row, radius),
            words.amount(row["training_seconds"], 1, " s"),
            words.memory(row),
        )
    return table


def _certified(row: dict[str, Any], radius: float) -> Text:
    """What each rule certifies, with who vouches for it."""
    found = [(STATUS_STYLES[entry["status"]], _rule(entry)) for entry in words.certified(row, radius)]
    return _lines(found or [("dim", "no certificate")])


def _rule(entry: dict[str, Any]) -> str:
    return f"{entry['rule']} rule ({STATUS_WORDS[entry['status']]}): {words.share(entry)}"


def _lines(styled: list[tuple[str, str]]) -> Text:
    return Text("\n").join(Text(said, style=style) for style, said in styled)


def _flags(document: dict[str, Any]) -> list[Text]:
    return [
        Text(f"{flag['level'].upper()}, {words.flagged(document, flag)}: {flag['name']}. {flag['evidence']}", "red")
        for flag in document["flags"]
    ]


def _t_tests(document: dict[str, Any]) -> list[RenderableType]:
    tests = sorted(document["t_tests"], key=lambda test: float(test["t_test"]["p_value"]))
    summary = Text(words.by_chance(document))
    if not tests:
        return [summary]
    some = f", the {_SHOWN} smallest p-values of {len(tests)}" if len(tests) > _SHOWN else ""
    table = Table(title=f"two-tailed t-tests, first minus second{some}", title_justify="left")
    for heading in ("first", "second", "measure", "difference, points", "p-value"):
        table.add_column(heading)
    for test in tests[:_SHOWN]:
        found = test["t_test"]
        table.add_row(
            *(test["first"], test["second"], measure(test)),
            f"{100 * found['difference']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]",
            f"{found['p_value']:.2g}",
        )
    return [table, summary]


def measure(test: dict[str, Any]) -> str:
    """What a t-test compares."""
    return "clean" if test["radius"] is None else f"{test['measure']} protocol at radius {test['radius']:g}"
