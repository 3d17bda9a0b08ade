"""Lemma 3: the noisy inputs and the noisy first layer are claimed (ε1/γ_x)- and (ε1/γ)-DP. Neither is."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stobatch.data import Examples
from stobatch.models import ConvEncoder, DenseEncoder
from stobatch.published.lemmas import noise_surplus
from stobatch.published.noise import PrivateNoise
from stobatch.published.plan import PublishedPlan
from stobatch.published.training import PublishedTrainable

MakeTraining = Callable[..., PublishedTrainable]
MakeExamples = Callable[..., Examples]
MakeNoise = Callable[..., PrivateNoise]


@given(st.floats(1, 1e6), st.integers(1, 10**5), st.floats(1e-3, 1))
def test_the_surplus_is_the_noise_over_the_claimed_sensitivity(sensitivity: float, m: int, norm: float) -> None:
    at_input, at_hidden = noise_surplus(sensitivity, m, norm)
    assert at_input == pytest.approx(sensitivity / m)
    assert at_hidden * norm == pytest.approx(2 * at_input)


@pytest.mark.parametrize("scale", [0.1, 30.0, 1e4])
def test_differences_of_noisy_inputs_are_the_raw_differences(
    scale: float, make_training: MakeTraining, make_examples: MakeExamples, make_noise: MakeNoise
) -> None:
    examples = make_examples()
    noisy, _ = make_training(examples, make_noise(scale=scale)).noisy(torch.arange(len(examples)))
    raw = examples.inputs.double()
    rounding = 4 * torch.finfo(torch.float64).eps * float(noisy.abs().max())
    assert float(((noisy - noisy[:1]) - (raw - raw[:1])).abs().max()) <= rounding
    assert float((noisy - raw).abs().max()) > scale / 2


@pytest.mark.parametrize("seed", range(20))
def test_this_test_separates_neighbouring_batches_with_probability_1(
    seed: int, make_training: MakeTraining, make_noise: MakeNoise
) -> None:
    """D has equal records, in D' one differs: 'all noisy records are equal' is certain under D, impossible under D'."""
    inputs, labels = torch.zeros(24, 1, 6, 6), torch.zeros(24, dtype=torch.int64)
    neighbour = inputs.clone()
    neighbour[-1] = 1

    def all_equal(data: torch.Tensor) -> bool:
        training = make_training(Examples(data, labels, 3), make_noise(seed, scale=1e3))
        noisy, _ = training.noisy(torch.arange(len(data)))
        return bool((noisy == noisy[0]).all())

    assert all_equal(inputs)
    assert not all_equal(neighbour)


@pytest.mark.parametrize(("claimed", "fresh"), [(0.2, 48.4), (1.0, 435.0)])
def test_even_fresh_noise_per_example_would_cost_far_more_than_claimed(claimed: float, fresh: float) -> None:
    """The l1 sensitivity of one image in [-1, 1]^784 is 2 x 784, not 1."""
    plan = PublishedPlan(60_000, 2499, 25, 14**2, 256, 10, 0.520, claimed, 0.1, "fixed_label")
    assert 2 * 784 / plan.input_noise_scale == pytest.approx(fresh, rel=2e-3)
    assert plan.epsilons[0] / plan.input_noise_surplus == pytest.approx(1 / plan.input_noise_scale)


@given(st.integers(1, 30))
def test_the_column_norm_is_no_bound_on_the_first_layer(beta: int) -> None:
    """One input read by β neurons: a change of 1 in x changes h by β, the published Δ_h says 1."""
    encoder = DenseEncoder((1,), beta).double()
    encoder.weight.data.fill_(1.0)
    moved = float(encoder(torch.ones(1, 1, dtype=torch.float64)).detach().abs().sum())
    assert encoder.max_column_norm() == 1
    assert moved == beta <= encoder.operator_norms().l1_to_l1 * (1 + 1e-9)


def test_for_a_convolution_the_true_norm_counts_every_map_and_position() -> None:
    encoder = ConvEncoder((1, 28, 28), 32, 5, stride=2, padding=2)
    encoder.weight.data.copy_(torch.rand(encoder.weight.shape, generator=torch.Generator().manual_seed(0)) - 0.5)
    encoder.limit_columns(1.0)
    pixel = torch.zeros(1, 1, 28, 28)
    pixel[..., 14, 14] = 1
    moved = float(encoder(pixel).detach().abs().sum())
    assert moved > 5 * encoder.max_column_norm()
    assert moved <= encoder.operator_norms().l1_to_l1 * (1 + 1e-6)
    assert prod(encoder.hidden_shape) == 32 * 14 * 14
