"""Residual networks with centred kernels: what they compute, and that clipping knows each example's gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.dp.clipping import (
    Batch,
    clipped_sum_by_example,
    clipped_sum_in_one_pass,
    clipper_for,
    perturbed_weights,
)
from stobatch.dp.layer_gradients import ConvGradients, split_bfloat16, squared_norm_bounds, weighted_rows
from stobatch.errors import ModelError
from stobatch.models import build_layered
from stobatch.models import residual as residual_module
from stobatch.models.layered import Layered
from stobatch.models.residual import CentredConv2d, ResidualBlock
from stobatch.training.trainable import working_precision

NETWORK = "avgpool 2, centred 4 3+1, residual 4 2, residual 8 4/2, groupnorm 4, relu, avgpool 2, linear"
VIEWS = 3


def network() -> Layered:
    return build_layered(NETWORK, (3, 8, 8), 5, torch.Generator().manual_seed(3))


def examples(count: int = 4) -> Batch:
    views = torch.rand(count, VIEWS, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return views, torch.arange(count) % 5


def losses(module: nn.Module, batch: Batch) -> Tensor:
    views, labels = batch
    each = F.cross_entropy(module(views.flatten(0, 1)), labels.repeat_interleave(VIEWS), reduction="none")
    return 20 * each.view(len(labels), VIEWS).mean(1)


def length(gradients: dict[str, Tensor]) -> float:
    return float(torch.cat([value.flatten() for value in gradients.values()]).double().norm())


@settings(deadline=None, max_examples=20)
@given(shift=st.floats(-10, 10), seed=st.integers(0, 99))
def test_what_is_common_to_a_kernel_or_a_patch_is_not_seen(shift: float, seed: int) -> None:
    layer = CentredConv2d(2, 3, 3)
    generator = torch.Generator().manual_seed(seed)
    nn.init.normal_(layer.weight, generator=generator)
    images = torch.rand(2, 2, 6, 6, generator=generator)
    before = layer(images).detach()
    assert torch.allclose(layer(images + shift), before, atol=1e-3)
    with torch.no_grad():
        layer.weight.add_(shift)
    assert torch.allclose(layer(images), before, atol=1e-3)


def test_a_block_is_its_parts() -> None:
    block = network().layers[3]
    assert isinstance(block, ResidualBlock)
    values = torch.rand(2, 4, 4, 4)
    active = F.relu(F.group_norm(values, 4, block.first_norm.weight, block.first_norm.bias))  # type: ignore[arg-type]
    inner = F.conv2d(active, block.first.centred(), stride=2, padding=1)
    inner = F.relu(F.group_norm(inner, 4, block.second_norm.weight, block.second_norm.bias))  # type: ignore[arg-type]
    outer = F.conv2d(inner, block.second.centred(), padding=1)
    assert isinstance(block.shortcut, CentredConv2d)
    assert torch.allclose(block(values), outer + F.conv2d(active, block.shortcut.centred(), stride=2), atol=1e-5)


@pytest.mark.parametrize("word", ["residual 8", "residual 8 3", "residual 0 1", "centred 4", "residual 8 4/0"])
def test_what_is_no_block_is_refused(word: str) -> None:
    with pytest.raises((ModelError, ValueError)):
        build_layered(f"{word}, linear", (4, 8, 8), 5, torch.Generator())


def test_one_pass_finds_the_gradients_that_are_formed() -> None:
    model = network()
    assert clipper_for(model, losses, examples()) is clipped_sum_in_one_pass
    with perturbed_weights(model):
        fast = clipped_sum_in_one_pass(model, losses, examples(), 1.0)
        slow = clipped_sum_by_example(model, losses, examples(), 1.0)
    assert torch.allclose(fast.norms, slow.norms, rtol=1e-4)
    assert bool((fast.norms >= slow.norms * (1 - 1e-6)).all())
    for name, value in slow.gradients.items():
        assert float((fast.gradients[name] - value).norm()) <= 1e-4 * float(value.norm()) + 1e-6


def test_gradients_of_the_kernels_that_are_used_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: clipping forgets that kernels are centred; the public probe sends it the slow way."""
    monkeypatch.setattr(residual_module._CentredGradients, "_from_rows", ConvGradients._from_rows)
    assert clipper_for(network(), losses, examples()) is clipped_sum_by_example


def longest_in_bfloat16() -> float:
    model, found = network(), 0.0
    views, labels = examples(6)
    with working_precision("bfloat16", torch.device("cpu")):
        for row in range(len(labels)):
            one = clipped_sum_in_one_pass(model, losses, (views[row : row + 1], labels[row : row + 1]), 1.0)
            assert all(value.dtype is torch.float32 for value in one.gradients.values())
            found = max(found, length(one.gradients))
    return found


def test_a_contribution_in_bfloat16_is_at_most_c() -> None:
    assert 0.99 < longest_in_bfloat16() <= 1 + 1e-5


def test_a_gradient_that_is_rounded_after_its_norm_was_taken_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: what is added is not what was measured, but its bfloat16 numbers rounded away from zero."""
    plain = residual_module._CentredGradients.weighted_sum

    def rounded(self: ConvGradients, weights: Tensor) -> dict[str, Tensor]:
        assert self.formed is not None
        self.formed = self.formed * (1 + 2**-7)
        return plain(self, weights)

    monkeypatch.setattr(residual_module._CentredGradients, "weighted_sum", rounded)
    assert longest_in_bfloat16() > 1 + 1e-3


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), size=st.floats(1e-6, 1e6))
def test_bfloat16_loses_nothing_of_weights_and_squares(seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(16, generator=generator) * size
    assert torch.equal(split_bfloat16(weights).double().sum(0), weights.double())
    values = (torch.randn(16, 3, 5, generator=generator) * size).bfloat16()
    exact = values.double().square().sum((1, 2))
    assert bool((squared_norm_bounds(values) >= exact).all())
    assert torch.allclose(squared_norm_bounds(values), exact, rtol=1e-4)
    summed = torch.tensordot(weights.double(), values.double(), 1)
    assert torch.allclose(weighted_rows(weights, values).double(), summed, rtol=1e-5, atol=1e-5 * size**2)
