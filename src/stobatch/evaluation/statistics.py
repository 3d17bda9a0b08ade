"""Shares with confidence intervals, paired differences, and t-tests over seeds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from itertools import combinations
from math import sqrt
from typing import Any, TypeVar

import numpy as np
from scipy.special import betainc, ndtri

from stobatch.errors import DataError
from stobatch.results import Difference, Share, TTest
from stobatch.votes.confidence import clopper_pearson

CONFIDENCE = 0.95
_ROUNDING = 1e-12
"""Accuracies that differ by less are equal: they are counts over totals."""


def share_of(flags: Any, confidence: float = CONFIDENCE) -> Share:
    """Return the share of true entries, with its two-sided Clopper-Pearson interval over the choice of test examples.

    >>> str(share_of([True] * 945 + [False] * 55))
    '94.5% [92.9, 95.8]'
    """
    values = np.asarray(flags, dtype=bool)
    count, total = int(values.sum()), len(values)
    lower, upper = clopper_pearson(np.array([float(count)]), total, (1 - confidence) / 2)
    return Share(value=count / total, count=count, total=total, low=float(lower[0]), high=float(upper[0]))


def paired_difference(first: Any, second: Any) -> Difference:
    """Return how much more often the first is true than the second, with a 95% interval (Agresti and Min, 2005).

    The interval is normal after two made-up pairs are added, so that it does not vanish where no example differs.

    >>> paired_difference([True] * 60 + [False] * 40, [True] * 40 + [False] * 60).value
    0.2
    """
    one, two = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    only_one, only_two, total = int((one & ~two).sum()), int((two & ~one).sum()), len(one)
    middle = (only_one - only_two) / (total + 2)
    error = sqrt((only_one + only_two + 1) / (total + 2) - middle**2) / sqrt(total + 2)
    reach = float(ndtri((1 + CONFIDENCE) / 2)) * error
    value, low, high = (only_one - only_two) / total, max(middle - reach, -1.0), min(middle + reach, 1.0)
    return Difference(value=value, low=low, high=high)


def sign_test(first_only: int, second_only: int) -> float:
    """Return P[at least `first_only` successes] if both outcomes were equally likely (one-sided, exact)."""
    return chance_of_as_many(first_only, first_only + second_only, 0.5)


def chance_of_as_many(successes: int, tries: int, probability: float) -> float:
    """Return P[at least so many successes] of independent tries: what `scipy.stats.binom.sf` makes of one less.

    >>> chance_of_as_many(2, 2, 0.5), chance_of_as_many(0, 2, 0.5)
    (0.25, 1.0)
    """
    return float(betainc(successes, tries - successes + 1, probability)) if successes else 1.0


def compare_over_seeds(first: Mapping[int, float], second: Mapping[int, float]) -> TTest:
    """Test whether two settings differ: paired where both have the same seeds, else Welch's test.

    >>> test = compare_over_seeds({1: 0.91, 2: 0.92, 3: 0.93}, {1: 0.81, 2: 0.82, 3: 0.84})
    >>> round(test.difference, 3), test.paired, test.p_value < 0.01
    (0.097, True, True)
    """
    if min(len(first), len(second)) < 2:
        raise DataError(
            f"a t-test over {len(first)} and {len(second)} seeds says nothing.",
            remedy="Give two seeds of each or more.",
        )
    paired = first.keys() == second.keys()
    a, b = (np.array([values[seed] for seed in sorted(values)]) for values in (first, second))
    difference, sizes = float(a.mean() - b.mean()), (len(a), len(b))
    if max(np.ptp(values) for values in ((a - b,) if paired else (a, b))) < _ROUNDING:
        # No spread at all: the test has no variance to work with, equal means are equal and others are not.
        equal = abs(difference) < _ROUNDING
        return TTest(
            difference=difference, low=difference, high=difference, p_value=1.0 if equal else 0.0, paired=paired,
            num_seeds=sizes,
        )  # fmt: skip
    from scipy import stats

    with warnings.catch_warnings():
        # One of two groups without any spread is no loss of precision.
        warnings.simplefilter("ignore", RuntimeWarning)
        result = stats.ttest_rel(a, b) if paired else stats.ttest_ind(a, b, equal_var=False)
    low, high = result.confidence_interval(CONFIDENCE)
    return TTest(
        difference=difference, low=float(low), high=float(high), p_value=float(result.pvalue), paired=paired,
        num_seeds=sizes,
    )  # fmt: skip


K = TypeVar("K", bound=tuple[Any, ...])


def t_tests_between(groups: Mapping[str, Mapping[int, Mapping[K, float]]]) -> Iterator[tuple[str, str, K, TTest]]:
    """Yield two-tailed tests between every two groups with two seeds or more, measure by measure.

    `groups` has for each setting and each of its seeds what was measured. A measure that one of the two lacks for some
    seed is not tested between them.
    """
    several = {name: seeds for name, seeds in groups.items() if len(seeds) > 1}
    for (first, one), (second, two) in combinations(several.items(), 2):
        for measure in sorted(set.intersection(*(set(values) for seeds in (one, two) for values in seeds.values()))):
            a, b = ({seed: values[measure] for seed, values in seeds.items()} for seeds in (one, two))
            yield first, second, measure, compare_over_seeds(a, b)
