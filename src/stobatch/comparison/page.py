"""The page of a comparison: table, figures, t-tests, and what each method promises with what speaks against it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stobatch.comparison import table as words
from stobatch.comparison.table import measure
from stobatch.files import write_atomically
from stobatch.reporting.comparison import TEST_HEADINGS, t_test_cells, t_tests_caption
from stobatch.reporting.figures import (
    PROTOCOL_MARKERS,
    STATUS_LOOKS,
    Curve,
    Panel,
    Point,
    canvas,
    draw,
    inline,
    shared_legend,
    standalone,
)
from stobatch.reporting.format import STATUS_WORDS, chip, privacy_words, spoken
from stobatch.reporting.header import card_of
from stobatch.reporting.page import LIGHT, Html, bullets, folded, join, table, tag, void, whole_page
from stobatch.results import ComparedRow, Comparison, Spread

NAMES = ("comparison.html", "comparison.svg")


def write_comparison(document: Comparison, folder: Path) -> list[Path]:
    """The page and its first figure; the same document gives the same bytes."""
    contents = (_page(document).encode(), methods_svg(document, "comparison"))
    paths = [folder / name for name in NAMES]
    for path, content in zip(paths, contents, strict=True):
        _write(path, content)
    return paths


def _write(path: Path, content: bytes) -> None:
    write_atomically(path, lambda file: file.write(content))


def _page(document: Comparison) -> Html:
    main, *others = document.radii
    parts = [_lead(document), _table(document, main), _figure(document)]
    parts += [folded(f"The same at radius {radius:g}", _table(document, radius)) for radius in others]
    parts += [_curves(document), _flags(document), _t_tests(document), _guarantees(document), _measuring(document)]
    names = len({row.name for row in document.rows})
    return whole_page(f"{names} methods compared", "stobatch comparison", *parts, footer="from the runs' own files")


def _lead(document: Comparison) -> Html:
    """One sentence that says how many are private, by whose word."""
    statuses = {row.name: row.guarantees for row in document.rows}
    kinds = [" / ".join(dict.fromkeys(str(held.guarantee.status) for held in found)) for found in statuses.values()]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    said = [f"{count} {_promise(kind)}" for kind, count in counts.items()]
    start = f"{document.data}, {words.over_seeds(document)}. Privacy of the methods: "
    return tag("p", start, tag("b", "; ".join(said)), ".", class_="lead")


def _promise(kind: str) -> str:
    return "without any" if kind == "none" else " / ".join(STATUS_WORDS[status] for status in kind.split(" / "))


def _table(document: Comparison, radius: float) -> Html:
    caption = (
        f"Accuracy at radius {radius:g} ({words.radius_unit(document)}), worst attack for each example; certified: "
        f"right and certified at that radius, clean inputs. {words.over_seeds(document).capitalize()}. "
        "Seconds and memory of training are those since its last start; memory of different things does not compare."
    )
    headings = ["method and what is deployed", "privacy", "clean", "published protocol", "adaptive protocol"]
    headings += ["certified", "training", "peak memory"]
    return table(caption, headings, [_row(document, row, radius) for row in document.rows])


def _row(document: Comparison, row: ComparedRow, radius: float) -> list[object]:
    where = f"{spoken(row.function)}, {row.test_examples:,} test images"
    return [
        join([tag("b", row.name), void("br"), tag("small", where)]),
        join([_privacy(*budget) for budget in words.budgets(document, row)]),
        tag("b", words.share(row.clean)),
        *(tag("b", words.share(row.attacked_at(protocol, radius))) for protocol in words.PROTOCOLS),
        _certified(row, radius),
        words.amount(row.training_seconds, 1, " s"),
        words.memory(row),
    ]


def _privacy(status: str, said: str) -> Html:
    if status == "none":
        return tag("div", tag("span", said, class_="chip none"))
    return tag("div", chip(status), void("br"), tag("small", said))


def _certified(row: ComparedRow, radius: float) -> Html:
    """What each rule certifies, each with its status; never one number for several."""
    found = [
        tag(
            "div",
            tag("b", words.share(entry)),
            tag("small", f"{entry.rule} rule "),
            chip(entry.status),
        )
        for entry in row.certified_at(radius)
    ]
    return join(found) if found else tag("span", "no certificate", class_="muted")


def _figure(document: Comparison) -> Html:
    caption = (
        f"Every method at radius {document.radii[0]:g}; whiskers reach from the least seed to the best. Filled "
        "diamonds are proved, hollow ones only claimed, crosses refuted. Behind each name stands who vouches for its "
        "privacy."
    )
    return tag("figure", methods_figure(document, "methods"), tag("figcaption", caption))


def _curves(document: Comparison) -> Html:
    caption = (
        "Means over seeds; bands reach from the least seed to the best. Certified accuracy is of clean inputs: solid "
        "where proved, dashed where only claimed, dotted where refuted."
    )
    figure = tag("figure", radius_curves(document, "radii"), tag("figcaption", caption))
    return join([tag("h2", "Accuracy against radius"), figure])


def _flags(document: Comparison) -> Html:
    if not document.flags:
        return Html("")
    lines = [
        f"{flag.level}, {words.flagged(document, flag)}: {flag.name}. {flag.evidence} {flag.remedy}"
        for flag in document.flags
    ]
    return join([tag("h2", "What makes these numbers doubtful"), bullets(lines)])


def _t_tests(document: Comparison) -> Html:
    tests = document.t_tests
    parts = [tag("h2", "Two-tailed t-tests over seeds"), tag("p", words.by_chance(document))]
    if tests:
        rows = [[t.first, t.second, measure(t), *t_test_cells(t.t_test)] for t in tests]
        parts.append(table(t_tests_caption(len(tests)), ["first", "second", "measure", *TEST_HEADINGS], rows))
    return join(parts)


def _guarantees(document: Comparison) -> Html:
    """A card for each guarantee of each method, with its objections."""
    by_name = {row.name: row.guarantees for row in document.rows}
    cards = [
        card_of(
            held.guarantee,
            f"{name} ({privacy_words([held.guarantee.status])}), {document.named_seeds(held.seeds)}",
        )
        for name, guarantees in by_name.items()
        for held in guarantees
    ]
    return join([tag("h2", "What each method promises about its training data"), *cards])


def _measuring(document: Comparison) -> Html:
    protocols = [join([tag("b", f"{name} protocol"), f": {said}."]) for name, said in document.protocols.items()]
    sources = dict.fromkeys(
        f"{entry.rule} rule ({STATUS_WORDS[entry.status]}): {entry.source}."
        for row in document.rows
        for entry in row.certified
    )
    return join([tag("h2", "How it was measured"), bullets([*protocols, *sources])])


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CERTIFIED_LOOKS: dict[str, dict[str, Any]] = {
    "proved": {"marker": "D", "markersize": 6},
    "claimed": {"marker": "D", "markersize": 6, "markerfacecolor": "none"},
    "refuted": {"marker": "x", "markersize": 6},
}
"""Filled is proved and nothing else."""
_HEIGHTS = {"clean": -0.34, "published": -0.17, "adaptive": 0.0, "proved": 0.17, "claimed": 0.34, "refuted": 0.34}
"""Where a row's marks stand in it, so that equal ones do not hide each other."""
_PRIVACY_COLOURS = {"none": "refuted"}


