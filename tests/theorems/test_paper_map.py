"""Every numbered item that the code registers is named by a test in this folder, so the map cannot rot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stobatch import paper

TEXTS = {path.name: path.read_text() for path in Path(__file__).parent.glob("test_*.py")}


def files_that_mention(name: str) -> list[str]:
    exactly = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    return [file for file, text in TEXTS.items() if file != Path(__file__).name and exactly.search(text)]


@pytest.mark.parametrize("name", paper.items())
def test_the_item_has_a_test(name: str) -> None:
    assert files_that_mention(name), f"no file in tests/theorems mentions {name}"


def test_every_item_has_a_home_a_summary_and_a_verdict() -> None:
    for item in paper.items().values():
        assert item.summary, item
        assert item.verdict.endswith("."), item
        assert (Path(item.file).read_text().splitlines()[item.line - 1]).strip(), item


def test_a_name_is_found_exactly_and_not_as_a_part_of_another() -> None:
    assert files_that_mention("Eq. 31") == ["test_theorem_2.py"]
    assert files_that_mention("Eq. 999") == []
