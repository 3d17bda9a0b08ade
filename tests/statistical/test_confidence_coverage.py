"""Confidence bounds miss as rarely as they say.

Clopper-Pearson: exactly, by summing the binomial law; there is no chance of a false alarm. Hoeffding: by simulation,
alarm if the misses exceed the 1e-9 quantile of a binomial law with the stated failure probability.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import beta, binom

from stobatch.votes.confidence import INTERVALS, clopper_pearson, hoeffding

Floats = NDArray[np.float64]
Bounds = Callable[[Floats, int, float], tuple[Floats, Floats]]

FALSE_ALARM = 1e-9
TRIALS = 100_000


def exact_misses(bounds: Bounds, draws: int, failure: float, mean: float) -> tuple[float, float]:
    """The probability that the lower bound is above, and that the upper one is below, the true mean."""
    counts = np.arange(draws + 1, dtype=np.float64)
    lower, upper = bounds(counts, draws, failure)
    law = binom.pmf(counts, draws, mean)
    return float(law[lower > mean].sum()), float(law[upper < mean].sum())


def simulated_misses(bounds: Bounds, draws: int, failure: float, sample: Callable[[int], Floats], mean: float) -> int:
    lower, upper = bounds(sample(TRIALS), draws, failure)
    return max(int((lower > mean).sum()), int((upper < mean).sum()))


def overconfident(bounds: Bounds, factor: float) -> Bounds:
    """A broken twin: the interval shrunk towards its estimate."""

    def shrunk(values: Floats, draws: int, failure: float) -> tuple[Floats, Floats]:
        lower, upper = bounds(values, draws, failure)
        mean = values / draws
        return mean + factor * (lower - mean), mean + factor * (upper - mean)

    return shrunk


MEANS = (1e-4, 0.003, 0.1, 0.37, 0.5, 0.9, 0.997, 0.9999)
SETTINGS = [(20, 0.05), (200, 0.005), (2000, 0.0025), (1000, 0.2)]


@pytest.mark.parametrize(("draws", "failure"), SETTINGS)
@pytest.mark.parametrize("name", sorted(INTERVALS))
def test_each_bound_misses_a_success_probability_with_at_most_the_stated_probability(
    name: str, draws: int, failure: float
) -> None:
    for mean in MEANS:
        assert max(exact_misses(INTERVALS[name], draws, failure, mean)) <= failure * (1 + 1e-9)


@pytest.mark.parametrize(("draws", "failure"), SETTINGS)
def test_clopper_pearson_is_not_wasteful(draws: int, failure: float) -> None:
    """At its own edges it misses with exactly the stated probability: a count k bounds p = lower(k) from above."""
    for count in (1, draws // 3, draws - 1):
        edge = float(clopper_pearson(np.array([float(count)]), draws, failure)[0][0])
        assert binom.sf(count - 1, draws, edge) == pytest.approx(failure, rel=1e-6)


@pytest.mark.parametrize("factor", [0.5, 0.9])
def test_a_narrower_interval_is_caught(factor: float) -> None:
    twin = overconfident(clopper_pearson, factor)
    assert max(max(exact_misses(twin, 200, 0.005, mean)) for mean in MEANS) > 0.005 * (1 + 1e-9)


def test_a_bound_that_ignores_its_failure_probability_is_caught() -> None:
    def careless(counts: Floats, draws: int, failure: float) -> tuple[Floats, Floats]:
        return clopper_pearson(counts, draws, 0.05)

    assert max(max(exact_misses(careless, 200, 0.005, mean)) for mean in MEANS) > 0.005 * (1 + 1e-9)


def mean_of_products(draws: int) -> Callable[[int], Floats]:
    """Sums of products of two scores, as f^h f^x are: uniform times beta."""
    random = np.random.default_rng(0)
    return lambda trials: sum(
        random.random(trials) * beta.rvs(2, 1, size=trials, random_state=random) for _ in range(draws)
    )


def two_points(draws: int) -> Callable[[int], Floats]:
    """The hardest law for Hoeffding: all mass at 0 and 1."""
    return lambda trials: np.random.default_rng(1).binomial(draws, 0.5, trials).astype(np.float64)


@pytest.mark.parametrize(("sampler", "mean"), [(mean_of_products, 1 / 3), (two_points, 0.5)])
@pytest.mark.parametrize("failure", [0.3, 0.05, 0.0025])
def test_hoeffding_misses_a_mean_with_at_most_the_stated_probability(
    sampler: Callable[[int], Callable[[int], Floats]], mean: float, failure: float
) -> None:
    allowed = binom.isf(FALSE_ALARM, TRIALS, failure)
    assert simulated_misses(hoeffding, 40, failure, sampler(40), mean) <= allowed


@pytest.mark.parametrize("failure", [0.05, 0.0025])
def test_hoeffding_of_half_the_width_is_caught(failure: float) -> None:
    allowed = binom.isf(FALSE_ALARM, TRIALS, failure)
    assert simulated_misses(overconfident(hoeffding, 0.5), 40, failure, two_points(40), 0.5) > allowed


@pytest.mark.parametrize("name", sorted(INTERVALS))
def test_bounds_stay_ordered_inside_0_to_1_at_every_count(name: str) -> None:
    counts = np.arange(101, dtype=np.float64)
    lower, upper = INTERVALS[name](counts, 100, 0.01)
    assert ((lower >= 0) & (lower <= counts / 100) & (counts / 100 <= upper) & (upper <= 1)).all()
    assert (np.diff(lower) >= 0).all()
    assert (np.diff(upper) >= 0).all()
