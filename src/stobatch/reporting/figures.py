"""The report's curves, as SVG that stands inside the page and takes its colours from the page's style sheet."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from stobatch.reporting.format import STATUS_WORDS, title_of
from stobatch.reporting.page import LIGHT
from stobatch.reporting.summary import Facts
from stobatch.reporting.tables import kind_unit
from stobatch.results import WORST, HistoryRow, Kind, ProtocolTable, Share, at_radius

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STATUS_LOOKS: dict[str, dict[str, Any]] = {
    "proved": {"linestyle": "-", "markersize": 6.5},
    "claimed": {"linestyle": "--", "markersize": 4, "zorder": 3},
    "refuted": {"linestyle": ":", "markersize": 4, "zorder": 3},
}
"""What is not proved lies above and thinner, so that equal curves both show."""
PROTOCOL_MARKERS = {"published": "o", "adaptive": "s"}
_MARKERS = "o^vDs<>P"
_RC: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.parse_math": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LIGHT["line"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.titlecolor": LIGHT["ink"],
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.6,
    "xtick.color": LIGHT["line"],
    "ytick.color": LIGHT["line"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["muted"],
    "text.color": LIGHT["ink"],
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "legend.columnspacing": 1.4,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.08,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}


@dataclass(frozen=True)
class Chart:
    """A drawing that stands inside a page, with the width at which its letters are of the page's size.

    What is too wide for a phone scrolls there; the others shrink.
    """

    svg: Markup
    width: int
    caption: str = ""

    @property
    def is_wide(self) -> bool:
        return self.width > 480

    def with_caption(self, caption: str) -> Chart:
        return replace(self, caption=caption)


class Point(NamedTuple):
    """A share at a radius, with the ends of its band."""

    radius: float
    value: float
    low: float
    high: float

    @classmethod
    def of(cls, share: Share, radius: float) -> Point:
        return cls(radius, share.value, share.low, share.high)


@dataclass(frozen=True)
class Curve:
    """Shares against radii, with a band from low to high."""

    label: str
    rows: Sequence[Point]
    look: dict[str, Any]
    band: bool = True


@dataclass
class Panel:
    """The curves of one pair of axes."""

    title: str
    x_label: str
    curves: list[Curve] = field(default_factory=list)


def accuracy_curves(facts: Facts, name: str) -> Chart:
    """Draw accuracy against radius for each deployed function: both protocols, and what is certified."""
    panels: dict[tuple[str, str], Panel] = {}
    for function in facts.functions:
        panel = panels[function, facts.unit] = Panel(title_of(function), f"radius, {facts.unit}")
        panel.curves += [_worst_curve(facts, p, function) for p in facts.protocols if facts.entry(p, function)]
    for kind in facts.all_kinds:
        attacked = kind in facts.kinds(kind.function) and kind.function in facts.functions
        if attacked and not facts.certified(kind):
            continue
        key = (kind.function, kind_unit(kind))
        panel = panels.setdefault(key, Panel(title_of(kind.function), f"radius, {kind_unit(kind)}"))
        panel.curves.append(_certified_curve(facts, kind))
    return draw(list(panels.values()), name)


def attack_curves(facts: Facts, name: str) -> Chart | None:
    """Draw each adaptive attack on its own, and the worst of them for each example."""
    panels = []
    for function in facts.functions:
        entry = facts.entry("adaptive", function)
        if entry:
            curves = [_attack_curve(entry, attack, place) for place, attack in enumerate(entry.attacks)]
            worst = _from_clean(entry, WORST)
            look = {"color": LIGHT["adaptive"], "marker": "s", "linewidth": 2.0}
            curves.append(Curve("worst of them", worst, look, band=False))
            panels.append(Panel(title_of(function), f"radius, {facts.unit}", curves))
    return draw(panels, name, legend_in_panel=True) if panels else None


def learning_curve(history: Sequence[HistoryRow], name: str) -> Chart:
    """Draw accuracy on held-out test images while training."""
    with canvas(1, 4.8, 2.5) as (figure, (axes,)):
        axes.plot([row.step for row in history], [100 * row.test_accuracy for row in history], color=LIGHT["published"])
        axes.set(xlabel="training step", ylabel="accuracy, %", ylim=(-2, 102))
        return inline(figure, name)


def epsilon_curves(runs: Sequence[Facts], function: str, radius: float | None, name: str) -> Chart:
    """Draw accuracy against ε, one panel for each method: seeds as dots, their mean as a line."""
    methods = list(dict.fromkeys(facts.method for facts in runs))
    with canvas(len(methods), *_size(len(methods))) as (figure, places):
        for axes, method in zip(places, methods, strict=False):
            own = [facts for facts in runs if facts.method == method]
            _epsilon_panel(axes, own, function, radius)
            axes.set_title(method)
        shared_legend(figure, places)
        return inline(figure, name)


def _epsilon_panel(axes: Axes, runs: Sequence[Facts], function: str, radius: float | None) -> None:
    epsilons = sorted({facts.epsilon for facts in runs if facts.epsilon is not None})
    one_setting_each = len({facts.setting for facts in runs}) == len(epsilons)
    for label, colour, marker, values in _epsilon_series(runs, function, radius):
        axes.plot(*zip(*values, strict=True), linestyle="", marker=marker, color=LIGHT[colour], label=label)
        if one_setting_each:
            means = [fmean(y for x, y in values if x == epsilon) for epsilon in sorted({x for x, _ in values})]
            axes.plot(sorted({x for x, _ in values}), means, color=LIGHT[colour], linewidth=1.3)
    if epsilons[-1] > 10 * epsilons[0]:
        axes.set_xscale("log")
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.minorticks_off()
    statuses = " / ".join(dict.fromkeys(STATUS_WORDS[facts.status] for facts in runs))
    axes.set(xlabel=f"ε ({statuses})", ylabel="accuracy, %", ylim=(-2, 102))


def _epsilon_series(
    runs: Sequence[Facts], function: str, radius: float | None
) -> Iterator[tuple[str, str, str, list[tuple[float, float]]]]:
    """Yield label, colour, marker and (ε, accuracy in %) of what was measured; what was not is left out."""
    clean: list[tuple[float | None, Share | None]] = [
        (facts.epsilon, facts.clean(function or facts.main_function)) for facts in runs
    ]
    series = [("clean", "clean", "D", clean)]
    for protocol in ("published", "adaptive") if radius is not None else ():
        worst: list[tuple[float | None, Share | None]] = [
            (facts.epsilon, at_radius(facts.worst(protocol, function), radius or 0.0)) for facts in runs
        ]
        series.append((f"{protocol} protocol", protocol, PROTOCOL_MARKERS[protocol], worst))
    for label, colour, marker, shares in series:
        values = [(epsilon, 100 * share.value) for epsilon, share in shares if epsilon is not None and share]
        if values:
            yield label, colour, marker, values


def _worst_curve(facts: Facts, protocol: str, function: str) -> Curve:
    look = {"color": LIGHT[protocol], "marker": PROTOCOL_MARKERS[protocol]}
    rows = [
        Point.of(facts.clean(function), 0.0),
        *(Point.of(row, row.radius) for row in facts.worst(protocol, function)),
    ]
    return Curve(f"{protocol} protocol, worst attack", rows, look)


def _certified_curve(facts: Facts, kind: Kind) -> Curve:
    status = kind.status
    label = f"certified, {kind.name} rule ({STATUS_WORDS[status]})"
    look = {"color": LIGHT[status], "marker": "D", **STATUS_LOOKS[status]}
    shares = facts.certified(kind) or facts.all_certified(kind)
    return Curve(label, [Point.of(share, share.radius) for share in shares], look)


def _attack_curve(entry: ProtocolTable, attack: str, place: int) -> Curve:
    look = {
        "color": LIGHT[f"attack-{place % len(_MARKERS) + 1}"],
        "marker": _MARKERS[place % len(_MARKERS)],
        "linewidth": 1.1,
    }
    return Curve(attack, _from_clean(entry, attack), look, band=False)


def _from_clean(entry: ProtocolTable, attack: str) -> list[Point]:
    """Return one attack's accuracies, beginning at radius 0 with clean inputs."""
    return [Point.of(entry.clean_accuracy, 0.0), *(Point.of(row, row.radius) for row in entry.of_attack(attack))]


