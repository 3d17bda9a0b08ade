"""Read records, and write numbers and tables as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
Record = dict[str, Any]

PRIVACY = "privacy (in brackets: with secret seeds)"
FIRST, SECOND, THIRD, INK = "#3b6ea8", "#c8553d", "#8a8a8a", "#444444"


def record(name: str) -> Any:
    """Return what a file of results/ holds."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def records(name: str) -> list[Record]:
    found: list[Record] = record(name)
    return found


def lines_of(path: str) -> list[Record]:
    """Return the JSON objects of a file that has one on each line, between other lines perhaps."""
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines() if line.startswith("{")]


def percent(share: float) -> str:
    """Write a share as a percentage; halves go up, so that equal records print equally."""
    return f"{100 * share + 1e-9:.1f}%"


def mean(values: Iterable[float]) -> str:
    return percent(fmean(values))


def slashed(shares: Iterable[float]) -> str:
    return " / ".join(f"{100 * share + 1e-9:.1f}" for share in shares) + "%"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table; a bar inside of a cell would end it."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def link(*names: str) -> str:
    """Link to records from a page of docs/results."""
    return ", ".join(f"[{name}](../../{name})" for name in names)


def render(name: str, **values: object) -> str:
    """Fill the template of a page; a name that it does not get is an error."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"percent": percent, "spec": format}
    return environment.get_template(f"{name}.md.jinja").render(**values, link=link)


def save(figure: Figure, name: str, folder: Path) -> None:
    """Write a figure so that equal records give equal bytes: no date, no version, no random identifiers."""
    # The canvas itself: `savefig` draws twice, once for a layout that does not change from one to the other.
    canvas = FigureCanvasSVG(figure)
    with rc_context({"svg.hashsalt": "stobatch"}):
        canvas.print_svg(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
