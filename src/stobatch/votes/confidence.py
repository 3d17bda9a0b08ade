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
"""Below this failure probability incomplete beta functions vanish, or have no number for an inverse."""
_ROUNDING = 1e-6
"""The share of the failure probability that the inverse may miss it by."""
_SMALLEST_LOG = -800.0
_HALVINGS = 120


def check_failure(failure: float) -> None:
    """Raise unless it is a probability with which a bound may fail, and may hold."""
    if not 0 < failure < 1:
        raise SettingError(
            f"a failure probability of {failure:g} is not allowed.",
            why="At 0 nothing is ever bounded, and at 1 nothing is promised.",
            remedy="Use a number between 0 and 1, such as 0.001.",
        )


def clopper_pearson(successes: Floats, draws: int, failure: float) -> tuple[Floats, Floats]:
    """Exact bounds on a success probability from a count of independent successes.

    **Guarantee.** Each of the two bounds fails with probability at most `failure`.

    >>> lower, upper = clopper_pearson(np.array([2000.0]), 2000, 0.005)
    >>> round(float(lower[0]), 5), float(upper[0])
    (0.99735, 1.0)
    """
    check_failure(failure)
    won = np.asarray(successes, dtype=np.float64)
    if not bool(((won >= 0) & (won <= draws)).all()):
        raise SettingError(
            f"a count of successes is not between 0 and the {draws} draws.", remedy="Count each draw once."
        )
    lost = draws - won
    # P_p[X >= k] = I_p(k, n - k + 1) grows with p: every p at which k successes or more have a probability below
    # `failure` is ruled out, and the bound is where it is `failure`. P_p[X <= k] = 1 - I_p(k + 1, n - k) for the other.
    # Unanimous counts have closed forms: p^n = failure, and (1 - p)^n = failure.
    lower = np.where(lost > 0, _inverse(betaincinv, betainc, won, lost + 1, failure), _root(failure, draws))
    upper = np.where(won > 0, _inverse(betainccinv, betaincc, won + 1, lost, failure), -_root_less_one(failure, draws))
    if np.isnan(lower).any():
        lower = np.where(np.isnan(lower), chernoff(won, draws, failure), lower)
    if np.isnan(upper).any():
        upper = np.where(np.isnan(upper), 1 - chernoff(lost, draws, failure), upper)
    return np.where(won > 0, lower, 0.0), np.where(lost > 0, upper, 1.0)


def _root(failure: float, draws: int) -> float:
    return exp(log(failure) / draws) if draws else 0.0


def _root_less_one(failure: float, draws: int) -> float:
    return expm1(log(failure) / draws) if draws else -1.0


def _inverse(
    inverse: Callable[..., Floats], tail: Callable[..., Floats], a: Floats, b: Floats, failure: float
) -> Floats:
    """Return where the tail of a beta law is `failure`; NaN where the inverse has no answer, or not that one."""
    a, b = np.maximum(a, 1), np.maximum(b, 1)
    found = inverse(a, b, failure)
    right = (found >= 0) & (found <= 1) & (tail(a, b, found) <= failure * (1 + _ROUNDING))
    answers: Floats = np.where(right & (failure >= _SMALLEST_EXACT), found, np.nan)
    return answers


def chernoff(successes: Floats, draws: int, failure: float) -> Floats:
    """A lower bound on a success probability for any failure probability, however small; looser than the exact one.

    P(X >= k) <= exp(-n KL(k/n, p)) for p < k/n, so every p with n KL > log(1/failure) is ruled out.

    >>> round(float(chernoff(np.array(2000.0), 2000, 0.005)), 5)
    0.99735
    """
    rate = np.asarray(successes, dtype=np.float64) / max(draws, 1)
    # Bisection in log p, since p may be as small as e^-800; `low` is always ruled out, or the end of the search.
    low, high = np.full(rate.shape, _SMALLEST_LOG), np.log(np.maximum(rate, exp(_SMALLEST_LOG / 2)))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        divergence = xlogy(rate, rate) - rate * middle + xlogy(1 - rate, 1 - rate) - xlogy(1 - rate, -np.expm1(middle))
        # The last 1e-12 is more than the divergence's own rounding: at the edge nothing is ruled out.
        out = draws * divergence > -log(failure) * (1 + 1e-12)
        low, high = np.where(out, middle, low), np.where(out, high, middle)
    # What no p above e^-800 is ruled out for is bounded by 0.
    return np.where(low > _SMALLEST_LOG, np.exp(low), 0.0)


