"""`machine.memory_mb` is kept: rows that pass at once follow from what a few take; on a GPU bytes are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.gpu_memory import CASES, MIB, step_bytes

from stobatch.config import MachineConfig
from stobatch.models import budget_mb, classifier


@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts bytes of a GPU")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_keeps_to_the_budget(case: tuple[Any, ...]) -> None:
    assert step_bytes(*case)[0] <= case[2] * MIB


@given(each=st.integers(1, 50 * MIB), fixed=st.integers(0, 200 * MIB), memory_mb=st.integers(16, 100_000))
def test_rows_follow_from_what_a_few_take(each: int, fixed: int, memory_mb: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classifier, "_taken", lambda device, trial, rows: fixed + rows * each)
        rows = classifier.rows_by_trial(torch.device("cuda"), memory_mb, lambda rows: None)
    assert rows >= 1
    assert rows == 1 or fixed + rows * each <= memory_mb * MIB
    if fixed <= 24 * each:  # not so few that the budget is not used
        assert fixed + (rows + 2) * each > 0.75 * memory_mb * MIB


@given(each=st.integers(64 * 1024, 4 * MIB), workspace=st.integers(0, 64 * MIB), memory_mb=st.integers(4096, 100_000))
def test_a_workspace_of_few_rows_does_not_make_rows_look_cheap(each: int, workspace: int, memory_mb: int) -> None:
    """As cuDNN's, which is large for a few rows and gone with more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classifier, "_taken", lambda _device, _trial, rows: rows * each + (workspace if rows < 16 else 0))
        rows = classifier.rows_by_trial(torch.device("cuda"), memory_mb, lambda rows: None)
    assert rows * each <= memory_mb * MIB


@given(each=st.integers(256 * 1024, 4 * MIB), workspace=st.integers(0, 2000), above=st.integers(0, 500))
def test_a_workspace_of_more_rows_than_were_tried_is_kept_to(each: int, workspace: int, above: int) -> None:
    """As on an H200, where a step of 104 rows took 900 MiB beside them, and trials of few had not shown it."""

    def taken(rows: int) -> int:
        return rows * each + (workspace * MIB if rows > above else 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classifier, "_taken", lambda _device, _trial, rows: taken(rows))
        rows = classifier.rows_by_trial(torch.device("cuda"), 512, lambda rows: None)
    assert rows == 1 or taken(rows) <= 512 * MIB


def test_the_default_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        total_memory = 140 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    assert budget_mb(MachineConfig()) == 512
    assert budget_mb(MachineConfig(device="cuda:1")) == 140 * 1024 // 8
    assert budget_mb(MachineConfig(device="cuda", memory_mb=64)) == 64