def draw(panels: Sequence[Panel], name: str, *, legend_in_panel: bool = False) -> Chart:
    """Return the panels as a part of the page, two in a row, with one legend or one each."""
    with canvas(len(panels), *_size(len(panels))) as (figure, places):
        for axes, panel in zip(places, panels, strict=False):
            for curve in panel.curves:
                plot(axes, curve)
            widest = max(row.radius for curve in panel.curves for row in curve.rows)
            axes.set(xlabel=panel.x_label, ylabel="accuracy, %", title=panel.title)
            axes.set(xlim=(-0.04 * widest, 1.04 * widest), ylim=(-2, 102))
            if legend_in_panel:
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
        if not legend_in_panel:
            shared_legend(figure, places)
        return inline(figure, name)


def plot(axes: Axes, curve: Curve) -> None:
    """Draw a curve, in percent, over its band."""
    radii = [row.radius for row in curve.rows]
    if curve.band:
        low, high = [100 * row.low for row in curve.rows], [100 * row.high for row in curve.rows]
        axes.fill_between(radii, low, high, color=curve.look["color"], alpha=0.13, linewidth=0)
    look = {"markeredgecolor": LIGHT["page"], "markeredgewidth": 0.6, **curve.look}
    axes.plot(radii, [100 * row.value for row in curve.rows], label=curve.label, **look)