def hoeffding(sums: Floats, draws: int, failure: float) -> tuple[Floats, Floats]:
    """Bounds on the mean of independent values in [0, 1] from their sum; each fails with probability <= `failure`.

    >>> lower, upper = hoeffding(np.array([2000.0]), 2000, 0.005)
    >>> round(float(lower[0]), 4), float(upper[0])
    (0.9636, 1.0)
    """
    check_failure(failure)
    margin = sqrt(-log(failure) / (2 * draws))
    mean = sums / draws
    return np.clip(mean - margin, 0, 1), np.clip(mean + margin, 0, 1)


INTERVALS: dict[str, Callable[[Floats, int, float], tuple[Floats, Floats]]] = {
    "clopper_pearson": clopper_pearson,
    "hoeffding": hoeffding,
}


_TAIL = 0.5
"""The stakes have density ∝ (1 - q)^(_TAIL - 1). At most 1, or the set of ruled-out means need not be an interval."""
_SEQUENCE_HALVINGS = 60
LOOK_EVERY = 100
"""`settle` looks after multiples of so many draws."""
_GROWTH = 1.25
"""Between two looks the sample grows by a quarter: overshooting costs at most that, and the looks stay few."""


def log_wealth(successes: ArrayLike, draws: ArrayLike, mean: ArrayLike) -> Floats:
    """Return the logarithm of what a gambler against "the mean is at most `mean`" owns, having started with 1.

    ∫ q^S (1-q)^F dπ(q | q > p) / (p^S (1-p)^F), in closed form by the incomplete beta function, less an allowance for
    rounding.

    >>> bool(log_wealth(100, 100, 0.9) > np.log(1000)), bool(log_wealth(90, 100, 0.9) > 0)
    (True, False)
    """
    # A gambler who stakes on q > p multiplies its money by q/p at a success and (1-q)/(1-p) at a failure: on average by
    # at most 1 where the true mean is <= p. So is a mixture over q: a supermartingale, which reaches 1/failure with
    # probability at most `failure`, ever (Ville). Stakes: density ½ (1-q)^-½ on (p, 1), over its mass (1-p)^½. Hence
    #   wealth = ½ ∫_p^1 q^S (1-q)^(F-½) dq / (p^S (1-p)^(F+½)),  the integral being B(1+S, ½+F) (1 - I_p(1+S, ½+F)).
    won, n, p = (np.asarray(v, dtype=np.float64) for v in (successes, draws, mean))
    lost = n - won
    inside = np.clip(p, 0.0, 1 - np.finfo(np.float64).epsneg)
    with np.errstate(divide="ignore"):
        above = np.log(betaincc(1 + won, _TAIL + lost, inside))
    wealth = log(_TAIL) + betaln(1 + won, _TAIL + lost) + above - xlogy(won, inside) - xlog1py(lost + _TAIL, -inside)
    # Nothing lies above a mean of 1 to bet on; and each term is a sum of n roundings at worst.
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
    draws; so it may be read after any rule for stopping, and the largest of several looks counts.

    *Proof.* The true mean p is ruled out with probability at most `failure` (Ville). What is ruled out is an interval
    [0, bound]: with M(p) the wealth, ℓ the likelihood and h(p) = ½/(1-p) the hazard rate of the stakes,
    (log M)' = h (1 - 1/M) - (log ℓ)'. Where M = 1/failure, log(1/failure) <= log(max ℓ/ℓ(p)) <= (p̂ - p)(log ℓ)'(p)
    because log ℓ is concave, so (log ℓ)' >= log(1/failure)/(1-p) >= (1 - failure)/(1-p) > h (1 - failure): M falls
    wherever it meets 1/failure, hence meets it once. The bisection returns the end that is ruled out.

    >>> [round(float(lower_sequence(n, n, 0.001)), 4) for n in (100, 1000, 10000)]
    [0.9226, 0.992, 0.9992]
    """
    won, n = np.broadcast_arrays(np.asarray(successes, dtype=np.float64), np.asarray(draws, dtype=np.float64))
    low, high = np.zeros(won.shape), np.divide(won, n, out=np.zeros(won.shape), where=n > 0)
    for _ in range(_SEQUENCE_HALVINGS):
        middle = (low + high) / 2
        out = rules_out(won, n, middle, failure) & (won > 0)
        low, high = np.where(out, middle, low), np.where(out, high, middle)
    return low


def upper_sequence(successes: ArrayLike, draws: ArrayLike, failure: float) -> Floats:
    """Return an upper bound on a success probability, for every number of draws at once, by bounding failures."""
    n = np.asarray(draws, dtype=np.float64)
    return 1 - lower_sequence(n - np.asarray(successes, dtype=np.float64), n, failure)


class Settling:
    """Trials that are drawn for until it is known which of the `needed` success probabilities each reaches.

    `needed` is sorted. A trial stops when all of `needed` are proved, when the smallest one that is not is shown to be
    too large, or when that one is out of reach even if all draws up to `most` were successes.

    **Guarantee.** Each lower bound exceeds its success probability with probability at most `failure`; and so does
    each verdict "too large" fail. Looking often and stopping early costs nothing: the bounds hold at all times.
    """

    def __init__(self, trials: int, needed: Floats, most: int, failure: float) -> None:
        self.needed, self.most, self.failure = needed, most, failure
        self.hits, self.used, self.proved = np.zeros(trials), np.zeros(trials, dtype=np.int64), np.zeros(trials)
        self.undecided, self.total = np.arange(trials), 0

    @property
    def is_open(self) -> bool:
        """Whether there is a trial to draw for, and a draw left."""
        return bool(len(self.undecided)) and self.total < self.most

    def look(self, hits: Floats, more: int) -> None:
        """Count the successes of `more` further draws of the undecided trials, and see which of them are decided."""
        undecided, failure = self.undecided, self.failure
        self.hits[undecided] += hits
        self.total += more
        self.used[undecided] = self.total
        won = self.hits[undecided]
        # What was proved at an earlier look stays proved: all looks hold at once.
        for mean in self.needed:
            passed = rules_out(won, self.total, mean, failure)
            self.proved[undecided] = np.maximum(self.proved[undecided], np.where(passed, mean, 0.0))
        # The smallest needed probability that is not proved, infinite where all are, which is out of reach.
        pending = np.append(self.needed, np.inf)[np.searchsorted(self.needed, self.proved[undecided], side="right")]
        too_large = rules_out(self.total - won, self.total, np.clip(1 - pending, 0, 1), failure)
        # A success never lowers a gambler's wealth, so the best that can happen is that all draws left are successes.
        in_reach = rules_out(won + (self.most - self.total), self.most, pending, failure)
        self.undecided = undecided[in_reach & ~too_large]

    def lower(self) -> Floats:
        """Return lower bounds, which are at least every needed probability that was proved."""
        return np.maximum(lower_sequence(self.hits, self.used, self.failure), self.proved)


def settle(
    hits_of: Callable[[NDArray[np.int64], int], Floats], trials: int, needed: Floats, most: int, failure: float
) -> tuple[Floats, NDArray[np.int64]]:
    """Draw for many trials at once until each is settled (`Settling`); return lower bounds and the draws made.

    `hits_of(open, more)` makes `more` further draws for the trials at positions `open` and counts their successes.
    """
    settling = Settling(trials, needed, most, failure)
    while settling.is_open:
        grown = LOOK_EVERY * ceil(max(settling.total * (_GROWTH - 1), 1) / LOOK_EVERY)
        more = min(grown, most - settling.total)
        settling.look(hits_of(settling.undecided, more), more)
    return settling.lower(), settling.used
