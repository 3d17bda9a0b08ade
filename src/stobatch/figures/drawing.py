"""A figure's picture, its table and its caption, from points alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from stobatch.evaluation.statistics import compare_over_seeds
from stobatch.figures.catalogue import METHODS, OURS, PaperFigure
from stobatch.figures.records import main_attack, own_settings
from stobatch.reporting.figures import Curve, Point, canvas, plot, shared_legend, standalone
from stobatch.reporting.page import LIGHT
from stobatch.reporting.table import DASH, Cell, Column, Table
from stobatch.results import WORST, TTest
from stobatch.results.figure import AccuracyKind, FigureMade, FigurePoint, FigureTest, PaperNumber
from stobatch.types import Status

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VOID = "Seeds are public, so every ε here is void as a guarantee; titles say who vouches for it with secret seeds."
_LOOKS: dict[tuple[str, str], dict[str, Any]] = {
    ("published protocol", "measured"): {"color": LIGHT["published"], "marker": "o"},
    ("published protocol", "claimed"): {"color": LIGHT["claimed"], "marker": "^", "linestyle": "--"},
    ("published protocol", "proved"): {"color": LIGHT["consistent"], "marker": "^"},
    ("adaptive protocol", "measured"): {"color": LIGHT["adaptive"], "marker": "s"},
    ("adaptive protocol", "claimed"): {"color": LIGHT["refuted"], "marker": "v", "linestyle": "--"},
    ("adaptive protocol", "proved"): {"color": LIGHT["attack-3"], "marker": "v"},
    ("proved", "proved"): {"color": LIGHT["proved"], "marker": "D", "markersize": 6},
}
_PAPER: dict[str, Any] = {
    "color": LIGHT["refuted"],
    "marker": "x",
    "linestyle": "",
    "markersize": 7,
    "markeredgewidth": 1.6,
}
_REFERENCE: dict[str, Any] = {
    "color": LIGHT["proved"],
    "marker": "D",
    "markerfacecolor": "none",
    "markeredgecolor": LIGHT["proved"],
    "markersize": 3.5,
    "linestyle": ":",
    "linewidth": 1.2,
}
_COMPARED: dict[str, Any] = {"color": LIGHT["attack-2"], "marker": "<", "linestyle": "--"}
_STEP_LINES = ("-", "--", "-.", ":")
_MISSING = "not measured yet"


@dataclass(frozen=True)
class _Shown:
    """One panel: a method with its changes, and one kind of accuracy."""

    figure: PaperFigure
    method: str
    settings: tuple[str, ...]
    kind: AccuracyKind
    points: Sequence[FigurePoint]
    """Of all methods."""

    @property
    def own(self) -> list[FigurePoint]:
        return [p for p in self.points if p.method == self.method and own_settings(p) == self.settings]

    @property
    def title(self) -> str:
        kind = f", {self.kind}" if len(self.figure.kinds) > 1 and self.method not in OURS else ""
        changes = ", ".join(change.partition(".")[2] or change for change in self.settings)
        return f"{METHODS[self.method].title}{kind}" + (f"\n{changes}" if changes else "")

    @property
    def ticks(self) -> tuple[float, ...]:
        return self.figure.epsilons if self.figure.axis == "epsilon" else self.figure.radii


def figure_svg(figure: PaperFigure, points: Sequence[FigurePoint], paper: Sequence[PaperNumber]) -> bytes:
    """Return the picture; the same points give the same bytes."""
    panels = list(_panels(figure, points))
    smoke = any(point.scale != "full" for point in points)
    rows = (len(panels) + 1) // 2
    with canvas(len(panels), 10.4, 1.4 + 3.4 * rows) as (drawn, places):
        for axes, panel in zip(places, panels, strict=True):
            _draw(axes, panel, paper)
        name = f"Figure {figure.number} of the paper, made again"
        warning = "SMOKE: a few steps on a few images, no result. " if smoke else ""
        drawn.suptitle(f"{name}\n{warning}{VOID}", fontsize=9)
        shared_legend(drawn, places)
        return standalone(drawn, f"paper-figure-{figure.number}")


def _panels(figure: PaperFigure, points: Sequence[FigurePoint]) -> Iterator[_Shown]:
    for method in figure.methods:
        changed = {own_settings(point) for point in points if point.method == method}
        # The recipe itself has a panel even where it was not measured.
        for settings in sorted({(), *changed}):
            for kind in figure.kinds[:1] if method in OURS else figure.kinds:
                yield _Shown(figure, method, settings, kind, points)


def _draw(axes: Axes, panel: _Shown, paper: Sequence[PaperNumber]) -> None:
    figure = panel.figure
    _draw_paper(axes, panel, [n for n in paper if (n.method, n.kind) == (panel.method, panel.kind)])
    curves = list(_curves(panel))
    for curve in curves:
        plot(axes, curve)
    if compared := _as_compared(panel):
        plot(axes, Curve("certified on clean inputs as the paper compares (claimed)", compared, _COMPARED))
    _draw_attacks(axes, panel)
    if panel.method not in OURS and (reference := _reference(panel)):
        plot(axes, Curve("sound at the same ε and radius, certified (proved)", reference, _REFERENCE, band=False))
    if not curves:
        axes.text(0.5, 0.5, _MISSING, transform=axes.transAxes, ha="center", color=LIGHT["muted"])
    gaps = [tick for tick in panel.ticks if not any(row.radius == tick for curve in curves for row in curve.rows)]
    said = f" ({_MISSING}: {', '.join(f'{tick:g}' for tick in gaps)})" if curves and gaps else ""
    axes.set_xticks(panel.ticks, [f"{tick:g}" for tick in panel.ticks])
    label = "ε" if figure.axis == "epsilon" else "radius, l∞ over [-1, 1]"
    span = panel.ticks[-1] - panel.ticks[0]
    axes.set(xlabel=f"{label}{said}", ylabel="accuracy, %", title=panel.title, ylim=(-2, 102))
    axes.set_xlim(panel.ticks[0] - 0.05 * span, panel.ticks[-1] + 0.05 * span)


def _draw_paper(axes: Axes, panel: _Shown, stated: Sequence[PaperNumber]) -> None:
    for number in stated:
        at = number.epsilon if panel.figure.axis == "epsilon" else number.radius
        if at is None:
            label = "the paper, on average (claimed)"
            axes.axhline(100 * float(number.accuracy or 0), color=_PAPER["color"], linestyle=":", label=label)
        else:
            axes.plot([at], [100 * float(number.accuracy or 0)], label="the paper (claimed)", **_PAPER)


def _curves(panel: _Shown) -> Iterator[Curve]:
    """What stands for each protocol: the worst attack, with a band over seeds."""
    own = [point for point in panel.own if main_attack(point) and _belongs(point, panel)]
    for (protocol, status), look in _LOOKS.items():
        same = [point for point in own if (point.protocol, point.status) == (protocol, status)]
        several = sorted({point.steps for point in same})
        for place, steps in enumerate(several):
            rows = _rows(panel, [point for point in same if point.steps == steps])
            changed = {"linestyle": _STEP_LINES[place % len(_STEP_LINES)]} if len(several) > 1 else {}
            yield Curve(_label(protocol, status, steps if len(several) > 1 else None), rows, {**look, **changed})


def _as_compared(panel: _Shown) -> list[Point]:
    """What the paper's rule certifies of clean inputs."""
    claimed = [p for p in panel.own if p.protocol == "published protocol" and p.attack == "none" and _belongs(p, panel)]
    return _rows(panel, claimed)


