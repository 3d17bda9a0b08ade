"""Lemma 1 (Eq. 2, Eq. 3, Eq. 4, Eq. 10): PixelDP's expected-score bound and its robustness check."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import laplace

from stobatch.published.radius import is_robust, published_robustness_epsilon


def scores(at: float, scale: float, edges: NDArray[np.float64], classes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Exact expected scores of a classifier on the line that names a class on each interval, under Lap(scale)."""
    mass = np.diff(np.concatenate([[0.0], laplace.cdf(edges, at, scale), [1.0]]))
    return np.bincount(classes, mass, minlength=3)


def random_classifier(seed: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    edges = np.sort(random.normal(0, 3, random.integers(1, 7)))
    return edges, random.integers(0, 3, len(edges) + 1)


cases = st.tuples(st.integers(0, 2**32 - 1), st.floats(0.2, 4), st.floats(-1, 1))


@given(cases)
def test_expected_scores_change_by_at_most_e_to_epsilon(case: tuple[int, float, float]) -> None:
    seed, scale, move = case
    here, there = (scores(at, scale, *random_classifier(seed)) for at in (0.0, move))
    assert (here <= exp(1 / scale) * there + 1e-12).all()


@settings(max_examples=300)
@given(cases)
def test_no_perturbation_in_the_unit_ball_changes_a_robust_prediction(case: tuple[int, float, float]) -> None:
    seed, scale, move = case
    here, there = (scores(at, scale, *random_classifier(seed)) for at in (0.0, move))
    top = int(here.argmax())
    others = np.delete(here, top)
    if is_robust(here[top], others.max(), 1 / scale):
        assert there[top] > np.delete(there, top).max()


def test_a_margin_of_one_epsilon_instead_of_two_is_violated() -> None:
    """The broken twin: A on the left of 0.5, B on the right, moved by 1 with ε = 1/scale."""
    scale, edges, classes = 2.0, np.array([0.9]), np.array([0, 1])
    here, there = (scores(at, scale, edges, classes) for at in (0.0, 1.0))
    assert here[0] > exp(1 / scale) * here[1]
    assert not is_robust(here[0], here[1], 1 / scale)
    assert there[0] < there[1]


@given(st.floats(0.01, 0.99), st.floats(0.001, 0.99), st.floats(0, 3), st.floats(0, 0.1))
def test_the_check_implies_the_worst_case_of_approximate_dp(
    top: float, other: float, epsilon: float, delta: float
) -> None:
    """Worst case of (ε, δ)-DP: A falls to (p_A - δ)/e^ε while B rises to e^ε p_B + δ."""
    if is_robust(top, other, epsilon, delta):
        assert (top - delta) * exp(-epsilon) > exp(epsilon) * other + delta - 1e-12


@given(st.floats(0.02, 0.99), st.floats(0.01, 0.98))
def test_the_largest_epsilon_is_where_the_check_turns(top: float, other: float) -> None:
    limit = float(published_robustness_epsilon(np.array(top), np.array(other)))
    assert limit == pytest.approx(max(0.0, 0.5 * log(top / other)))
    assert is_robust(top, other, limit - 1e-9) or limit == 0
    assert not is_robust(top, other, limit + 1e-9)
