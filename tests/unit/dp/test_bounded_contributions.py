"""No example moves a clipped sum further than C or reaches another's part of it: what the privacy proof needs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_loop import (
    BOXED,
    NETWORKS,
    PICTURE,
    STACKS,
    agrees,
    certified,
    difference,
    examples,
    flat,
    largest_change,
    layered,
    length,
    natural,
    natural_and_certified,
    oracle,
    views,
)
from torch import Tensor, nn

from stobatch.bounds.boxes import affine_radius
from stobatch.dp import layer_gradients
from stobatch.dp.clipping import (
    Batch,
    ClippedSum,
    Clipper,
    Losses,
    clipped_sum_by_example,
    clipped_sum_in_one_pass,
)
from stobatch.dp.layer_gradients import LinearGradients

HOSTILE = [0.0, 1e-200, 1e-12, 1.0, 1e4, 1e12, 1e80, 1e160, 1e308, math.inf, -math.inf, math.nan]


@settings(max_examples=40)
@given(
    name=st.sampled_from(["two linear", "conv with stride and padding", "two convs", "wide conv"]),
    losses=st.sampled_from([natural, views, *BOXED]),
    scales=st.lists(st.sampled_from(HOSTILE), min_size=2, max_size=5),
    clip_norm=st.sampled_from([1e-3, 1.0, 50.0]),
    seed=st.integers(0, 1000),
)
@pytest.mark.parametrize("by", [clipped_sum_in_one_pass, clipped_sum_by_example])
def test_no_example_moves_the_sum_further_than_c(
    by: Clipper, name: str, losses: Losses, scales: list[float], clip_norm: float, seed: int
) -> None:
    """Inputs of any size, infinite and undefined ones included."""
    description, shape = STACKS[name]
    network = layered(description.replace("squash 2 -0.5 0.5, ", ""), shape, seed).double()
    inputs, labels = examples(shape, losses, len(scales), seed)
    inputs *= torch.tensor(scales).double().reshape(-1, *[1] * (inputs.ndim - 1))
    assert largest_change(network, losses, (inputs, labels), clip_norm, by) <= clip_norm * (1 + 1e-6)


@pytest.mark.parametrize("by", [clipped_sum_in_one_pass, clipped_sum_by_example])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_example_that_is_not_finite_adds_nothing(by: Clipper, bad: float) -> None:
    network, batch = layered("conv 3 3, relu, linear", PICTURE).double(), examples(PICTURE)
    inputs = batch[0].clone()
    inputs[2, 0, 3, 3] = bad
    rest = torch.tensor([0, 1, 3, 4])
    found = by(network, natural, (inputs, batch[1]), 0.5)
    assert difference(found.gradients, by(network, natural, (batch[0][rest], batch[1][rest]), 0.5).gradients) < 1e-12
    assert not bool(found.norms[2].isfinite())
    assert bool(found.norms[rest].isfinite().all())
    inputs[:, 0, 3, 3] = bad
    assert length(by(network, natural, (inputs, batch[1]), 0.5).gradients) == 0


def opposed(network: nn.Module, batch: Batch) -> Tensor:
    """Two views that all but cancel, times a weight."""
    first, second = network(batch[0][:, 0]), network(batch[0][:, 1])
    return (first - second).sum(1) * batch[1]


def in_one_call(network: nn.Module, batch: Batch) -> Tensor:
    first, second = network(batch[0].flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
    return (first - second).sum(1) * batch[1]


def spread_against_centre(network: nn.Module, batch: Batch) -> Tensor:
    """W a - |W| r with r all but equal to |a|: the gradient is short, its two parts are long."""
    assert isinstance(network, nn.Linear)
    return (network(batch[0][:, 0].abs()) - affine_radius(network, batch[0][:, 1].abs())).sum(1) * batch[1]


CANCELLING = [
    (opposed, False),
    (opposed, True),
    (in_one_call, False),
    (in_one_call, True),
    (spread_against_centre, False),
]


@pytest.mark.parametrize(("losses", "picture"), CANCELLING)
def test_long_parts_that_cancel_are_clipped_all_the_same(losses: Losses, picture: bool) -> None:
    """In float32 an inner product of such rows may come out as 0: the example would seem short and go unclipped."""
    torch.manual_seed(0)
    network: nn.Module = nn.Linear(20, 5, bias=False)
    if picture:
        network = nn.Sequential(nn.Conv2d(5, 30, 2, bias=False), nn.Flatten())
    elif losses is spread_against_centre:
        network.weight.data.abs_()
    first = torch.randn(60, 1, *((5, 2, 2) if picture else (20,)))
    both = torch.cat([first, first + 1e-4 * torch.randn_like(first)], 1)
    batch = (both, torch.full((60,), 1e5))
    assert float(oracle(network, losses, batch, 1.0).norms.min()) > 10
    for row in range(60):
        alone = clipped_sum_in_one_pass(network, losses, (both[row : row + 1], batch[1][row : row + 1]), 1.0)
        assert length(alone.gradients) <= 1 + 1e-4
    assert largest_change(network, losses, batch, 1.0, clipped_sum_in_one_pass) <= 1 + 1e-3


def test_trusting_rounded_inner_products_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_gradients, "_cancellation_allowance", lambda size, *_: torch.zeros_like(size))
    with pytest.raises(AssertionError):
        test_long_parts_that_cancel_are_clipped_all_the_same(opposed, False)
    with pytest.raises(AssertionError):
        test_long_parts_that_cancel_are_clipped_all_the_same(opposed, True)


def test_the_allowance_for_rounding_costs_next_to_nothing() -> None:
    """Where rows do not cancel, norms in float32 are a ten-thousandth too long at most."""
    network, batch = flat(nn.Conv2d(2, 24, 5), nn.ReLU()), examples(PICTURE, views, 50)
    fast = clipped_sum_in_one_pass(network, views, (batch[0].float(), batch[1]), 1.0).norms.double()
    true = clipped_sum_by_example(network.double(), views, batch, 1.0).norms
    ratio = fast / true
    assert 1 - 1e-6 <= float(ratio.min()) <= float(ratio.max()) <= 1 + 1e-4


def clipped_by_the_batch(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedSum:
    whole = clipped_sum_in_one_pass(network, losses, batch, math.inf)
    weight = min(1.0, clip_norm / length(whole.gradients)) if len(batch[0]) else 1.0
    return ClippedSum({name: weight * value for name, value in whole.gradients.items()}, whole.norms)


def views_clipped_apart(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedSum:
    count = batch[0].shape[1]
    return clipped_sum_in_one_pass(
        network, natural, (batch[0].flatten(0, 1), batch[1].repeat_interleave(count)), clip_norm
    )


def test_clipping_the_batch_is_caught() -> None:
    """One example turns the whole sum around: it moves by up to 2C."""
    network = layered("linear", (4,)).double()
    inputs, labels = torch.ones(4, 4).double(), torch.zeros(4).long()
    inputs[0] *= -1e3
    assert largest_change(network, natural, (inputs, labels), 1e-3, clipped_by_the_batch) > 1.5e-3
    assert largest_change(network, natural, (inputs, labels), 1e-3, clipped_sum_in_one_pass) <= 1e-3 * (1 + 1e-6)


def test_clipping_views_apart_is_caught() -> None:
    network, batch = layered("conv 3 3, relu, linear", PICTURE).double(), examples(PICTURE, views)
    assert largest_change(network, views, batch, 1e-2, views_clipped_apart) > 1.2e-2
    assert largest_change(network, views, batch, 1e-2, clipped_sum_in_one_pass) <= 1e-2 * (1 + 1e-6)


def without_bias(gradients: LinearGradients) -> Tensor:
    return gradients._weight_squared_norms()


def without_cross_term(gradients: LinearGradients) -> Tensor:
    parts = [layer_gradients._gram(*rows)[0] for rows in ((gradients.a, gradients.g), (gradients.r, gradients.h))]
    return sum(parts) + gradients.g.sum(1).square().sum(1)


def without_other_rows(gradients: LinearGradients) -> Tensor:
    """Rows of one example taken for orthogonal."""
    return (gradients.a.square().sum(2) * gradients.g.square().sum(2)).sum(1) + gradients.g.sum(1).square().sum(1)


@pytest.mark.parametrize(
    ("twin", "losses"),
    [
        (without_bias, natural),
        (without_cross_term, natural_and_certified),
        (without_cross_term, certified),
        (without_other_rows, views),
    ],
)
def test_a_forgotten_part_of_the_norm_is_caught(
    twin: Callable[[LinearGradients], Tensor], losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It differs from the oracle, and some example is longer than C."""
    network, batch = layered("linear 5, tanh, linear", (4,)).double(), examples((4,), losses, 20)
    batch = (batch[0] / 4, batch[1])
    clip_norm = 0.01
    assert largest_change(network, losses, batch, clip_norm, clipped_sum_in_one_pass) <= clip_norm * (1 + 1e-6)
    slow = oracle(network, losses, batch, clip_norm)
    monkeypatch.setattr(LinearGradients, "squared_norms", twin)
    assert not agrees(clipped_sum_in_one_pass(network, losses, batch, clip_norm), slow, 1e-3)
    assert largest_change(network, losses, batch, clip_norm, clipped_sum_in_one_pass) > clip_norm * 1.01


