"""Intervals and tests against SciPy or by hand, and how often they err, by simulation.

Every simulation has a fixed seed. Had it none, it would raise a false alarm with probability at most 2e-9: a count is
refused beyond the 1e-9 quantiles of the binomial law of the stated rates.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from stobatch.errors import DataError
from stobatch.evaluation.statistics import (
    chance_of_as_many,
    compare_over_seeds,
    paired_difference,
    share_of,
    sign_test,
)
from stobatch.results import Difference

Z = 1.959963984540054
"""The 97.5% quantile of the normal law, from a table."""


def allowed(trials: int, lowest_rate: float, highest_rate: float) -> tuple[float, float]:
    return stats.binom.ppf(1e-9, trials, lowest_rate), stats.binom.isf(1e-9, trials, highest_rate)


@given(total=st.integers(1, 2000), share=st.floats(0, 1), confidence=st.sampled_from([0.9, 0.95, 0.998]))
def test_a_proportions_interval_is_the_exact_one(total: int, share: float, confidence: float) -> None:
    count = round(share * total)
    found = share_of(np.arange(total) < count, confidence)
    expected = stats.binomtest(count, total).proportion_ci(confidence, method="exact")
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert (found.value, found.count, found.total) == (count / total, count, total)


def test_a_proportion_says_all_it_knows() -> None:
    found = share_of([True, False, True, True])
    low, high = stats.binomtest(3, 4).proportion_ci(0.95, method="exact")
    assert found.to_dict() == {
        "value": 0.75,
        "count": 3,
        "total": 4,
        "low": pytest.approx(low),
        "high": pytest.approx(high),
    }
    assert share_of([0, 0]).low == 0
    assert share_of([1, 1]).high == 1


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_a_paired_difference_by_hand(pairs: list[tuple[bool, bool]]) -> None:
    """Mean and standard error of the differences, example by example, with half a pair of each kind added."""
    differences = [int(one) - int(two) for one, two in pairs]
    found = paired_difference(*zip(*pairs, strict=True))
    assert found.value == pytest.approx(sum(differences) / len(pairs))
    weighted = [(d, 1.0) for d in differences] + [(1, 0.5), (-1, 0.5), (0, 1.0)]
    total = sum(weight for _, weight in weighted)
    mean = sum(d * weight for d, weight in weighted) / total
    variance = sum(weight * (d - mean) ** 2 for d, weight in weighted) / total
    reach = Z * sqrt(variance / total)
    assert (found.low, found.high) == pytest.approx((max(mean - reach, -1), min(mean + reach, 1)), abs=1e-9)
    assert found.low < found.high


def test_a_paired_interval_does_not_vanish_where_no_example_differs() -> None:
    found = paired_difference([True] * 20, [True] * 20)
    assert found.value == 0
    assert found.low < -0.05
    assert found.high > 0.05


Flags = NDArray[np.bool_]
TRIALS, EXAMPLES = 3000, 400


def misses(interval: Callable[[Flags, Flags], Difference]) -> int:
    """How often the interval leaves out the true difference of 10 points, of two that are mostly right together."""
    random = np.random.default_rng(0)
    kinds = random.choice(4, size=(TRIALS, EXAMPLES), p=[0.5, 0.2, 0.1, 0.2])
    intervals = [interval((kind == 0) | (kind == 1), (kind == 0) | (kind == 2)) for kind in kinds]
    return sum(not found.low <= 0.1 <= found.high for found in intervals)


def as_if_independent(one: Flags, two: Flags) -> Difference:
    """A broken twin: it forgets that both look at the same examples."""
    value = float(one.mean() - two.mean())
    reach = Z * sqrt((one.var() + two.var()) / len(one))
    return Difference(value=value, low=value - reach, high=value + reach)


def too_sure(one: Flags, two: Flags) -> Difference:
    """A broken twin: one standard error where two are needed."""
    found = paired_difference(one, two)
    low, high = (found.value + found.low) / 2, (found.value + found.high) / 2
    return Difference(value=found.value, low=low, high=high)


def test_a_paired_interval_misses_one_time_in_twenty() -> None:
    """The normal approximation may be off by one point; false alarm 2e-9."""
    low, high = allowed(TRIALS, 0.04, 0.06)
    assert low <= misses(paired_difference) <= high
    assert misses(as_if_independent) < low
    assert misses(too_sure) > high


@given(first=st.integers(0, 60), second=st.integers(0, 60))
def test_the_sign_test_is_the_one_sided_exact_test(first: int, second: int) -> None:
    expected = stats.binomtest(first, first + second, alternative="greater").pvalue if first + second else 1.0
    assert sign_test(first, second) == pytest.approx(expected)


@given(successes=st.integers(0, 60), further=st.integers(0, 60), probability=st.sampled_from((0.0, 1e-3, 0.5, 1.0)))
def test_as_many_successes_have_the_chance_of_the_binomial_law(
    successes: int, further: int, probability: float
) -> None:
    expected = stats.binom.sf(successes - 1, successes + further, probability)
    assert chance_of_as_many(successes, successes + further, probability) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("level", [0.05, 0.001])
def test_the_sign_test_errs_no_more_often_than_it_says(level: float) -> None:
    """Exactly, by summing the binomial law over everything it would call significant; no chance of a false alarm."""
    for total in range(1, 120):
        alarms = [first for first in range(total + 1) if sign_test(first, total - first) < level]
        assert stats.binom.pmf(alarms, total, 0.5).sum() <= level
    # The twin that counts only what is above, not what is equal.
    careless = [first for first in range(21) if stats.binom.sf(first, 20, 0.5) < level]
    assert stats.binom.pmf(careless, 20, 0.5).sum() > level


FIRST = {1: 0.912, 2: 0.887, 3: 0.931, 5: 0.905}
SECOND = {1: 0.871, 2: 0.869, 3: 0.902, 5: 0.848}


def test_the_same_seeds_are_paired() -> None:
    """By hand: the mean difference over its standard error, against Student's law with n - 1 degrees of freedom."""
    differences = np.array([FIRST[seed] - SECOND[seed] for seed in FIRST])
    error = differences.std(ddof=1) / 2
    found = compare_over_seeds(FIRST, dict(reversed(SECOND.items())))
    assert found.paired
    assert found.num_seeds == (4, 4)
    assert found.difference == pytest.approx(differences.mean())
    assert found.p_value == pytest.approx(2 * stats.t.sf(differences.mean() / error, 3))
    assert found.p_value == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    reach = stats.t.ppf(0.975, 3) * error
    assert (found.low, found.high) == pytest.approx((differences.mean() - reach, differences.mean() + reach))
    assert found.to_dict()["num_seeds"] == [4, 4]


