"""`auditing.one_run_bound` and `two_sample_bound` on a mechanism whose ε is known: randomised response.

It tells the truth about a bit with probability e^ε/(1 + e^ε), which is ε-differentially private and no better. Every
bound is asked for with a confidence of 1 - 1e-9, which is the false-alarm rate of each test; seeds are fixed.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit

from stobatch import auditing
from stobatch.errors import DataError, SettingError

SURE = 1 - 1e-9
EPSILONS = [0.0, 0.5, 2.0, 4.0]


def answers(bits: np.ndarray, epsilon: float, generator: np.random.Generator) -> np.ndarray:
    truth: np.ndarray = generator.random(len(bits)) < expit(epsilon)
    return np.where(truth, bits, 1 - bits).astype(float)


def one_run(epsilon: float) -> auditing.EpsilonBound:
    generator = np.random.default_rng(0)
    coins = generator.integers(0, 2, 4_000)
    return auditing.one_run_bound(answers(coins, epsilon, generator), coins, delta=0.0, confidence=SURE)


def two_samples(epsilon: float) -> auditing.EpsilonBound:
    generator = np.random.default_rng(0)
    out, in_ = (answers(np.full(6_000, bit), epsilon, generator) for bit in (0, 1))
    return auditing.two_sample_bound(out, in_, delta=0.0, confidence=SURE)


@pytest.mark.parametrize("bound_of", [one_run, two_samples])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_a_bound_does_not_exceed_the_epsilon_of_the_mechanism(bound_of, epsilon: float) -> None:
    found = bound_of(epsilon)
    assert found.epsilon <= epsilon
    assert f"ε ≥ {found.epsilon:.3g} at δ = 0 with 100% confidence" == str(found)


@pytest.mark.parametrize("bound_of", [one_run, two_samples])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_a_mechanism_that_leaks_more_than_it_says_is_refuted(bound_of, epsilon: float) -> None:
    """The broken twin: the same claim over a mechanism of ε + 2.5, whose expected bound is at least ε + 1."""
    assert bound_of(epsilon + 2.5).epsilon > epsilon


def test_a_delta_lowers_the_bound() -> None:
    coins = np.arange(1_000) % 2
    bounds = [auditing.one_run_bound(coins, coins, delta=delta).epsilon for delta in (0.0, 1e-5, 1e-3)]
    assert bounds == sorted(bounds, reverse=True)
    assert len(set(bounds)) == 3


def test_scores_that_say_nothing_are_refused() -> None:
    with pytest.raises(DataError, match="not one coin for each"):
        auditing.one_run_bound([0.0, 1.0, 2.0], [0, 1], delta=0.0)
    with pytest.raises(DataError, match="fair coin"):
        auditing.one_run_bound(np.zeros(100), np.ones(100), delta=0.0)
    with pytest.raises(DataError, match="not a number"):
        auditing.two_sample_bound([0.0, np.nan], [0.0, 1.0], delta=0.0)
    with pytest.raises(SettingError, match="confidence=1"):
        auditing.two_sample_bound([0.0, 1.0], [0.0, 1.0], delta=0.0, confidence=1.0)
