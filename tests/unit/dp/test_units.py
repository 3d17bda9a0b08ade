"""What is drawn of a person is one vector: the fast norms and sums are those of a slow loop over persons."""

from __future__ import annotations

import math

import pytest
import torch
from slow_loop import BOXED, NETWORKS, PICTURE, STACKS, assert_right, examples, largest_change, layered, natural
from torch import Tensor

from stobatch.dp.clipping import (
    Batch,
    Clipper,
    Losses,
    clipped_sum_by_example,
    clipped_sum_in_one_pass,
    group_rows,
)


def of_persons(losses: Losses, shape: tuple[int, ...], persons: int, per: int, seed: int = 1) -> tuple[Losses, Batch]:
    batch, mean = group_rows(examples(shape, losses, persons * per, seed), losses, per)
    return mean, batch


@pytest.mark.parametrize("by", [clipped_sum_in_one_pass, clipped_sum_by_example])
@pytest.mark.parametrize("losses", [natural, *BOXED])
@pytest.mark.parametrize("name", ["two linear", "conv with stride and padding", "two convs"])
def test_persons_are_clipped_as_a_slow_loop_clips_them(name: str, losses: Losses, by: Clipper) -> None:
    description, shape = STACKS[name]
    network = layered(description.replace("squash 2 -0.5 0.5, ", ""), shape)
    assert_right(network, *of_persons(losses, shape, 4, 3), by=by)


@pytest.mark.parametrize("name", ["group norm", "wide conv"])
def test_persons_through_other_layers(name: str) -> None:
    assert_right(NETWORKS[name](), *of_persons(natural, PICTURE, 4, 3))


def test_one_record_each_is_what_it_was() -> None:
    batch = examples(PICTURE)
    assert group_rows(batch, natural, 1) == (batch, natural)


@pytest.mark.parametrize("bad", [1e-12, 1e12, 1e160, math.inf, math.nan])
@pytest.mark.parametrize("by", [clipped_sum_in_one_pass, clipped_sum_by_example])
def test_no_person_moves_the_sum_further_than_c(by: Clipper, bad: float) -> None:
    """Whatever one of the records is."""
    network = layered("conv 3 3, relu, linear", PICTURE).double()
    mean, batch = of_persons(natural, PICTURE, 4, 3)
    batch[0][1, 2] *= bad
    assert largest_change(network, mean, batch, 1e-2, by) <= 1e-2 * (1 + 1e-6)


def test_clipping_records_one_by_one_is_caught() -> None:
    network = layered("conv 3 3, relu, linear", PICTURE).double()
    mean, batch = of_persons(natural, PICTURE, 4, 3)

    def one_by_one(network: torch.nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> Tensor:
        return clipped_sum_in_one_pass(network, natural, tuple(entry.flatten(0, 1) for entry in batch), clip_norm)

    assert largest_change(network, mean, batch, 1e-2, one_by_one) > 1.5e-2
