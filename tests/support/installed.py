"""A package as pip would leave it on the path, its entry points with it, without pip."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

EXTENSION = Path(__file__).with_name("extension")


def lay_out(site: Path, name: str, entry_points: dict[str, dict[str, str]]) -> None:
    """Write a package's metadata into a folder of installed packages."""
    folder = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    lines = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{point} = {place}" for point, place in points.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines))


def install_extension(site: Path) -> Path:
    """Put the example package into a folder of installed packages, as its pyproject.toml says."""
    project = tomllib.loads((EXTENSION / "pyproject.toml").read_text())["project"]
    lay_out(site, project["name"], project["entry-points"])
    shutil.copytree(EXTENSION / "stobatch_example", site / "stobatch_example")
    return site
