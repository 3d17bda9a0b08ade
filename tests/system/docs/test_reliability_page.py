"""The page on reliability says what its records say, and the records say that nothing went wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    path = Path(__file__).parents[3] / "docs" / "make_reliability.py"
    spec = importlib.util.spec_from_file_location("make_reliability", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_from_the_records(maker: ModuleType) -> None:
    assert maker.PAGE.read_text() == maker.page(maker.records()), "run python docs/make_reliability.py"


VERBS = {"train", "certify", "attack", "evaluate", "audit", "report", "verify", "shard", "compare"}


def test_every_kill_was_survived(maker: ModuleType) -> None:
    first, mended = (maker.records()[name]["verbs"] for name in ("kills", "kills_train"))
    assert set(first) == VERBS
    for verb, one in (first | mended).items():
        assert one["same_bits"] == one["kills"] >= (200 if verb == "train" else 50), verb
        assert one["killed_at_work"] > one["kills"] / 2, verb
    for one in (*first.values(), *mended.values()):
        assert one["left_over"] == one.get("undercounted", 0) == one.get("overcounted", 0) == 0
    ranks = maker.records()["ranks"]
    assert ranks["kills"] == ranks["same_bits"] == ranks["one_line"] >= 30
    assert ranks["left_over"] == ranks["undercounted"] == ranks["overcounted"] == 0


def test_every_signal_was_obeyed(maker: ModuleType) -> None:
    signals = maker.records()["signals"]
    assert signals["obeyed"] == signals["tried"] == len(signals["moments"]) == 44


def test_no_hostile_input_was_too_much(maker: ModuleType) -> None:
    fuzz = maker.records()["fuzz"]
    assert fuzz["tracebacks"] == fuzz["wrong"] == fuzz["hung"] == 0
    assert fuzz["cases"] >= 1_000_000
    assert fuzz["cases"] == fuzz["accepted"] + fuzz["refused"] == sum(one["cases"] for one in fuzz["surfaces"].values())
