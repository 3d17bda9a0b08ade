"""One-sided confidence bounds on a mean in [0, 1]; each takes the probability with which it may fail."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, expm1, log, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaincc, betainccinv, betaincinv, xlogy

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
    # Unanimous counts have closed forms: p^n = failure, and (1 - p)^n = failure.
    lower = np.where(lost > 0, _inverse(betaincinv, betainc, won, lost + 1, failure), _root(failure, draws))
    upper = np.where(won > 0, _inverse(betainccinv, betaincc, won + 1, lost, failure), -_root_less_one(failure, draws))
    lower = np.where(np.isnan(lower), chernoff(won, draws, failure), lower)
    upper = np.where(np.isnan(upper), 1 - chernoff(lost, draws, failure), upper)
    return np.where(won > 0, lower, 0.0), np.where(lost > 0, upper, 1.0)


def _root(failure: float, draws: int) -> float:
    return exp(log(failure) / draws) if draws else 0.0


def _root_less_one(failure: float, draws: int) -> float:
    return expm1(log(failure) / draws) if draws else -1.0


def _inverse(
    inverse: Callable[..., Floats], tail: Callable[..., Floats], a: Floats, b: Floats, failure: float
) -> Floats:
    """Where the tail of a beta law is `failure`; NaN where the inverse has no answer, or not that one."""
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
    low, high = np.full(rate.shape, _SMALLEST_LOG), np.log(np.maximum(rate, exp(_SMALLEST_LOG / 2)))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        divergence = xlogy(rate, rate) - rate * middle + xlogy(1 - rate, 1 - rate) - xlogy(1 - rate, -np.expm1(middle))
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
