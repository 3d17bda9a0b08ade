"""Lemma 5: the expected value of a bounded function of S independent mechanisms changes by at most e^{Σ ε_s}."""

from __future__ import annotations

from functools import reduce
from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import laplace

from stobatch.published.radius import composed_epsilon

EDGES = np.linspace(-6, 6, 9)
epsilons = st.lists(st.floats(0.05, 2), min_size=1, max_size=3)


def cells(at: float, epsilon: float) -> NDArray[np.float64]:
    """The law of one mechanism x + Lap(1/ε), on a partition of the line."""
    return np.diff(np.concatenate([[0.0], laplace.cdf(EDGES, at, 1 / epsilon), [1.0]]))


def expected(at: float, budgets: list[float], values: NDArray[np.float64]) -> float:
    """E f of the tuple, exactly, for an f that is constant on the cells of the product partition."""
    return float((reduce(np.multiply.outer, [cells(at, epsilon) for epsilon in budgets]) * values).sum())


@given(epsilons, st.floats(-1, 1), st.integers(0, 2**32 - 1), st.booleans())
def test_no_bounded_function_exceeds_the_sum(budgets: list[float], move: float, seed: int, indicator: bool) -> None:
    values = np.random.default_rng(seed).random((len(EDGES) + 1,) * len(budgets))
    values = np.round(values) if indicator else values
    bound = exp(composed_epsilon(tuple(budgets)))
    assert expected(0.0, budgets, values) <= bound * expected(move, budgets, values) + 1e-12


@given(epsilons)
def test_the_sum_is_reached_where_all_mechanisms_are_in_their_tails(budgets: list[float]) -> None:
    corner = np.zeros((len(EDGES) + 1,) * len(budgets))
    corner[(0,) * len(budgets)] = 1
    ratio = expected(0.0, budgets, corner) / expected(1.0, budgets, corner)
    assert ratio == pytest.approx(exp(composed_epsilon(tuple(budgets))))
    if len(budgets) > 1:
        assert ratio > exp(max(budgets))  # the twin that counts the largest mechanism only


def test_mechanisms_that_share_their_noise_are_not_covered() -> None:
    """x + ν and -x + ν with one ν: their difference is 2x, without noise."""
    draws = np.random.default_rng(0).laplace(size=100)
    assert np.ptp((1 + draws) - (-1 + draws)) < 1e-12
