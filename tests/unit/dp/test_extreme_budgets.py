"""Budgets at the edges of arithmetic: ε is never printed below the truth, and norms that break clipping are refused.

The truth is computed with mpmath, to 50 digits, from the definition of the divergence.
"""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath as mp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stobatch.dp.accounting import PoissonGaussian, gaussian_epsilon
from stobatch.dp.clipping import clipping_weights
from stobatch.dp.plan import LEAST_CLIP_NORM, MOST_CLIP_NORM, DpSgdPlan
from stobatch.errors import SettingError

mp.mp.dps = 50


def true_delta(epsilon: mp.mpf, rate: mp.mpf, sigma: mp.mpf) -> mp.mpf:
    """The larger hockey-stick divergence of N(0, σ²) and (1-q) N(0, σ²) + q N(1, σ²), in both directions."""

    def cut(ratio: mp.mpf) -> mp.mpf:
        """Where the mixture's density is that much of the other's, in deviations."""
        inner = (ratio - 1 + rate) / rate
        return sigma * mp.log(inner) + 1 / (2 * sigma) if inner > 0 else -mp.inf

    def mixture(side: int, at: mp.mpf) -> mp.mpf:
        """Of the mixture's mass below (1) or above (-1), each as a small number of its own."""
        return (1 - rate) * mp.ncdf(side * at) + rate * mp.ncdf(side * (at - 1 / sigma))

    growth = mp.exp(epsilon)
    added, removed = cut(growth), cut(1 / growth)
    return max(
        mixture(-1, added) - growth * mp.ncdf(-added),
        mp.ncdf(removed) - growth * mixture(1, removed),
        mp.mpf(0),
    )


def true_epsilon(delta: float, rate: float, sigma: float) -> mp.mpf:
    """From below, to 24 digits."""
    q, s, d = mp.mpf(rate), mp.mpf(sigma), mp.mpf(delta)
    if true_delta(mp.mpf(0), q, s) <= d:
        return mp.mpf(0)
    low, high = mp.mpf(0), mp.mpf(1)
    while true_delta(high, q, s) > d:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if true_delta(middle, q, s) > d else (low, middle)
    return low


def deltas_near_the_whole(rate: float, sigma: float, shortfall: float) -> float:
    """A δ that falls short of δ(0) by this share: there ε is small and rounding matters most."""
    return float(true_delta(mp.mpf(0), mp.mpf(rate), mp.mpf(sigma)) * (1 - mp.mpf(shortfall)))


@settings(max_examples=40, deadline=None)
@given(st.floats(-1.5, 14), st.floats(-13, -0.01))
def test_closed_form_is_never_below_the_truth(log_sigma: float, log_shortfall: float) -> None:
    sigma = 10**log_sigma
    delta = deltas_near_the_whole(1.0, sigma, 10**log_shortfall)
    if 0 < delta < 1:
        assert gaussian_epsilon(sigma, 1, delta) >= true_epsilon(delta, 1.0, sigma)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("delta", [1e-1, 1e-5, 1e-12, 1e-100, 1e-300])
def test_closed_form_is_tight_where_it_is_used(sigma: float, delta: float) -> None:
    truth = float(true_epsilon(delta, 1.0, sigma))
    assert truth <= gaussian_epsilon(sigma, 1, delta) <= truth * (1 + 1e-4) + 1e-10


def test_zero_means_that_delta_alone_is_enough() -> None:
    delta = deltas_near_the_whole(1.0, 1e3, 0.0)
    assert gaussian_epsilon(1e3, 1, delta * (1 + 1e-9)) == 0.0
    assert gaussian_epsilon(1e3, 1, delta * (1 - 1e-9)) > 0.0


def test_little_noise_is_no_guarantee_rather_than_an_error() -> None:
    assert gaussian_epsilon(1e-200, 1, 1e-5) == math.inf


@settings(max_examples=15, deadline=None)
@given(st.floats(-5, 0), st.floats(-0.5, 8), st.floats(-9, -0.01))
def test_one_step_is_never_below_the_truth(log_rate: float, log_sigma: float, log_shortfall: float) -> None:
    rate, sigma = 10**log_rate, 10**log_sigma
    delta = deltas_near_the_whole(rate, sigma, 10**log_shortfall)
    if 0 < delta < 1:
        assert PoissonGaussian(rate, sigma, 1).epsilon(delta) >= true_epsilon(delta, rate, sigma)


@pytest.mark.parametrize(("rate", "sigma"), [(0.1, 1e8), (0.01, 1e7), (0.5, 1e9)])
def test_an_epsilon_of_a_billionth_is_not_called_zero(rate: float, sigma: float) -> None:
    """Divergences of 1e-19 are rounding, which the accountant behind takes for nothing."""
    delta = 1e-13
    truth = true_epsilon(delta, rate, sigma)
    assert 1e-10 < truth < 1e-8
    mechanism = PoissonGaussian(rate, sigma, 1)
    assert mechanism.epsilon(delta) >= truth
    assert mechanism.renyi_epsilon(delta) >= truth


@pytest.mark.parametrize(
    ("rate", "sigma"), [(0.5, 5e-324), (0.5, 1e-3), (0.5, 1e13), (0.5, 1e300), (5e-324, 1.0), (1e-200, 1.0)]
)
def test_sizes_that_the_arithmetic_does_not_bear_are_refused(rate: float, sigma: float) -> None:
    with pytest.raises(SettingError, match="arithmetic is sound"):
        PoissonGaussian(rate, sigma, 3)


PLAN = DpSgdPlan(
    num_examples=1000, expected_batch_size=100, steps=10, clip_norm=1.0, target_epsilon=3.0, delta=1e-5,
    tuned_on_private_data=False,
)  # fmt: skip


@pytest.mark.parametrize("clip_norm", [0.0, 5e-324, 1e-310, 1e-40, 1e-13, 1e13, 1e300, math.inf, math.nan, -1.0])
def test_clipping_norms_that_arithmetic_does_not_bear_are_refused(clip_norm: float) -> None:
    with pytest.raises(SettingError, match="clip_norm"):
        replace(PLAN, clip_norm=clip_norm)


def excess(clip_norm: float, length: float) -> float:
    """How much longer than C a float32 gradient of 100 equal entries is once it is clipped, as a share of C."""
    gradient = torch.full((1, 100), length / 10, dtype=torch.float32)
    norms = gradient.square().sum(1).sqrt()
    clipped = clipping_weights(norms, clip_norm) @ gradient
    return float(clipped.double().norm()) / clip_norm - 1


@settings(max_examples=300, deadline=None)
@given(st.floats(-12, 12), st.floats(-44, 38))
def test_within_the_range_no_gradient_is_longer_than_its_bound(log_clip: float, log_length: float) -> None:
    clip_norm = min(max(10**log_clip, LEAST_CLIP_NORM), MOST_CLIP_NORM)
    assert excess(clip_norm, 10**log_length) <= 1e-5


def test_among_the_subnormals_a_clipped_gradient_is_longer_than_its_bound() -> None:
    """Why they are refused: the weight has few bits left, and rounds up."""
    assert max(excess(1e-44 * (1 + i / 10), 1.0 + i / 7) for i in range(30)) > 0.1