def test_other_seeds_are_compared_by_welch() -> None:
    """By hand, with the Welch-Satterthwaite degrees of freedom."""
    second = {11: 0.871, 12: 0.869, 13: 0.902}
    a, b = np.array(list(FIRST.values())), np.array(list(second.values()))
    parts = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    error = sqrt(sum(parts))
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
    found = compare_over_seeds(FIRST, second)
    assert not found.paired
    assert found.num_seeds == (4, 3)
    assert found.p_value == pytest.approx(2 * stats.t.sf(abs(a.mean() - b.mean()) / error, freedom))
    assert found.high - found.difference == pytest.approx(stats.t.ppf(0.975, freedom) * error)


def test_without_spread_equal_means_are_equal_and_others_are_not() -> None:
    same = compare_over_seeds({1: 0.9, 2: 0.8}, {1: 0.9, 2: 0.8})
    assert (same.difference, same.p_value, same.low, same.high) == (0, 1, 0, 0)
    apart = compare_over_seeds({1: 0.9, 2: 0.9}, {3: 0.7, 4: 0.7, 5: 0.7})
    assert (apart.p_value, apart.low, apart.high) == (0, apart.difference, apart.difference)


def test_rounding_is_no_spread() -> None:
    """Three differences of a tenth, of which no two are the same number to a computer."""
    assert len({0.91 - 0.81, 0.92 - 0.82, 0.93 - 0.83}) > 1
    found = compare_over_seeds({1: 0.91, 2: 0.92, 3: 0.93}, {1: 0.81, 2: 0.82, 3: 0.83})
    assert (found.low, found.high, found.p_value) == (found.difference, found.difference, 0)


def test_one_group_without_spread_is_compared_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compare_over_seeds({1: 0.9, 2: 0.9}, {3: 0.8, 4: 0.7})
    # By hand: all spread is in the second, with one degree of freedom; a t of 3 has p = 1 - 2 atan(3)/pi.
    assert found.p_value == pytest.approx(1 - 2 * np.arctan(3) / np.pi)


@pytest.mark.parametrize(("first", "second"), [(FIRST, {1: 0.9}), ({}, FIRST), ({1: 0.5}, {1: 0.5})])
def test_a_single_seed_proves_nothing(first: dict[int, float], second: dict[int, float]) -> None:
    with pytest.raises(DataError, match="two seeds of each"):
        compare_over_seeds(first, second)


REPEATS = 1500
Level = Callable[[dict[int, float], dict[int, float]], float]


def alarms(level: Level, *, paired: bool, seeds: int = 5) -> int:
    """How often two equal settings are called different at 0.05; a seed's luck is shared and large."""
    random = np.random.default_rng(1)
    count = 0
    for _ in range(REPEATS):
        luck = random.normal(0, 0.03, seeds)
        one, two = (random.normal(0.9, 0.01, seeds) + (luck if paired else 0) for _ in range(2))
        offset = 0 if paired else 100
        count += level(dict(enumerate(one)), {seed + offset: value for seed, value in enumerate(two)}) < 0.05
    return count


def p_value(first: dict[int, float], second: dict[int, float]) -> float:
    return compare_over_seeds(first, second).p_value


def without_pairs(first: dict[int, float], second: dict[int, float]) -> float:
    """A broken twin: Welch's test although the seeds are the same."""
    return compare_over_seeds(first, {seed + 100: value for seed, value in second.items()}).p_value


def one_tail(first: dict[int, float], second: dict[int, float]) -> float:
    """A broken twin: half of the p-value, whichever side is the larger."""
    return p_value(first, second) / 2


def normal_law(first: dict[int, float], second: dict[int, float]) -> float:
    """A broken twin: as if the spread of three seeds were known exactly."""
    a, b = np.array(list(first.values())), np.array(list(second.values()))
    error = sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
    return float(2 * stats.norm.sf(abs(a.mean() - b.mean()) / error))


def test_equal_settings_are_called_different_one_time_in_twenty() -> None:
    """Normal errors: the rate is exactly 0.05 in the paired test. False alarm 2e-9."""
    low, high = allowed(REPEATS, 0.05, 0.05)
    assert low <= alarms(p_value, paired=True) <= high
    assert alarms(without_pairs, paired=True) < low
    assert alarms(one_tail, paired=True) > high


def test_equal_settings_with_other_seeds_are_called_different_about_as_rarely() -> None:
    """Welch's test is an approximation: between 0.02 and 0.06 with three seeds. False alarm 2e-9."""
    low, high = allowed(REPEATS, 0.02, 0.06)
    assert low <= alarms(p_value, paired=False, seeds=3) <= high
    assert alarms(normal_law, paired=False, seeds=3) > high
