"""Tests stand where they are looked for: every folder of them is run, and those of a room carry the room's name."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"


def test_every_test_is_run() -> None:
    paths = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    found = set(TESTS.rglob("test_*.py"))
    run = {file for path in paths for file in (ROOT / path).rglob("test_*.py")}
    assert found
    assert not found - run, "add their folder to testpaths in pyproject.toml"


def test_every_room_of_unit_tests_is_a_room_of_the_library() -> None:
    rooms = {path.stem for path in (ROOT / "src" / "stobatch").iterdir() if path.is_dir() or path.suffix == ".py"}
    tested = {path.stem for path in (TESTS / "unit").iterdir() if path.name != "__pycache__"}
    assert not tested - rooms, "named after nothing in src/stobatch"


def test_what_is_run_as_on_an_older_cpu_is_there() -> None:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (names,) = (line.split(":=")[1].split() for line in text.splitlines() if line.startswith("PORTABLE :="))
    assert len(names) > 5
    assert not [name for name in names if not (TESTS / name).exists()]
