"""The page of a comparison and its figure, as files."""

from __future__ import annotations

from pathlib import Path

from stobatch.files import write_atomically
from stobatch.reporting.comparison import comparison_section, guarantee_cards, lead, sources
from stobatch.reporting.comparison_figures import methods_svg
from stobatch.reporting.page import render
from stobatch.results import Comparison

NAMES = ("comparison.html", "comparison.svg")


def write_comparison(document: Comparison, folder: Path) -> list[Path]:
    """Return the page and its first figure; the same document gives the same bytes."""
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
    contents = (page, methods_svg(document, "comparison"))
    paths = [folder / name for name in NAMES]
    for path, content in zip(paths, contents, strict=True):
        _write(path, content)
    return paths


def _write(path: Path, content: bytes) -> None:
    write_atomically(path, lambda file: file.write(content))