def _belongs(point: FigurePoint, panel: _Shown) -> bool:
    """What is proved stands beside both kinds of accuracy."""
    return point.kind_of_accuracy == panel.kind or point.protocol == "proved" or panel.method in OURS


def _label(protocol: str, status: str, steps: int | None) -> str:
    told = "" if steps is None else f", T_a = {steps:,}"
    if protocol == "proved":
        return "certified on clean inputs (proved)"
    if status == "measured":
        return f"{protocol}, worst attack{told} (measured)"
    return f"certified at what the {protocol} found{told} ({status})"


def _rows(panel: _Shown, points: Sequence[FigurePoint]) -> list[Point]:
    """The mean over seeds at each tick; a method that takes no notice of ε stands at all of them."""
    found = []
    for tick in panel.ticks:
        shares = [float(point.accuracy) for point in points if point.at in (tick, None)]
        if shares:
            found.append(Point(tick, fmean(shares), min(shares), max(shares)))
    return found


def _draw_attacks(axes: Axes, panel: _Shown) -> None:
    """Each attack of the published protocol by itself, small."""
    alone = [p for p in panel.own if p.protocol == "published protocol" and p.attack not in (WORST, "none")]
    each = [point for point in alone if _belongs(point, panel)]
    marks = [(p.at, 100 * float(p.accuracy)) for p in each if p.at is not None and p.at in panel.ticks]
    if marks:
        look: dict[str, Any] = {"color": LIGHT["published"], "marker": ".", "markersize": 3, "alpha": 0.6}
        axes.plot(*zip(*marks, strict=True), linestyle="", label="published protocol, each attack alone", **look)