def shared_legend(figure: Figure, places: Iterable[Axes]) -> None:
    entries = {label: line for axes in places for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        list(entries.values()), list(entries), loc="outside lower center", ncols=3 if len(entries) == 3 else 2
    )


def _size(panels: int) -> tuple[float, float]:
    rows = (panels + 1) // 2
    return (4.8 if panels == 1 else 10.4), 3.7 * rows


@contextmanager
def canvas(panels: int, width: float, height: float) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure of at most two panels in a row, drawn with this module's settings and not with the user's."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", _RC], after_reset=True):
        figure = Figure(figsize=(width, height), layout="constrained")
        columns = min(panels, 2)
        axes = list(figure.subplots((panels + 1) // 2, columns, squeeze=False).flat)
        for spare in axes[panels:]:
            spare.set_visible(False)
        yield figure, axes[:panels]


def inline(figure: Figure, name: str) -> Chart:
    """Return the figure as a part of the page: no outside names, ids of its own, and the page's colours."""
    from markupsafe import Markup

    text = _svg(figure, name, transparent=True)
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"| (width|height)="[\d.]+pt"', "", text)
    text = text.replace("xlink:href", "href")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for variable, colour in LIGHT.items():
        text = text.replace(colour, f"var(--{variable})")
    # What came out of a file went through matplotlib, which escapes it.
    return Chart(Markup(text), round(figure.get_figwidth() * 96))


def standalone(figure: Figure, name: str) -> bytes:
    """Return the figure as a file of its own, in the light colours, for a page that has none of ours."""
    figure.set_facecolor(LIGHT["page"])
    return _svg(figure, name, transparent=False).encode()


def _svg(figure: Figure, name: str, *, transparent: bool) -> str:
    """Return the figure as SVG; the same figure gives the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    if transparent:
        for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
            patch.set_facecolor("none")
    # The canvas itself: `savefig` draws twice, once for a layout that does not change from one to the other.
    svg: Any = FigureCanvasSVG(figure)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        svg.print_svg(out, metadata={"Date": None})
    return out.getvalue()
