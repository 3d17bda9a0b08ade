"""A thousand steps: in the memory of fifty, and in seconds."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracles import digits, seeded
from torch import Tensor

from stobatch.attacks import ATTACKS, Ball, Budget, Goal, Plain
from stobatch.types import Norm, Radius

SHAPE = (1, 64, 64)
"""With 16 examples a tensor of points takes a quarter of a megabyte: the allocator gives it back when it is freed."""
EARLY, LATE = 50, 1000
BOUND = 20e6
"""Bytes; one tensor of points kept at every step would be 250e6, at every tenth still 25e6."""


def resident() -> int:
    """Bytes of memory that the process occupies now; what was freed and is kept for later does not count."""
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(name: str, steps: int, *, keep: Callable[[Tensor], None] = lambda x: None, asking: bool = False) -> int:
    """How much memory an attack takes between its fiftieth look at the model and its last."""
    weight = torch.randn(64 * 64, 2, generator=seeded()) / 64**2
    looks, sizes = 0, dict[int, int]()

    def scores(x: Tensor) -> Tensor:
        nonlocal looks
        keep(x)
        looks += 1
        if looks in (EARLY, steps):
            sizes[looks] = resident()
        return x.flatten(1) @ weight + torch.tensor([5.0, 0.0])

    around = Ball.around(digits(16, SHAPE, dtype=torch.float32).requires_grad_(asking), Radius(0.1, Norm.LINF))
    ATTACKS[name](Budget(steps=steps, queries=steps)).run(Plain(scores), around, Goal(torch.zeros(16).long()), seeded())
    return sizes[steps] - sizes[EARLY]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's account of memory")
@pytest.mark.parametrize(("name", "asking"), [("ifgsm", True), ("apgd_ce", False), ("square", False)])
def test_a_thousand_steps_take_no_more_memory_than_fifty(name: str, asking: bool) -> None:
    """Also for inputs that ask for gradients themselves: no graph may reach from step to step."""
    assert growth(name, LATE, asking=asking) < BOUND


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's account of memory")
def test_points_that_are_kept_are_noticed() -> None:
    """The broken twin keeps a copy at every step, for a fifth of the steps."""
    kept: list[Tensor] = []
    assert growth("ifgsm", LATE // 5, keep=lambda x: kept.append(x.detach().clone())) > BOUND


@pytest.mark.parametrize("norm", sorted(Norm))
def test_a_thousand_steps_take_seconds(norm: Norm) -> None:
    weight = torch.randn(16, 2, generator=seeded()) / 16
    around, goal = Ball.around(digits(4, dtype=torch.float32), Radius(0.1, norm)), Goal(torch.zeros(4).long())
    start = time.process_time()
    ATTACKS["ifgsm"](Budget(steps=LATE)).run(
        Plain(lambda x: x.flatten(1) @ weight + torch.tensor([5.0, 0.0])), around, goal, seeded()
    )
    assert time.process_time() - start < 15