# Coupling: no example reaches another's part of the sum.


def weighted(losses: Losses) -> Losses:
    """A weight for each example; with all but one at zero the sum is that one's part, in a batch of the same shape."""
    return lambda network, batch: losses(network, batch[:-1]) * batch[-1]


def changed_part(network: nn.Module, losses: Losses, by: Clipper = clipped_sum_in_one_pass) -> float:
    inputs, labels = examples(PICTURE, losses)
    only = torch.zeros(len(inputs)).double()
    only[1] = 1
    before = by(network.double(), weighted(losses), (inputs, labels, only), 0.5)
    assert length(before.gradients) > 0.1
    changes = []
    for scale in (0.0, -1.0, 1e3):
        other = inputs.clone()
        other[3] *= scale
        after = by(network, weighted(losses), (other, labels.roll(1).where(torch.arange(5) == 3, labels), only), 0.5)
        changes.append(difference(before.gradients, after.gradients) + float((before.norms - after.norms)[1].abs()))
    return max(changes)


@pytest.mark.parametrize("losses", [natural, views, *BOXED])
def test_changing_an_example_leaves_every_other_part_as_it_is_bit_for_bit(losses: Losses) -> None:
    assert changed_part(layered("conv 4 3, relu, linear 6, tanh, linear", PICTURE), losses) == 0
    if losses in (natural, views):
        assert changed_part(NETWORKS["group norm"](), losses) == 0
        assert changed_part(NETWORKS["wide conv"](), losses) == 0


def test_batch_normalisation_is_caught() -> None:
    mixing = flat(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, affine=False, track_running_stats=False), nn.ReLU())
    assert changed_part(mixing, natural) > 1e-3
