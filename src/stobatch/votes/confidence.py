"""One-sided confidence bounds on a mean in [0, 1]; each takes the probability with which it may fail."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, exp, expm1, log, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betainc, betaincc, betainccinv, betaincinv, betaln, xlog1py, xlogy

from stobatch.errors import SettingError

Floats = NDArray[np.float64]

_SMALLEST_EXACT = 1e-250
"""Below this failure probability incomplete beta functions underflow, or their inverses return NaN."""
_ROUNDING = 1e-6
"""The relative error that the tail at the computed inverse may have."""
_SMALLEST_LOG = -800.0
_HALVINGS = 120


def check_failure_probability(failure: float) -> None:
    """Raise unless 0 < failure < 1."""
    if not 0 < failure < 1:
        raise SettingError(
            f"a failure probability of {failure:g} is not allowed.",
            why="At 0 every bound is trivial, and at 1 a bound promises nothing.",
            remedy="Use a number between 0 and 1, such as 0.001.",
        )


def clopper_pearson(successes: Floats, draws: int, failure: float) -> tuple[Floats, Floats]:
    """Return exact lower and upper bounds on a success probability from a count of independent successes.

    **Guarantee.** Each of the two bounds fails with probability at most `failure`.

    >>> lower, upper = clopper_pearson(np.array([2000.0]), 2000, 0.005)
    >>> round(float(lower[0]), 5), float(upper[0])
    (0.99735, 1.0)
    """
    check_failure_probability(failure)
    k = np.asarray(successes, dtype=np.float64)
    if not bool(((k >= 0) & (k <= draws)).all()):
        raise SettingError(
            f"a count of successes is not between 0 and the {draws} draws.", remedy="Count each draw once."
        )
    misses = draws - k
    # P_p[X >= k] = I_p(k, n - k + 1) grows with p: every p at which k successes or more have a probability below
    # `failure` is ruled out, and the bound is where it is `failure`. P_p[X <= k] = 1 - I_p(k + 1, n - k) for the other.
    # Unanimous counts have closed forms: p^n = failure, and (1 - p)^n = failure.
    all_hit = exp(log(failure) / draws) if draws else 0.0
    none_hit = -expm1(log(failure) / draws) if draws else 1.0
    lower = np.where(misses > 0, _inverse(betaincinv, betainc, k, misses + 1, failure), all_hit)
    upper = np.where(k > 0, _inverse(betainccinv, betaincc, k + 1, misses, failure), none_hit)
    # Where the inverse fails (NaN) Chernoff's bound is valid too, and looser.
    if np.isnan(lower).any():
        lower = np.where(np.isnan(lower), chernoff(k, draws, failure), lower)
    if np.isnan(upper).any():
        upper = np.where(np.isnan(upper), 1 - chernoff(misses, draws, failure), upper)
    return np.where(k > 0, lower, 0.0), np.where(misses > 0, upper, 1.0)


def _inverse(
    inverse: Callable[..., Floats], tail: Callable[..., Floats], a: Floats, b: Floats, failure: float
) -> Floats:
    """Return the p at which the tail of a beta distribution is `failure`; NaN unless `tail` confirms it."""
    a, b = np.maximum(a, 1), np.maximum(b, 1)
    p = inverse(a, b, failure)
    confirmed = (p >= 0) & (p <= 1) & (tail(a, b, p) <= failure * (1 + _ROUNDING))
    result: Floats = np.where(confirmed & (failure >= _SMALLEST_EXACT), p, np.nan)
    return result


def chernoff(successes: Floats, draws: int, failure: float) -> Floats:
    """Return a lower bound on a success probability for any failure probability, however small; looser than exact.

    P(X >= k) <= exp(-n KL(k/n, p)) for p < k/n, so every p with n KL > log(1/failure) is ruled out.

    >>> round(float(chernoff(np.array(2000.0), 2000, 0.005)), 5)
    0.99735
    """
    rate = np.asarray(successes, dtype=np.float64) / max(draws, 1)
    # Bisection in log p, since p may be as small as e^-800. Invariant: `low` is ruled out, or is the search's end.
    low, high = np.full(rate.shape, _SMALLEST_LOG), np.log(np.maximum(rate, exp(_SMALLEST_LOG / 2)))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        divergence = xlogy(rate, rate) - rate * middle + xlogy(1 - rate, 1 - rate) - xlogy(1 - rate, -np.expm1(middle))
        # 1e-12 exceeds the rounding of the divergence, so that rounding rules nothing out.
        excluded = draws * divergence > -log(failure) * (1 + 1e-12)
        low, high = np.where(excluded, middle, low), np.where(excluded, high, middle)
    # Where no p above e^-800 is ruled out the bound is 0.
    return np.where(low > _SMALLEST_LOG, np.exp(low), 0.0)


def hoeffding(sums: Floats, draws: int, failure: float) -> tuple[Floats, Floats]:
    """Return bounds on the mean of independent values in [0, 1] from their sum; each fails with chance <= `failure`.

    >>> lower, upper = hoeffding(np.array([2000.0]), 2000, 0.005)
    >>> round(float(lower[0]), 4), float(upper[0])
    (0.9636, 1.0)
    """
    check_failure_probability(failure)
    margin = sqrt(-log(failure) / (2 * draws))
    mean = sums / draws
    return np.clip(mean - margin, 0, 1), np.clip(mean + margin, 0, 1)


INTERVALS: dict[str, Callable[[Floats, int, float], tuple[Floats, Floats]]] = {
    "clopper_pearson": clopper_pearson,
    "hoeffding": hoeffding,
}


_TAIL = 0.5
"""Alternatives q > p have prior density ∝ (1 - q)^(_TAIL - 1). For _TAIL <= 1 the ruled-out means are an interval."""
_SEQUENCE_HALVINGS = 60
LOOK_EVERY = 100
"""Draws between two looks at a confidence sequence are a multiple of this; noise is drawn in blocks of this size."""
_GROWTH = 1.25
"""The sample grows by a quarter between two looks: at most a quarter of the draws is wasted, and looks stay few."""


def log_wealth(successes: ArrayLike, draws: ArrayLike, mean: ArrayLike) -> Floats:
    """Return the log of the test supermartingale ("wealth", 1 at the start) against "the mean is at most `mean`".

    With S successes, F failures and p = mean it is ∫ q^S (1-q)^F dπ(q | q > p) / (p^S (1-p)^F), a mixture of likelihood
    ratios, in closed form by the incomplete beta function, less an allowance for rounding.

    >>> bool(log_wealth(100, 100, 0.9) > np.log(1000)), bool(log_wealth(90, 100, 0.9) > 0)
    (True, False)
    """
    # For q > p, each draw multiplies the likelihood ratio by q/p (success) or (1-q)/(1-p) (failure): on average by at
    # most 1 where the true mean is <= p. So does a mixture over q: it is a supermartingale, and reaches 1/failure at
    # any time with probability at most `failure` (Ville). Mixture: density ½ (1-q)^-½ on (p, 1), over its mass (1-p)^½:
    #   wealth = ½ ∫_p^1 q^S (1-q)^(F-½) dq / (p^S (1-p)^(F+½)),  the integral being B(1+S, ½+F) (1 - I_p(1+S, ½+F)).
    s, n, p = (np.asarray(v, dtype=np.float64) for v in (successes, draws, mean))
    f = n - s
    inside = np.clip(p, 0.0, 1 - np.finfo(np.float64).epsneg)
    with np.errstate(divide="ignore"):
        log_tail = np.log(betaincc(1 + s, _TAIL + f, inside))
    wealth = log(_TAIL) + betaln(1 + s, _TAIL + f) + log_tail - xlogy(s, inside) - xlog1py(f + _TAIL, -inside)
    # A mean of 1 has no alternative. The allowance covers the rounding of the terms, which grow at most like n.
    return np.where(p < 1, wealth - 1e-9 - 1e-12 * n, -np.inf)


def rules_out(successes: ArrayLike, draws: ArrayLike, mean: ArrayLike, failure: float) -> NDArray[np.bool_]:
    """Return whether the draws so far prove that their success probability exceeds `mean`.

    **Guarantee.** If the success probability of each draw, given the earlier ones, is at most `mean`, this is ever
    true, at any of infinitely many looks, with probability at most `failure`.
    """
    return log_wealth(successes, draws, mean) >= -log(failure)


def lower_sequence(successes: ArrayLike, draws: ArrayLike, failure: float) -> Floats:
    """Return a lower bound on a success probability, for every number of draws at once.

    **Guarantee.** With probability at least 1 - failure the bound is below the success probability at every number of
    draws. So it holds at any stopping time, and the largest bound over several looks holds too.

    *Proof.* The true mean p is ruled out with probability at most `failure` (Ville). What is ruled out is an interval
    [0, bound]: with M(p) the wealth, ℓ the likelihood and h(p) = ½/(1-p) the hazard rate of the prior,
    (log M)' = h (1 - 1/M) - (log ℓ)'. Where M = 1/failure, log(1/failure) <= log(max ℓ/ℓ(p)) <= (p̂ - p)(log ℓ)'(p)
    because log ℓ is concave, so (log ℓ)' >= log(1/failure)/(1-p) >= (1 - failure)/(1-p) > h (1 - failure): M falls
    wherever it meets 1/failure, hence meets it once. The bisection returns the end that is ruled out.

    >>> [round(float(lower_sequence(n, n, 0.001)), 4) for n in (100, 1000, 10000)]
    [0.9226, 0.992, 0.9992]
    """
    s, n = np.broadcast_arrays(np.asarray(successes, dtype=np.float64), np.asarray(draws, dtype=np.float64))
    low, high = np.zeros(s.shape), np.divide(s, n, out=np.zeros(s.shape), where=n > 0)
    for _ in range(_SEQUENCE_HALVINGS):
        middle = (low + high) / 2
        excluded = rules_out(s, n, middle, failure) & (s > 0)
        low, high = np.where(excluded, middle, low), np.where(excluded, high, middle)
    return low


class SequentialTest:
    """Sequential tests of many success probabilities against the same thresholds, one test for each trial.

    `thresholds` are sorted. A trial stops when it is proved to exceed them all, when the smallest threshold that is not
    proved is shown to be too large, or when even `max_draws` draws, all successes from now on, could not prove it.

    **Guarantee.** Each lower bound exceeds its success probability with probability at most `failure`, and each verdict
    "too large" is wrong with probability at most `failure`. Any number of looks is free: the bounds hold at all times.
    """

    def __init__(self, trials: int, thresholds: Floats, max_draws: int, failure: float) -> None:
        self.thresholds, self.max_draws, self.failure = thresholds, max_draws, failure
        self.successes, self.draws = np.zeros(trials), np.zeros(trials, dtype=np.int64)
        self.proved = np.zeros(trials)
        """The largest threshold that each trial is proved to exceed."""
        self.undecided, self.total_draws = np.arange(trials), 0

    @property
    def is_running(self) -> bool:
        """Whether a trial is undecided and draws are left."""
        return bool(len(self.undecided)) and self.total_draws < self.max_draws

    def update(self, successes: Floats, draws: int) -> None:
        """Count the successes of `draws` further draws of the undecided trials, and stop those that are decided."""
        undecided, failure = self.undecided, self.failure
        self.successes[undecided] += successes
        self.total_draws += draws
        self.draws[undecided] = self.total_draws
        counted = self.successes[undecided]
        # A threshold proved at an earlier look stays proved: the bounds of all looks hold at once.
        for threshold in self.thresholds:
            passed = rules_out(counted, self.total_draws, threshold, failure)
            self.proved[undecided] = np.maximum(self.proved[undecided], np.where(passed, threshold, 0.0))
        # The smallest threshold that is not proved; infinite, hence never provable, where all are.
        pending = np.append(self.thresholds, np.inf)[
            np.searchsorted(self.thresholds, self.proved[undecided], side="right")
        ]
        too_large = rules_out(self.total_draws - counted, self.total_draws, np.clip(1 - pending, 0, 1), failure)
        # A success never lowers the wealth, so the best case is that all remaining draws are successes.
        provable = rules_out(counted + (self.max_draws - self.total_draws), self.max_draws, pending, failure)
        self.undecided = undecided[provable & ~too_large]

    def lower_bounds(self) -> Floats:
        """Return lower bounds, at least the thresholds that were proved."""
        return np.maximum(lower_sequence(self.successes, self.draws, self.failure), self.proved)


def draw_until_decided(
    count_successes: Callable[[NDArray[np.int64], int], Floats],
    trials: int,
    thresholds: Floats,
    max_draws: int,
    failure: float,
) -> tuple[Floats, NDArray[np.int64]]:
    """Draw for many trials at once until each is decided (`SequentialTest`); return lower bounds and draws made.

    `count_successes(undecided, draws)` makes `draws` further draws for the trials at these positions and counts
    their successes.
    """
    test = SequentialTest(trials, thresholds, max_draws, failure)
    while test.is_running:
        growth = LOOK_EVERY * ceil(max(test.total_draws * (_GROWTH - 1), 1) / LOOK_EVERY)
        draws = min(growth, max_draws - test.total_draws)
        test.update(count_successes(test.undecided, draws), draws)
    return test.lower_bounds(), test.draws
