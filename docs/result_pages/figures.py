"""The paper's figures made again, as `stobatch figure` draws them: docs/figures/paper-figure-N.svg."""

from __future__ import annotations

from pathlib import Path

from stobatch.figures.catalogue import FIGURES
from stobatch.figures.drawing import figure_svg
from stobatch.figures.records import file_of, read_paper, read_points

from .records import ROOT


def draw(folder: Path) -> None:
    """Draw every figure that there are points of, measured or stated by the paper."""
    records = ROOT / "results" / "figures"
    for number, figure in FIGURES.items():
        points, paper = read_points(file_of(records, figure, "full"), figure, "full"), read_paper(records, figure)
        (folder / f"paper-figure-{number}.svg").write_bytes(figure_svg(figure, points, paper))