def methods_figure(document: Comparison, name: str) -> Html:
    with _dots(document) as figure:
        return inline(figure, name)


def methods_svg(document: Comparison, name: str) -> bytes:
    with _dots(document) as figure:
        return standalone(figure, name)


def radius_curves(document: Comparison, name: str) -> Html:
    """Accuracy against radius, a panel for each row: attacked under each protocol, and certified."""
    panels = [Panel(row.label, f"radius, {words.radius_unit(document)}", _method_curves(row)) for row in document.rows]
    return draw(panels, name)


def _method_curves(row: ComparedRow) -> list[Curve]:
    curves = []
    for protocol in words.PROTOCOLS:
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
    """A line for each row at the first radius: clean, attacked, certified; whiskers from the least seed to the best."""
    rows, radius = document.rows, document.radii[0]
    with canvas(1, 10.4, 1.7 + 0.62 * len(rows)) as (figure, (axes,)):
        for place, row in enumerate(rows):
            _draw_row(axes, row, place, radius)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        for label, row in zip(axes.get_yticklabels(), rows, strict=True):
            status = str(row.guarantees[0].guarantee.status)
            label.set_color(LIGHT[_PRIVACY_COLOURS.get(status, status)])
        axes.set(xlim=(-2, 102), ylim=(len(rows) - 0.5, -0.5))
        axes.set_xlabel(f"accuracy at radius {radius:g} ({words.radius_unit(document)}), %")
        axes.grid(axis="x")
        shared_legend(figure, [axes])
        yield figure


def _draw_row(axes: Axes, row: ComparedRow, place: int, radius: float) -> None:
    _mark(axes, row.clean, place + _HEIGHTS["clean"], "clean", {"color": LIGHT["clean"], "marker": "o"})
    for protocol in words.PROTOCOLS:
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
