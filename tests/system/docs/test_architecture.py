"""The page about the house names files that exist and rooms that the import contract knows."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/architecture.md").read_text()


def walk(heading: str) -> list[str]:
    section = PAGE.split(f"## {heading}")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `(src/[\w/]+\.py)`", section, re.M)


def test_every_file_that_is_named_exists():
    named = re.findall(r"`(src/[\w/]+\.py)`", PAGE)
    assert named
    assert not [file for file in named if not (ROOT / file).exists()]


def test_the_walks_are_short_and_end_where_they_say():
    to_noise, to_bound = walk("From `stobatch train` to the noise"), walk("From `stobatch certify` to the bound")
    assert len(to_noise) <= 6
    assert len(to_bound) <= 5
    assert "def add_noise(" in (ROOT / to_noise[-1]).read_text()


def test_every_room_stands_in_the_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = " ".join(contracts[0]["layers"])
    rooms = {path.parent.name for path in (ROOT / "src/stobatch").glob("*/__init__.py")}
    assert rooms <= set(re.findall(r"stobatch\.(\w+)", layers))
    assert not [room for room in rooms if room not in PAGE]


def test_the_changelog_says_where_modules_went():
    rows = re.findall(r"^\| `([\w.]+)`(.*?) \| `([\w.]+)` \|$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert len(rows) > 100

    def stands(module: str) -> bool:
        path = ROOT / "src/stobatch" / module.replace(".", "/")
        return path.with_suffix(".py").exists() or (path / "__init__.py").exists()

    assert not [new for _, _, new in rows if not stands(new)]
