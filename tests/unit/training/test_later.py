"""Answers of a GPU that are read later: judged in order, none lost; on a CPU at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stobatch.config import TrainingConfig
from stobatch.errors import ModelError
from stobatch.later import Later
from stobatch.models.validators import unchanged
from stobatch.training.descent import Descent


class Slow(Later):
    """As on a GPU: an answer is there when somebody looks."""

    def ask(self, flags: Tensor, judge: object) -> None:
        class There:
            def synchronize(self) -> None:
                return

        self._open.append((There(), flags, judge))  # type: ignore[arg-type]


def test_answers_are_judged_in_order_and_none_is_lost() -> None:
    seen: list[list[bool]] = []
    later = Slow()
    for place in range(4):
        later.ask(torch.tensor([place % 2 == 0]), seen.append)
    later.look(leave=2)
    assert seen == [[True], [False]]
    later.look()
    assert seen == [[True], [False], [True], [False]]
    later.look()
    assert len(seen) == 4


def test_on_a_cpu_an_answer_is_judged_at_once() -> None:
    seen: list[list[bool]] = []
    Later().ask(torch.tensor([True, False]), seen.append)
    assert seen == [[True, False]]


@pytest.mark.parametrize("later", [Later(), Slow()], ids=["CPU", "GPU"])
def test_a_step_that_is_no_number_is_found(later: Later) -> None:
    weight = nn.Parameter(torch.ones(2))
    descent = Descent(TrainingConfig(steps=3), {"w": weight}, [torch.optim.SGD([weight], lr=0.1)], later)

    def step(value: float) -> None:
        descent.step(0, {"w": torch.tensor([1.0, value])})
        later.look()

    step(1.0)
    with pytest.raises(ModelError, match="released of w is not a number"):
        step(torch.nan)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_network_that_writes_down_is_found_on_a_gpu() -> None:
    network, later = nn.BatchNorm1d(2, device="cuda"), Later()
    with unchanged(network, later):
        network(torch.randn(8, 2, device="cuda"))
    with pytest.raises(ModelError, match="changes its"):
        later.look()
