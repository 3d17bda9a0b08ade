"""One-sided confidence bounds on a mean in [0, 1]; each takes the probability with which it may fail."""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

Floats = NDArray[np.float64]


def clopper_pearson(successes: Floats, draws: int, failure: float) -> tuple[Floats, Floats]:
    """Exact bounds on a success probability from a count of independent successes.

    **Guarantee.** Each of the two bounds fails with probability at most `failure`.

    >>> lower, upper = clopper_pearson(np.array([2000.0]), 2000, 0.005)
    >>> round(float(lower[0]), 5), float(upper[0])
    (0.99735, 1.0)
    """
    missing = draws - successes
    lower = np.where(successes > 0, beta.ppf(failure, np.maximum(successes, 1), missing + 1), 0.0)
    upper = np.where(missing > 0, beta.ppf(1 - failure, successes + 1, np.maximum(missing, 1)), 1.0)
    return lower, upper


def hoeffding(sums: Floats, draws: int, failure: float) -> tuple[Floats, Floats]:
    """Bounds on the mean of independent values in [0, 1] from their sum; each fails with probability <= `failure`.

    >>> lower, upper = hoeffding(np.array([2000.0]), 2000, 0.005)
    >>> round(float(lower[0]), 4), float(upper[0])
    (0.9636, 1.0)
    """
    margin = sqrt(log(1 / failure) / (2 * draws))
    mean = sums / draws
    return np.clip(mean - margin, 0, 1), np.clip(mean + margin, 0, 1)


INTERVALS: dict[str, Callable[[Floats, int, float], tuple[Floats, Floats]]] = {
    "clopper_pearson": clopper_pearson,
    "hoeffding": hoeffding,
}
