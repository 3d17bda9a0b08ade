"""Make docs/results, their figures and the README's numbers from the records: `python docs/make_results.py`.

Sources are results/ and benchmarks/results; the same records give the same bytes, which a test compares. A record of
other settings than a recipe has today is refused.
"""

from __future__ import annotations

import sys
from pathlib import Path

from result_pages import audits, baselines, figures, paper, practice, published, readme, scaling, sound, speed
from result_pages.records import FIGURES, ROOT, save

PAGES = {
    "sound": sound,
    "practice": practice,
    "baselines": baselines,
    "published": published,
    "paper": paper,
    "audits": audits,
    "speed": speed,
    "scaling": scaling,
}
README = ROOT / "README.md"


def pages() -> dict[Path, str]:
    """Return the text of every page that is made, the README with its part made again."""
    before, _, rest = README.read_text().partition(readme.START)
    _, _, after = rest.partition(readme.END)
    made = {ROOT / "docs" / "results" / f"{name}.md": module.page() for name, module in PAGES.items()}
    return {**made, README: f"{before}{readme.block()}{after}"}


def draw(folder: Path) -> None:
    """Draw every figure into a folder."""
    for module in (audits, baselines, readme, scaling):
        for name, figure in module.figures().items():
            save(figure, name, folder)
    figures.draw(folder)


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    draw(FIGURES)
