"""Confidence bounds and radii at the edges: any failure probability is borne, and nothing but probabilities is.

Tails are summed in rational numbers, so nothing here shares an algorithm with what it checks.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stobatch.auditing.lower_bounds import two_sided_bounds
from stobatch.baselines.noise_layer_verifier import margin_epsilon
from stobatch.errors import StobatchError, UnitError
from stobatch.published.radius import CorrectedRule, PublishedRule, published_robustness_epsilon
from stobatch.types import Norm
from stobatch.votes.confidence import chernoff, clopper_pearson, hoeffding
from stobatch.votes.margins import Shift, gaussian_margin, pure_robustness_epsilon
from stobatch.votes.noise import GaussianNoise, LaplaceNoise

FAILURES = (5e-324, 1e-310, 1e-300, 1e-200, 1e-100, 1e-17, 1e-16, 1e-3, 0.5, 1 - 1e-16)


def upper_tail(successes: int, draws: int, mean: float) -> Fraction:
    """P(X >= successes), exactly."""
    p = Fraction(mean)
    return sum((math.comb(draws, k) * p**k * (1 - p) ** (draws - k) for k in range(successes, draws + 1)), Fraction(0))


ROUNDING = Fraction(1, 10**6)


def check(successes: int, draws: int, failure: float) -> tuple[float, float]:
    (lower,), (upper,) = clopper_pearson(np.array([float(successes)]), draws, failure)
    assert 0 <= lower <= successes / draws <= upper <= 1 or failure > 0.5
    allowed = Fraction(failure) * (1 + ROUNDING)
    assert upper_tail(successes, draws, float(lower)) <= allowed or lower == 0
    if upper < 1:
        # 1 - upper in full, or a bound near 1 would be judged by the rounding of this very test.
        p = Fraction(float(upper))
        below = sum((math.comb(draws, k) * p**k * (1 - p) ** (draws - k) for k in range(successes + 1)), Fraction(0))
        assert below <= allowed + Fraction(1, 10**15) * draws
    return float(lower), float(upper)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("draws", [1, 2, 10, 60])
def test_bounds_hold_at_every_failure_probability(failure: float, draws: int) -> None:
    for successes in sorted({0, 1, 2, draws // 2, draws - 2, draws - 1, draws} & set(range(draws + 1))):
        check(successes, draws, failure)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 80), st.floats(0, 1), st.floats(-323, -0.01))
def test_bounds_hold_for_random_counts(draws: int, share: float, log_failure: float) -> None:
    check(round(share * draws), draws, max(10**log_failure, 5e-324))


@pytest.mark.parametrize("failure", [1e-200, 1e-20, 1e-3])
def test_bounds_are_exact_where_they_can_be(failure: float) -> None:
    """Not merely valid: the tail at the bound is the failure probability."""
    for successes in (1, 9, 10):
        lower, _ = check(successes, 10, failure)
        assert float(upper_tail(successes, 10, lower) / Fraction(failure)) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("draws", [10**3, 10**6, 10**9])
@pytest.mark.parametrize("failure", FAILURES[:-2])
def test_large_samples_have_numbers_for_bounds(draws: int, failure: float) -> None:
    counts = np.array([0.0, 1, draws // 2, draws - 1, draws])
    lower, upper = clopper_pearson(counts, draws, failure)
    assert ((lower >= 0) & (lower <= counts / draws) & (counts / draws <= upper) & (upper <= 1)).all()
    assert (np.diff(lower) >= 0).all()
    assert (np.diff(upper) >= 0).all()
    assert (chernoff(counts, draws, failure) <= lower * (1 + 1e-9)).all()


@pytest.mark.parametrize("failure", [0.0, 1.0, -0.1, 1.5, math.nan, math.inf])
@pytest.mark.parametrize("interval", [clopper_pearson, hoeffding])
def test_what_is_no_failure_probability_is_refused(interval, failure: float) -> None:
    with pytest.raises(StobatchError, match="failure probability"):
        interval(np.array([3.0]), 10, failure)


@pytest.mark.parametrize("count", [-1.0, 11.0, math.nan])
def test_counts_that_cannot_be_are_refused(count: float) -> None:
    with pytest.raises(StobatchError, match="count of successes"):
        clopper_pearson(np.array([count]), 10, 0.1)


def test_audits_bear_any_confidence_below_one() -> None:
    """The rates behind are numbers, and bounds of few trials say nothing."""
    bounds = two_sided_bounds([0.0] * 20, [1.0] * 20, delta=0.0, confidence=1 - 1e-16)
    assert all(bound.epsilon == 0 for bound in bounds)
    assert all(0 < bound.details.false_positive_rate_at_most <= 1 for bound in bounds)


RULE = CorrectedRule(1.0, 2.0, Shift(4.0, 2.0), Shift(3.0, 1.5))
PUBLISHED = PublishedRule(1.0, 2.0, 16, 3.0)
RADII = {
    "gaussian": lambda top, rest: GaussianNoise(0.5).radius(Norm.L2, top, rest, 16),
    "laplace": lambda top, rest: LaplaceNoise(0.5).radius(Norm.L1, top, rest, 16),
    "corrected": RULE.radius,
    "published": lambda top, rest: PUBLISHED.radius(top, rest, 0.1),
    "largest attack": PUBLISHED.largest_attack,
    "margin epsilon": lambda top, rest: margin_epsilon(top, rest, np.array(0.01)),
    "pure": pure_robustness_epsilon,
    "half the ratio": published_robustness_epsilon,
    "deviations": gaussian_margin,
}


@pytest.mark.parametrize("name", RADII)
@pytest.mark.parametrize(
    ("top", "rest"), [(1.0 + 1e-12, 0.1), (2.0, 0.1), (0.9, -1e-12), (math.nan, 0.1), (0.9, math.nan)]
)
def test_no_radius_follows_from_what_is_no_probability(name: str, top: float, rest: float) -> None:
    with pytest.raises(UnitError, match=r"outside \[0, 1\]"):
        RADII[name](np.array([0.9, top]), np.array([0.1, rest]))


@pytest.mark.parametrize("name", RADII)
@settings(max_examples=60, deadline=None)
@given(top=st.floats(0, 1), rest=st.floats(0, 1), more=st.floats(0, 1))
def test_radii_of_probabilities_are_numbers_and_grow_with_the_margin(
    name: str, top: float, rest: float, more: float
) -> None:
    better = top + (1 - top) * more
    one, other = (float(RADII[name](np.array([each]), np.array([rest]))[0]) for each in (top, better))
    assert math.isfinite(one)
    assert 0 <= one <= other * (1 + 1e-12) + 1e-12
    if top <= rest and name != "margin epsilon":
        assert one == 0


def test_ones_and_zeros_prove_no_more_than_what_is_next_to_them() -> None:
    """A probability of 1 is a rounded one: the radius is that of the largest number below."""
    sure, nearly = (GaussianNoise(1.0).radius(Norm.L2, np.array(top), np.array(0.0), 1) for top in (1.0, 1 - 2.0**-52))
    assert float(sure) == float(nearly) < 9
    assert torch.isfinite(torch.tensor(float(sure)))
