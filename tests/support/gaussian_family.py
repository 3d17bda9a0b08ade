"""The family of Gaussian noise, to try bounds with: its curves and its ε need no accountant."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import ndtr, ndtri

from stobatch.auditing.tradeoff_curves import Curve, CurveFamily, Floats, most_refuted
from stobatch.dp.accounting import check_delta, gaussian_epsilon


class GaussianFamily(CurveFamily):
    """μ-GDP: D and D' are no easier to tell apart than N(0, 1) and N(μ, 1), for which Φ^-1(1 - FPR) - Φ^-1(FNR) = μ.

    It is the family of Gaussian noise on batches that are fixed, or that take every record (`gaussian_epsilon`).

    Its ε is known in closed form, so bounds with a family are measured with it.

    >>> round(GaussianFamily().epsilon(0.3, 0.3, delta=1e-5), 2)  # μ = 1.05
    4.63
    """

    name = "gaussian_family"
    assumes = "the trade-off is that of Gaussian noise (μ-GDP for some μ), as the mechanism's proof says"

    def epsilon(self, fpr: float, fnr: float, delta: float) -> float:
        check_delta(delta)
        if fpr + fnr >= 1:
            return 0.0
        if min(fpr, fnr) == 0:
            return math.inf
        mu = -float(ndtri(fpr) + ndtri(fnr))
        return gaussian_epsilon(1 / mu, 1, delta) if mu > 1e-12 else 0.0

    def strongest(self, fpr: Floats, fnr: Floats, delta: float) -> int:
        return int(np.argmin(ndtri(fpr) + ndtri(fnr)))

    def most_refuted(self, refuted: Callable[[Curve], bool], delta: float) -> float:
        check_delta(delta)
        # Φ(Φ⁻¹(tpr) - μ) is f(1 - tpr): the best test of N(0, 1) against N(μ, 1) with this true-positive rate.
        mu = most_refuted(lambda mu: refuted(lambda tpr: float(ndtr(ndtri(tpr) - mu))))
        return gaussian_epsilon(1 / mu, 1, delta) if mu > 1e-9 else 0.0
