"""Theorem 4 (Eq. 24, Eq. 25, Eq. 26, Eq. 27, Eq. 28, Eq. 29, Eq. 30): shared noise does not compose in parallel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stobatch.data import Examples
from stobatch.dp.noise import laplace
from stobatch.published.lemmas import encoder_budget, head_budget, total_budget
from stobatch.published.noise import PrivateNoise
from stobatch.published.plan import PublishedPlan
from stobatch.published.training import PublishedTrainable
from stobatch.types import Status

positive = st.floats(1e-3, 1e3)


@given(positive, positive, positive, positive)
def test_the_claimed_total_is_the_sum_of_its_four_parts(e1: float, gamma_x: float, gamma: float, e2: float) -> None:
    total = total_budget(e1, gamma_x, gamma, e2)
    assert total == pytest.approx(e1 + e1 / gamma_x + e1 / gamma + e2)
    assert total == pytest.approx(encoder_budget(e1, gamma_x) + head_budget(e1, gamma, e2))


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_two_batches_of_one_tuple_each_betray_their_difference(scale: float) -> None:
    """The published product over batches, with one χ for both: (c, c) under D, (c, c + 1) under D', for every c."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        noise = laplace((), scale, generator).double()
        under_d, under_neighbour = (torch.tensor(data, dtype=torch.float64) + noise for data in ((0, 0), (0, 1)))
        assert under_d[0] == under_d[1]
        assert under_neighbour[0] != under_neighbour[1]


def test_independent_noise_per_batch_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    assert all(float(a) != float(b) for a, b in laplace((50, 2), 1.0, generator))


def test_noisy_inputs_of_different_batches_differ_as_the_raw_ones(
    make_training: Callable[..., PublishedTrainable],
    make_examples: Callable[..., Examples],
    make_noise: Callable[..., PrivateNoise],
) -> None:
    examples = make_examples()
    training = make_training(examples, make_noise(scale=100.0))
    first, second = training.batches[0], training.batches[-1]
    noisy = training.noisy(first)[0] - training.noisy(second)[0]
    raw = examples.inputs[first].double() - examples.inputs[second].double()
    assert float((noisy - raw).abs().max()) < 1e-12


def test_the_noise_is_the_same_at_every_step(make_training: Callable[..., PublishedTrainable]) -> None:
    """One draw: what step t saw of a tuple is what step t + N/m sees again; differences between steps are bare."""
    training = make_training(schedule="iterative")
    before = training.noisy(torch.arange(len(training.reader.examples)))[0]
    for step in range(3):
        for task in training.tasks(step):
            training.gradients(task, step)
        training.after_update()
    assert torch.equal(before, training.noisy(torch.arange(len(training.reader.examples)))[0])


def test_the_plan_claims_it_and_says_what_speaks_against_it() -> None:
    guarantee = PublishedPlan(60_000, 2499, 25, 14**2, 256, 10, 1.0, 0.2, 0.1, "fixed_label").guarantee
    assert guarantee.status is Status.CLAIMED
    assert guarantee.epsilon == pytest.approx(0.2)
    assert any("rank test" in objection for objection in guarantee.objections)
    assert "NOT a proven guarantee" in str(guarantee)