def _reference(panel: _Shown) -> list[Point]:
    """The best that is proved of what has both guarantees, tick by tick."""
    proved = [p for p in panel.points if p.method in OURS and p.protocol == "proved" and not own_settings(p)]
    each = [_rows(panel, [point for point in proved if point.method == method]) for method in OURS]
    best: dict[float, Point] = {}
    for row in (row for rows in each for row in rows):
        if row.radius not in best or row.value > best[row.radius].value:
            best[row.radius] = row
    return [best[tick] for tick in sorted(best)]


def figure_table(figure: PaperFigure, points: Sequence[FigurePoint], paper: Sequence[PaperNumber]) -> Table:
    """Return every number of the picture: what the paper states beside what was measured and what is proved."""
    columns: list[str | Column] = [
        *("method", "ε", Column("radius", is_number=True), "T_a", "accuracy", "the paper (claimed)"),
        *("published protocol", "adaptive protocol", "certified, clean inputs", "images", "seeds", "steps", "sources"),
    ]
    caption = "Means over seeds under the worst attack; radii are l∞ over [-1, 1]."
    return Table.of(caption, columns, _table_rows(figure, points, paper))


def budget(method: str, epsilon: float | None) -> Cell:
    """Return ε with who vouches for it; that is void where a seed is public, whoever would vouch with secret ones.

    >>> str(budget("sound", 0.2)), str(budget("published", 0.2)), str(budget("pixeldp", None))
    ('0.2 void; with secret seeds (proved)', '0.2 (refuted)', '–')
    """
    if epsilon is None:
        return Cell(DASH)
    status = METHODS[method].privacy
    return Cell(f"{epsilon:g}", "" if status is Status.REFUTED else "void; with secret seeds", str(status))


def _table_rows(
    figure: PaperFigure, points: Sequence[FigurePoint], paper: Sequence[PaperNumber]
) -> Iterator[list[str | Cell]]:
    for panel in _panels(figure, points):
        own = [point for point in panel.own if _belongs(point, panel)]
        for epsilon, radius, steps in _rows_of(panel, own, paper):
            here = [point for point in own if (point.epsilon, point.radius) == (epsilon, radius) and main_attack(point)]
            main = [point for point in here if point.protocol != "published protocol" or point.steps == steps]
            stated = [number for number in paper if _states(number, panel, epsilon, radius)]
            yield [
                METHODS[panel.method].label + "".join(f", {change}" for change in panel.settings),
                budget(panel.method, epsilon),
                f"{radius:g}",
                f"{steps:,}",
                panel.kind,
                ", ".join(f"{100 * float(n.accuracy or 0):.1f}%" for n in stated) or DASH,
                *(_cell(main, protocol) for protocol in ("published protocol", "adaptive protocol", "proved")),
                ", ".join(sorted({f"{point.images:,}" for point in main})),
                ", ".join(sorted({str(point.seed) for point in main})),
                ", ".join(sorted({f"{point.training_steps:,}" for point in main})),
                ", ".join(sorted({point.source for point in main})),
            ]


