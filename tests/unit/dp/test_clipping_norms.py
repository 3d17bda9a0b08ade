"""Norms are never below the exact ones, weights never lengthen, and parts of a batch add up to the whole."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_loop import EXACT, PICTURE, agrees, examples, layered, length, natural
from torch import Tensor, nn

from stobatch.dp import layer_gradients
from stobatch.dp.clipping import (
    Batch,
    Clipper,
    clipped_sum_by_example,
    clipped_sum_in_chunks,
    clipped_sum_in_one_pass,
    clipping_weights,
)


@pytest.mark.parametrize("by", [clipped_sum_in_one_pass, clipped_sum_by_example])
def test_an_empty_batch_gives_zeros_of_every_shape(by: Clipper) -> None:
    network = layered("conv 3 3, relu, linear", PICTURE)
    empty = (torch.zeros(0, *PICTURE), torch.zeros(0).long())
    for found in (by(network, natural, empty, 1.0), clipped_sum_in_chunks(network, natural, empty, 1.0, 4, by=by)):
        assert {name: value.shape for name, value in found.gradients.items()} == {
            name: value.shape for name, value in network.named_parameters()
        }
        assert length(found.gradients) == 0
        assert found.norms.shape == (0,)


def test_losses_without_weights_give_zeros() -> None:
    network, batch = layered("conv 3 3, relu, linear", PICTURE).double(), examples(PICTURE)
    found = clipped_sum_in_one_pass(network, lambda network, batch: batch[0].flatten(1).sum(1), batch, 1.0)
    assert length(found.gradients) == 0
    assert found.norms.tolist() == [0.0] * 5


@pytest.mark.parametrize("chunk", [1, 2, 5, 9])
@pytest.mark.parametrize("by", [clipped_sum_in_one_pass, clipped_sum_by_example])
def test_chunks_add_up(chunk: int, by: Clipper) -> None:
    network, batch = layered("conv 3 3, relu, linear", PICTURE).double(), examples(PICTURE)
    whole = by(network, natural, batch, 0.5)
    assert agrees(clipped_sum_in_chunks(network, natural, batch, 0.5, chunk, by=by), whole, EXACT)


def test_weights_shorten_and_never_lengthen() -> None:
    norms = torch.tensor([0.0, 1e-30, 0.5, 2.0, 8.0, math.inf, math.nan])
    weights, exact = clipping_weights(norms, 2.0), [1.0, 1.0, 1.0, 1.0, 0.25, 0.0, 0.0]
    assert weights.tolist() == pytest.approx(exact, rel=1e-6)
    assert all(found <= wanted for found, wanted in zip(weights.tolist(), exact, strict=True))


@settings(max_examples=300)
@given(
    norm=st.floats(1e-6, 1e30), clip_norm=st.floats(1e-6, 1e6), dtype=st.sampled_from([torch.float32, torch.float64])
)
def test_a_weight_times_a_norm_is_at_most_c_in_exact_arithmetic(
    norm: float, clip_norm: float, dtype: torch.dtype
) -> None:
    """Norms are in float64 and never too short; the weight is rounded to the precision of the gradients."""
    (weight,) = clipping_weights(torch.tensor([norm], dtype=torch.float64), clip_norm, dtype).tolist()
    assert Fraction(weight) * Fraction(norm) <= Fraction(clip_norm)
    assert weight >= min(1.0, clip_norm / norm) * (1 - 1e-6)


def exact_square(values: Tensor) -> Fraction:
    return sum((Fraction(value) ** 2 for value in values.flatten().tolist()), Fraction(0))


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("spread", [1e-6, 1e-3, 1.0], ids=["cancelling", "nearly", "unrelated"])
def test_a_norm_in_float32_is_never_below_the_exact_one(rows: int, spread: float) -> None:
    """Against rational arithmetic, with rows that all but cancel; without the allowance some are too short."""
    generator = torch.Generator().manual_seed(rows)
    a = torch.randn(40, 1, 30, generator=generator) + spread * torch.randn(40, rows, 30, generator=generator)
    g = torch.randn(40, 1, 20, generator=generator) + spread * torch.randn(40, rows, 20, generator=generator)
    signs = torch.tensor([1.0 if row % 2 == 0 else -1.0 for row in range(rows)])
    g = g * signs[:, None]
    total, size = layer_gradients._gram(a, g)
    hidden = (
        layer_gradients._cancellation_allowance(size, 30 + 20 + 8, 2.0**-24) if rows > 1 else torch.zeros_like(total)
    )
    found = total.clamp(min=0) + hidden
    short = 0
    for example in range(40):
        formed = [
            [
                sum((Fraction(x) * Fraction(y) for x, y in zip(column, other, strict=True)), Fraction(0))
                for other in a[example].T.tolist()
            ]
            for column in g[example].T.tolist()
        ]
        exact = sum((entry**2 for row in formed for entry in row), Fraction(0))
        assert Fraction(found[example].item()) >= exact
        short += Fraction(total[example].item()) < exact
    assert short or rows == 1, "nothing would be too short without the allowance"


def test_lengths_are_never_below_the_exact_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((20, 1), (20, 700), (20, 3, 90), (20, 2, 5, 7), (20,)):
        values = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-8, 8, shape, generator=generator)
        for row, found in zip(values, layer_gradients.squared_norm_bounds(values).tolist(), strict=True):
            assert exact_square(row) <= Fraction(found) <= exact_square(row) * Fraction(10001, 10000)


def test_the_tape_is_closed_after_an_error() -> None:
    network = layered("linear", (4,))

    def fails(network: nn.Module, batch: Batch) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        clipped_sum_in_one_pass(network, fails, (torch.zeros(2, 4), torch.zeros(2).long()), 1.0)
    assert not any(layer._forward_hooks for layer in network.modules())
