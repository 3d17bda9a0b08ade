"""Clipping in one pass where layers are known, with the gradients of all other parameters formed beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch import dp
from stobatch.dp import clipping
from stobatch.dp.clipping import (
    Batch,
    bytes_per_example,
    clipped_sum_by_example,
    clipped_sum_in_one_pass,
    clipped_sum_mixed,
    clipper_for,
    parameters_without_rule,
)


class Mixed(nn.Module):
    """Layers that one pass clips, a layer that it does not know, and a parameter that no layer holds."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.LayerNorm(36)
        self.scale, self.last, self.tied = nn.Parameter(torch.full((), 1.5)), nn.Linear(36, 3), tied

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.norm(torch.relu(self.conv(inputs))[:, :, :3, :3].flatten(1)) * self.scale
        scores: Tensor = self.last(values)
        return scores + self.last.bias.square() if self.tied else scores


def losses(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="none")


def batch(count: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 2, 5, 5, generator=generator), torch.arange(count) % 3


def test_the_sum_and_the_norms_are_those_of_formed_gradients() -> None:
    module = Mixed()
    for clip_norm in (0.1, 1e3):
        fast, slow = (way(module, losses, batch(), clip_norm) for way in (clipped_sum_mixed, clipped_sum_by_example))
        assert torch.allclose(fast.norms, slow.norms, rtol=1e-5)
        assert fast.gradients.keys() == slow.gradients.keys() == dict(module.named_parameters()).keys()
        for name, value in slow.gradients.items():
            assert torch.allclose(fast.gradients[name], value, rtol=1e-4, atol=1e-6)


def test_it_is_chosen_where_it_is_right_and_forms_what_is_left_over_alone() -> None:
    module = Mixed()
    assert parameters_without_rule(module) == ["scale", "norm.weight", "norm.bias"]
    assert clipper_for(module, losses, batch()) is clipped_sum_mixed
    assert bytes_per_example(module, clipped_sum_mixed) == 4 * (1 + 36 + 36)
    assert bytes_per_example(module, clipped_sum_by_example) == 4 * sum(p.numel() for p in module.parameters())
    assert bytes_per_example(module, clipped_sum_in_one_pass) == 0


def test_a_weight_that_is_used_outside_of_its_layer_is_found_out() -> None:
    assert clipper_for(Mixed(tied=True), losses, batch()) is clipped_sum_by_example


def test_a_network_of_parameters_alone_and_one_that_does_not_train_are_served() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(50, 3))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.flatten(1) @ self.weight

    assert clipper_for(Alone(), losses, batch()) is clipped_sum_by_example
    assert clipper_for(Mixed().requires_grad_(False), losses, batch()) is clipped_sum_in_one_pass


def test_frozen_parameters_are_neither_formed_nor_counted() -> None:
    module = Mixed()
    module.norm.requires_grad_(False)
    assert parameters_without_rule(module) == ["scale"]
    fast, slow = (way(module, losses, batch(), 0.1) for way in (clipped_sum_mixed, clipped_sum_by_example))
    assert torch.allclose(fast.norms, slow.norms, rtol=1e-5)
    assert not any(name.startswith("norm") for name in fast.gradients)


def test_an_example_with_a_nan_gradient_adds_nothing() -> None:
    inputs, labels = batch()
    inputs[2] = torch.inf
    found = clipped_sum_mixed(Mixed(), losses, (inputs, labels), 0.1)
    kept = torch.arange(6) != 2
    without = clipped_sum_mixed(Mixed(), losses, (inputs[kept], labels[kept]), 0.1)
    assert not found.norms[2].isfinite()
    for name, value in without.gradients.items():
        assert torch.allclose(found.gradients[name], value)


@pytest.mark.parametrize("count", [0, 1, 40])
def test_one_example_moves_the_sum_by_at_most_the_clipping_norm(count: int) -> None:
    module, (inputs, labels) = Mixed(), batch(41)
    more, fewer = (
        dp.clipped_sum(module, losses, (inputs[:n] * 100, labels[:n]), clip_norm=0.5) for n in (count + 1, count)
    )
    moved = torch.cat([(more[name] - fewer[name]).flatten() for name in more]).norm()
    assert float(moved) <= 0.5 * (1 + 1e-5)
    assert not more.in_one_pass


def test_a_part_that_is_left_out_of_the_norm_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: formed gradients that no norm counts, so that the sum moves by more than C."""
    whole = clipping.squared_norm_bounds
    monkeypatch.setattr(clipping, "squared_norm_bounds", lambda values: 0 * whole(values))
    found = clipped_sum_mixed(Mixed(), losses, batch(1), 0.1)
    assert float(torch.cat([value.flatten() for value in found.gradients.values()]).norm()) > 0.1 * (1 + 1e-3)
