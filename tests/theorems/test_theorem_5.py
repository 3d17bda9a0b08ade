"""Theorem 5 (Eq. 12, Eq. 32, Eq. 33): composition of robustness; right in form, never better than one noise."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stobatch.published.radius import composed_epsilon, composed_radius, is_robust, published_robustness_epsilon
from stobatch.votes.margins import gaussian_margin, pure_robustness_epsilon

inside = st.floats(1e-6, 1 - 1e-6)


def pure(top: float, other: float) -> float:
    return float(pure_robustness_epsilon(np.array(top), np.array(other)))


def published(top: float, other: float) -> float:
    return float(published_robustness_epsilon(np.array(top), np.array(other)))


def trade_off(epsilon: float, level: float) -> float:
    """f_ε, the least type II error of a test of this level between two ε-close laws."""
    return max(0.0, 1 - exp(epsilon) * level, exp(-epsilon) * (1 - level))


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=4), inside, inside)
def test_the_condition_holds_for_every_split_of_a_smaller_sum(budgets: list[float], top: float, other: float) -> None:
    limit = published(top, other)
    if composed_epsilon(tuple(budgets)) < limit - 1e-9:
        assert is_robust(top, other, composed_epsilon(tuple(budgets)))


@given(inside, inside, st.floats(0, 1))
def test_below_the_published_limit_the_worst_case_keeps_the_order(top: float, other: float, part: float) -> None:
    epsilon = part * published(top, other) * (1 - 1e-9)
    if epsilon > 0:
        assert exp(-epsilon) * top > exp(epsilon) * other


@given(inside, st.floats(0, 1), st.floats(0, 5))
def test_the_sharper_limit_is_exactly_where_the_worst_case_turns(top: float, part: float, epsilon: float) -> None:
    """For p_B <= 1 - p_A: the two trade-off bounds cross at L* and nowhere before."""
    other = part * (1 - top)
    limit = pure(top, other) if top > other else 0.0
    kept = trade_off(epsilon, 1 - top) + trade_off(epsilon, other) > 1
    if abs(epsilon - limit) > 1e-6:
        assert kept == (epsilon < limit)


@given(inside, inside)
def test_the_sharper_limit_is_never_below_the_published_one(top: float, other: float) -> None:
    assert pure(top, other) >= published(top, other) >= 0


@given(st.floats(0.5, 1 - 1e-9))
def test_for_two_classes_the_sharper_limit_is_the_logarithm_of_the_loser_doubled(top: float) -> None:
    assert pure(top, 1 - top) == pytest.approx(-log(2 * (1 - top)), abs=1e-9)


def test_the_numbers_at_2000_unanimous_votes() -> None:
    assert pure(0.99735, 0.00265) == pytest.approx(5.2417, abs=3e-3)
    assert float(gaussian_margin(np.array(0.99735), np.array(0.00265))) == pytest.approx(2.789, abs=1e-3)
    assert published(0.99735, 0.00265) == pytest.approx(2.966, abs=2e-3)


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.floats(0.01, 10), st.floats(0.01, 10))
def test_the_composed_radius_lies_between_the_two_single_ones(
    kappa: float, phi: float, at_x: float, at_h: float
) -> None:
    """With exact expectations the log-ratios add up, and so do the losses: a mediant."""
    singles = at_x * kappa / 2, at_h * phi / 2
    both = float(composed_radius(np.array(kappa), np.array(phi))) * (at_x + at_h) / 2
    assert min(singles) * (1 - 1e-9) <= both <= max(singles) * (1 + 1e-9)


def test_adding_the_factors_instead_would_claim_more_than_either_noise_gives() -> None:
    """The broken twin κ + φ, which stands commented out in the released code."""
    kappa, phi = 0.5, 0.7
    assert float(composed_radius(np.array(kappa), np.array(phi))) < min(kappa, phi) < max(kappa, phi) < kappa + phi
