"""Clipped sums of networks that are trained in part, and of adapters, are equal to a slow loop over single examples."""

from __future__ import annotations

import pytest
import torch
from slow_loop import (
    BOXED,
    NETWORKS,
    PICTURE,
    STACKS,
    agrees,
    assert_right,
    examples,
    flat,
    largest_change,
    layered,
    natural,
    oracle,
    stir,
    views,
)
from torch import nn

from stobatch.dp.clipping import Losses, clipped_sum_in_one_pass, clipper_for
from stobatch.models import low_rank
from stobatch.models.low_rank import Adapted, adapt


def adapted(network: nn.Module, rank: int = 2) -> nn.Module:
    """Every linear layer and convolution becomes an adapted one, with both factors away from zero."""
    for layer in list(network.modules()):
        if type(layer) in (nn.Linear, nn.Conv2d):
            adapt(layer, rank, torch.Generator().manual_seed(0))
    stir(network)
    return network


def frozen(network: nn.Module, ending: str) -> nn.Module:
    for name, p in network.named_parameters():
        p.requires_grad_(not name.endswith(ending))
    return network


@pytest.mark.parametrize("losses", [natural, views])
@pytest.mark.parametrize("name", [name for name in NETWORKS if "norm" not in name])
def test_adapters_equal_the_slow_loop(name: str, losses: Losses) -> None:
    assert_right(adapted(NETWORKS[name]()), losses, examples(PICTURE, losses))


@pytest.mark.parametrize("losses", BOXED)
@pytest.mark.parametrize("name", STACKS)
def test_adapters_under_interval_bounds_equal_the_slow_loop(name: str, losses: Losses) -> None:
    description, shape = STACKS[name]
    assert_right(adapted(layered(description, shape)), losses, examples(shape, losses))


def test_few_examples_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of a layer that is too large to be formed for all examples at once."""
    monkeypatch.setitem(low_rank.NUMBERS_AT_ONCE, "cpu", 50)
    for losses in BOXED:
        assert_right(
            adapted(layered("conv 3 3/2+1, relu, linear 5, tanh, linear", PICTURE)), losses, examples(PICTURE, losses)
        )


@pytest.mark.parametrize("ending", ["weight", "bias", "0.weight"])
@pytest.mark.parametrize("name", ["linear", "conv with stride and padding", "wide conv"])
def test_any_frozen_parameters_equal_the_slow_loop(name: str, ending: str) -> None:
    description, shape = STACKS[name]
    for losses in BOXED:
        assert_right(frozen(layered(description, shape), ending), losses, examples(shape, losses))


@pytest.mark.parametrize("name", ["group norm", "group norm of vectors", "two convs", "conv twice"])
def test_a_frozen_body_equals_the_slow_loop(name: str) -> None:
    network = NETWORKS[name]()
    network[0].requires_grad_(False)  # type: ignore[index]
    assert_right(network, natural, examples(PICTURE))


def test_the_fast_clipper_is_used_for_adapters() -> None:
    network, batch = adapted(NETWORKS["two convs"]()).double(), examples(PICTURE)
    assert clipper_for(network, natural, batch) is clipped_sum_in_one_pass


def test_one_example_moves_the_sum_by_the_clipping_norm_at_most() -> None:
    network, batch = adapted(NETWORKS["two convs"]()).double(), examples(PICTURE)
    assert largest_change(network, natural, batch, 0.1, clipped_sum_in_one_pass) <= 0.1 * (1 + 1e-9)


def test_an_adapter_whose_norm_forgets_one_factor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: clipping by the norm of one factor alone, as if the other were fixed."""
    monkeypatch.setattr(
        low_rank._AdapterGradients, "squared_norms", lambda self: low_rank.squared_norm_bounds(self.gradients["up"])
    )
    network, batch = adapted(NETWORKS["two convs"]()).double(), examples(PICTURE)
    assert not agrees(clipped_sum_in_one_pass(network, natural, batch, 0.1), oracle(network, natural, batch, 0.1), 1e-3)
    assert largest_change(network, natural, batch, 0.1, clipped_sum_in_one_pass) > 0.1


def test_what_is_frozen_keeps_nothing_for_the_backward_pass() -> None:
    """With the body frozen no layer before the last is on the tape, and nothing before it has a graph."""
    network = flat(nn.Conv2d(2, 3, 3), nn.ReLU())
    network[0].requires_grad_(False)  # type: ignore[index]
    hidden = network[0](torch.randn(2, *PICTURE))  # type: ignore[index]
    assert not hidden.requires_grad
    sums = clipped_sum_in_one_pass(network.double(), natural, examples(PICTURE), 1.0)
    assert set(sums.gradients) == {"1.weight", "1.bias"}


def test_an_adapter_starts_as_nothing_and_merges_into_what_it_was() -> None:
    network = flat(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 2, bias=False)).double()
    inputs, before = torch.randn(3, *PICTURE, dtype=torch.float64), list(network.state_dict())
    first = network(inputs)
    for layer in list(network.modules()):
        if isinstance(layer, nn.Conv2d):
            adapt(layer, 1, torch.Generator().manual_seed(0))
    assert torch.equal(network(inputs), first)
    stir(network)
    moved = network(inputs)
    assert not torch.allclose(moved, first)
    low_rank.merge(network)
    assert not any(isinstance(layer, Adapted) for layer in network.modules())
    assert list(network.state_dict()) == before
    assert torch.allclose(network(inputs), moved, atol=1e-12)
