"""docs/results/scaling.md: how cost grows, measured exponents beside expected ones."""

from __future__ import annotations

from matplotlib.figure import Figure

from .records import FIRST, INK, SECOND, Record, lines_of, render, table
from .speed import names

_ROOM = 0.35
"""How far above the expected an exponent may be before a curve is said to grow faster than it should."""


def record() -> tuple[str, list[Record]]:
    """Return the newest record's name and its curves; of a curve that was measured again the later one."""
    name = max(name for name in names() if name.endswith("-scaling.txt"))
    curves = [curve for line in lines_of(name) for curve in line["curves"]]
    return name, list({(curve["call"], curve["against"]): curve for curve in curves}.values())


def page() -> str:
    name, curves = record()
    rows = [
        (
            curve["call"],
            f"{curve['against']} {curve['sizes'][0]:,} … {curve['sizes'][-1]:,}",
            f"{curve['seconds'][0]:.3g} … {curve['seconds'][-1]:.3g}",
            f"{curve['mebibytes'][0]:.0f} … {curve['mebibytes'][-1]:.0f}",
            f"{curve['exponents']['last three']:.2f}",
            f"{curve['expected']:g}",
            curve["why"],
        )
        for curve in curves
    ]
    header = ["call", "against", "CPU seconds", "MiB", "exponent", "expected at most", "why"]
    faster = [
        f"{curve['call']} against {curve['against']}"
        for curve in curves
        if curve["exponents"]["last three"] > curve["expected"] + _ROOM
    ]
    return render("scaling", curves=table(header, rows), faster=faster, record=name)


def figures() -> dict[str, Figure]:
    """Seconds and memory of every curve over its sizes, both relative to the smallest."""
    _, curves = record()
    columns = 4
    lines = -(-len(curves) // columns)
    figure = Figure(figsize=(11, 2.3 * lines), layout="constrained")
    for place, curve in enumerate(curves):
        axes = figure.add_subplot(lines, columns, place + 1)
        sizes = curve["sizes"]
        axes.loglog(sizes, curve["seconds"], "o-", color=FIRST, markersize=3, label="seconds")
        first = curve["seconds"][-1] / sizes[-1] ** curve["expected"]
        axes.loglog(
            sizes, [first * size ** curve["expected"] for size in sizes], ":", color=INK, label="expected slope"
        )
        axes.loglog(sizes, [max(value, 0.1) / 1000 for value in curve["mebibytes"]], "s--", color=SECOND, markersize=3,
                    label="GiB")  # fmt: skip
        axes.set_title(f"{curve['call']}\nagainst {curve['against']}", fontsize=7)
        axes.tick_params(labelsize=6, which="both")
        if not place:
            axes.legend(fontsize=6, frameon=False)
    return {"scaling": figure}