def _rows_of(
    panel: _Shown, own: Sequence[FigurePoint], paper: Sequence[PaperNumber]
) -> list[tuple[float | None, float, int]]:
    """The places that something is known of."""
    figure = panel.figure
    measured = {(point.epsilon, point.radius) for point in own if main_attack(point)}
    stated = {
        (epsilon, radius)
        for epsilon in figure.epsilons
        for radius in figure.radii
        if not panel.settings and any(_states(number, panel, epsilon, radius) for number in paper)
    }
    places = sorted(measured | stated, key=lambda place: (place[0] or 0.0, place[1]))
    steps = sorted({p.steps for p in own if p.protocol == "published protocol" and p.steps} or figure.steps[:1])
    return [(*place, count) for place in places for count in steps]


def _states(number: PaperNumber, panel: _Shown, epsilon: float | None, radius: float) -> bool:
    at, stated = (epsilon, number.epsilon) if panel.figure.axis == "epsilon" else (radius, number.radius)
    return (number.method, number.kind) == (panel.method, panel.kind) and stated is not None and stated == at


def _cell(points: Sequence[FigurePoint], protocol: str) -> Cell:
    shares = [float(point.accuracy) for point in points if point.protocol == protocol]
    statuses = sorted({point.status for point in points if point.protocol == protocol})
    if not shares:
        return Cell(DASH)
    spread = f"{100 * min(shares):.1f} to {100 * max(shares):.1f}" if len(shares) > 1 else ""
    status = "" if statuses == ["measured"] else statuses[0]
    return Cell(f"{100 * fmean(shares):.1f}%", spread, status)


def t_tests(figure: PaperFigure, points: Sequence[FigurePoint]) -> list[FigureTest]:
    """Return two-tailed tests over seeds between the published mechanism and each baseline, place by place.

    The paper's p-values are over other repetitions, which it does not name.
    """
    by_place: dict[tuple[str, float, float], dict[str, dict[int, float]]] = {}
    for point in points:
        plain = main_attack(point) and not own_settings(point) and point.kind_of_accuracy == figure.kinds[0]
        if plain and point.protocol != "proved" and point.epsilon is not None and point.seed is not None:
            place = (point.protocol, float(point.epsilon), float(point.radius))
            by_place.setdefault(place, {}).setdefault(point.method, {})[point.seed] = float(point.accuracy)
    found = []
    for (protocol, epsilon, radius), methods in sorted(by_place.items()):
        ours = methods.pop("published", {})
        for method, theirs in methods.items():
            if min(len(ours), len(theirs)) > 1:
                test: TTest = compare_over_seeds(ours, theirs)
                found.append(
                    FigureTest(baseline=method, protocol=protocol, epsilon=epsilon, radius=radius, t_test=test)
                )
    return found


def tests_table(tests: Sequence[FigureTest]) -> Table:
    """Return the t-tests as a table."""
    return Table.of(
        "Two-tailed t-tests over seeds: StoBatch minus the other, in points.",
        ["against", "protocol", "ε", "radius", "difference", "95% interval", "p", "seeds"],
        (
            [
                METHODS[one.baseline].label,
                one.protocol,
                f"{one.epsilon:g}",
                f"{one.radius:g}",
                f"{100 * one.t_test.difference:+.1f}",
                f"{100 * one.t_test.low:+.1f} to {100 * one.t_test.high:+.1f}",
                f"{one.t_test.p_value:.2g}",
                " and ".join(map(str, one.t_test.num_seeds)),
            ]
            for one in tests
        ),
    )


def figure_page(
    made: FigureMade, figure: PaperFigure, points: Sequence[FigurePoint], paper: Sequence[PaperNumber], picture: str
) -> str:
    """Return a page with the picture, its caption, its numbers, the t-tests, and what is missing."""
    title = f"# Figure {figure.number}, made again"
    smoke = (
        ""
        if made.scale == "full"
        else "**Smoke: a few steps on a few images. It shows that all runs, and is no result.**\n\n"
    )
    missing = [f"- {line}" for line in made.missing] or ["Nothing."]
    parts = [
        f"{title}\n\n{smoke}![Figure {figure.number}]({picture})",
        f"{figure.caption} {VOID}",
        figure_table(figure, points, paper).to_markdown().rstrip(),
        *([tests_table(made.t_tests).to_markdown().rstrip()] if made.t_tests else []),
        "## Missing\n\n" + "\n".join(missing),
    ]
    return "\n\n".join(parts) + "\n"
