"""`attacks.attack` on modules of one's own: points lie where they should, and success is what the module says there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stobatch import attacks
from stobatch.attacks import ATTACKS
from stobatch.errors import DataError, ModelError, SettingError, UnitError
from stobatch.types import UNIT_RANGE, InputRange, Norm, Radius

ORDERS = {Norm.LINF: float("inf"), Norm.L2: 2.0, Norm.L1: 1.0}


def small(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(ATTACKS)),
    st.sampled_from(list(Norm)),
    st.sampled_from([UNIT_RANGE, InputRange(-1, 1), InputRange(0, 255)]),
    st.floats(1e-3, 2.0),
    st.integers(0, 2**20),
)
def test_every_point_lies_in_its_ball_and_in_the_range(
    name: str, norm: Norm, limits: InputRange, size: float, seed: int
) -> None:
    module = small(seed)
    inputs = limits.low + limits.width * torch.rand(5, 1, 3, 3).round(decimals=1)
    labels, before = torch.randint(3, (5,)), {key: value.clone() for key, value in module.state_dict().items()}
    found = attacks.attack(
        module, inputs, labels, size, norm=str(norm), input_range=limits, name=name, steps=7, queries=15
    )
    length = torch.linalg.vector_norm((found.points.double() - inputs.double()).flatten(1), ORDERS[norm], dim=1)
    assert (length <= size).all()
    assert torch.allclose(length, found.distance)
    assert ((found.points >= limits.low) & (found.points <= limits.high)).all()
    assert torch.equal(found.success, module(found.points).argmax(1) != labels)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


def test_a_linear_module_is_broken_exactly_where_it_can_be() -> None:
    module = nn.Linear(2, 2)
    module.load_state_dict({"weight": torch.tensor([[1.0, 1.0], [0.0, 0.0]]), "bias": torch.zeros(2)})
    inputs, labels = torch.tensor([[0.1, 0.1], [0.3, 0.3], [-0.1, 0.0]]), torch.tensor([0, 0, 0])
    found = attacks.attack(module, inputs, labels, Radius(0.2, Norm.LINF))
    assert found.success.tolist() == [True, False, True], "the last was lost before"
    assert repr(found) == "<apgd_ce: 2 of 3 inputs broken within linf 0.2 over [-1, 1]; the rest not proved>"
    towards = attacks.attack(module, inputs, torch.tensor([1, 1, 1]), 0.2, targeted=True)
    assert torch.equal(towards.success, found.success)


class Chance(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.flatten(1)[:, :3] + torch.randn(len(inputs), 3)


def test_what_would_end_in_a_wrong_accuracy_is_refused() -> None:
    module, inputs, labels = small(0), torch.zeros(4, 1, 3, 3), torch.zeros(4).long()
    with pytest.raises(SettingError, match=r"no attack 'apgd'.*apgd_ce"):
        attacks.attack(module, inputs, labels, 0.1, name="apgd")
    with pytest.raises(UnitError, match="no norm 'l3'"):
        attacks.attack(module, inputs, labels, 0.1, norm="l3")
    with pytest.raises(UnitError, match="Scale the inputs"):
        attacks.attack(module, inputs + 2, labels, 0.1)
    with pytest.raises(DataError, match="one label for each"):
        attacks.attack(module, inputs, labels[1:], 0.1)
    with pytest.raises(ModelError, match="different scores each time"):
        attacks.attack(Chance(), inputs, labels, 0.1)
    with pytest.raises(ModelError, match="probabilities, not logits"):
        attacks.attack(nn.Sequential(module, nn.Softmax(1)), inputs, labels, 0.1)
    with pytest.raises(ModelError, match=r"changes its '0\.num_batches_tracked'"):
        attacks.attack(nn.Sequential(nn.BatchNorm2d(1), module), inputs, labels, 0.1)


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_scores_that_are_nan_around_the_inputs_are_no_success(name: str) -> None:
    """The module is sound at the inputs, and NaN where an attack goes; FGSM never looks where it ends."""

    class Breaks(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            moved = inputs.flatten(1).abs().amax(1, keepdim=True) > 1e-3
            return inputs.flatten(1)[:, :3] + torch.tensor([2.0, 0.0, 0.0]) + torch.where(moved, torch.nan, 0.0)

    with pytest.raises(ModelError, match="NaN"):
        attacks.attack(Breaks(), torch.zeros(4, 1, 3, 3), torch.zeros(4).long(), 0.1, name=name, steps=3, queries=5)
