"""ε of a search by a second way, which shares no code with the first.

`dp.selection` asks the package dp-accounting. Here Rényi divergences of the subsampled Gaussian mechanism are summed by
hand at whole orders (Mironov, Talwar and Zhang, 2019), those of the best of a random number of runs follow from
Theorems 2 and 6 of Papernot and Steinke (2022), and ε from Proposition 12 of Canonne, Kamath and Steinke (2020).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaln, logsumexp

Floats = NDArray[np.float64]

ORDERS = np.array([*range(2, 64), 80, 96, 128, 192, 256, 384, 512, 768, 1024], dtype=np.float64)


def search_epsilon(
    trainings: Iterable[tuple[float, float, int]], score_noise: float, mean: float, shape: float | None, delta: float
) -> float:
    """Return ε of the best of a random number of candidates, each one of the trainings (rate, noise, steps) or a score.

    A shape of None is the Poisson law.
    """
    each = [steps * _sampled(rate, noise) for rate, noise, steps in trainings]
    one = np.max([*each, ORDERS / (2 * score_noise**2)], axis=0)
    below = ORDERS - 1
    if shape is None:
        allowed = np.array([_delta(one, float(np.log1p(1 / lower))) for lower in below])
        best = one + mean * allowed + np.log(mean) / below
    else:
        constant = (1 + shape) * np.min((1 - 1 / ORDERS) * one - np.log(_success(mean, shape)) / ORDERS)
        best = one + constant + np.log(mean) / below
        # A divergence is no larger than those of larger orders.
        best = np.minimum.accumulate(best[::-1])[::-1]
    return float(np.min(best + np.log1p(-1 / ORDERS) - np.log(delta * ORDERS) / below))


def _sampled(rate: float, noise: float) -> Floats:
    """Return Rényi divergences of one step at whole orders."""
    if rate == 1:
        return ORDERS / (2 * noise**2)
    found = []
    for order in ORDERS:
        k = np.arange(order + 1)
        chosen = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        terms = chosen + k * np.log(rate) + (order - k) * np.log1p(-rate) + k * (k - 1) / (2 * noise**2)
        found.append(max(float(logsumexp(terms)), 0.0) / (order - 1))
    return np.array(found)


def _delta(divergences: Floats, epsilon: float) -> float:
    """Return the least δ that divergences prove for an ε: by their moments, or by the total variation."""
    below = ORDERS - 1
    moments = below * (divergences - epsilon + np.log1p(-1 / ORDERS)) - np.log(ORDERS)
    variation = np.sqrt(-np.expm1(-divergences))
    return float(min(np.exp(min(moments.min(), 0.0)), variation.min(), 1.0))


def _success(mean: float, shape: float) -> float:
    def excess(success: float) -> float:
        if shape == 0:
            return (1 / success - 1) / -float(np.log(success)) - mean
        return shape * (1 / success - 1) / -float(np.expm1(shape * np.log(success))) - mean

    return float(brentq(excess, 1e-12, 1 - 1e-12, xtol=1e-15))
