"""The Gaussian mechanism: how much noise a known sensitivity needs, by three theorems, and noise spread unevenly.

Everything is about one number, the deviations m = Δ/σ: N(0, σ²) noise on a map of l2 sensitivity Δ is no easier to see
through than N(0, 1) against N(m, 1). A calibration says which m it calls (ε, δ)-differentially private.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf, isfinite, pi, sqrt
from typing import ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import erfcx, erfinv, ndtri, ndtri_exp
from torch import Tensor

from stobatch.dp.accounting import check_delta
from stobatch.errors import SettingError

Floats = NDArray[np.float64]

_FEW_DEVIATIONS = 0.03
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(3)
_HALVINGS = 50
_ROUNDING = 1e-12


def _mills(values: Floats) -> Floats:
    """Φ(-t)/φ(t), the Mills ratio; falls from 1.25 at 0 like 1/t."""
    ratio: Floats = sqrt(pi / 2) * erfcx(values / sqrt(2))
    return ratio


def gaussian_delta(epsilon: Floats | float, deviations: Floats | float) -> Floats:
    """Return the exact δ(ε) of noise that a neighbour shifts by so many deviations m (Balle and Wang, 2018).

    δ = Φ(m/2 - ε/m) - e^ε Φ(-m/2 - ε/m), the hockey-stick divergence of N(m, 1) and N(0, 1); e^ε φ(u) = φ(t) for
    t = ε/m - m/2 and u = ε/m + m/2, so that no large number appears: δ = φ(t) (M(t) - M(u)) with M the Mills ratio.
    For few deviations the difference is an integral of -M' = 1 - sM(s), which cancels nothing.

    **Guarantee.** Relative error below 1e-12 for up to 100 deviations and δ down to 1e-300. For numbers from 0 on.

    >>> gaussian_delta(np.array([0.0, 1.0, 700.0]), 1.0).round(4).tolist()
    [0.3829, 0.1269, 0.0]
    """
    epsilon, deviations = np.broadcast_arrays(np.float64(epsilon), np.float64(deviations))
    # No noise and no shift are limits that come out right: δ = 1 and δ = 0.
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        centre = np.where(deviations > 0, epsilon / deviations, inf)
        low, high = centre - deviations / 2, centre + deviations / 2
        density = np.exp(-(low**2) / 2) / sqrt(2 * pi)
        near, far = _mills(np.abs(low)), _mills(high)
        places = np.maximum(centre, 0)[..., None] + np.minimum(deviations, _FEW_DEVIATIONS)[..., None] / 2 * _NODES
        integral = deviations / 2 * ((1 - places * _mills(places)) @ _WEIGHTS)
        few = density * np.where(centre < inf, integral, 0.0)
    many = np.where(low < 0, 1 - density * (near + far), density * (near - far))
    return np.where(deviations < _FEW_DEVIATIONS, few, many)


class Calibration(ABC):
    """A theorem that says how much Gaussian noise is enough for (ε, δ)-differential privacy."""

    name: ClassVar[str]
    largest_epsilon: ClassVar[float] = inf
    """Beyond it the theorem says nothing."""
    delta_below: ClassVar[float] = 1.0

    def stddev(self, epsilon: float, delta: float, sensitivity: float) -> float:
        """Return the standard deviation σ of noise on every coordinate of a map of this l2 sensitivity.

        **Guarantee.** The map with such noise is (epsilon, delta)-differentially private.
        """
        if not 0 < epsilon <= self.largest_epsilon or epsilon == inf:
            most = f" and at most {self.largest_epsilon:g}" if isfinite(self.largest_epsilon) else ""
            raise SettingError(
                f"epsilon={epsilon:g} is outside the {self.name} theorem of the Gaussian mechanism.",
                why=f"It is proved for an epsilon above 0{most}.",
                remedy="Use such an epsilon" + (", or another calibration." if most else "."),
            )
        if not (isfinite(sensitivity) and sensitivity > 0):
            raise SettingError(
                f"sensitivity={sensitivity:g} is not how far a neighbour can move anything.",
                remedy="Use a number above 0.",
            )
        return sensitivity / float(self.deviations(epsilon, delta))

    def deviations(self, epsilon: Floats | float, delta: Floats | float) -> Floats:
        """Return the largest Δ/σ that the theorem calls (ε, δ)-DP; an ε beyond its reach counts as the largest
        within it.
        """
        epsilon, delta = np.asarray(epsilon, dtype=np.float64), np.asarray(delta, dtype=np.float64)
        if not bool(((epsilon >= 0) & (epsilon < inf)).all()):
            raise SettingError(
                "an epsilon is negative or not a number.",
                why="It bounds the privacy loss.",
                remedy="Use numbers that are at least 0.",
            )
        for extreme in (delta.min(), delta.max()):
            check_delta(float(extreme))
        if bool((delta >= self.delta_below).any()):
            raise SettingError(
                f"delta={delta.max():g} is outside the {self.name} theorem of the Gaussian mechanism.",
                why=f"It is proved for a delta below {self.delta_below:.4g}.",
                remedy="Use such a delta, or another calibration.",
            )
        return self._deviations(np.minimum(epsilon, self.largest_epsilon), delta)

    @abstractmethod
    def _deviations(self, epsilon: Floats, delta: Floats) -> Floats:
        """For values within the theorem's reach."""


@final
class Classical(Calibration):
    """σ = Δ √(2 ln(1.25/δ))/ε, for ε up to 1 only (Dwork and Roth, 2014, Theorem A.1).

    >>> round(Classical().stddev(1.0, 1e-5, sensitivity=1.0), 4)
    4.8448
    """

    name = "classical"
    largest_epsilon = 1.0

    def _deviations(self, epsilon: Floats, delta: Floats) -> Floats:
        few: Floats = epsilon / np.sqrt(2 * np.log(1.25 / delta))
        return few


@final
class Extended(Calibration):
    """σ = Δ (√s + √(s + ε))/(√2 ε) with s = ln(√(2/π)/δ), for every ε (Phan et al., 2019, Theorem 1).

    It holds because the loss exceeds ε where the noise exceeds ε/m - m/2 = √(2s) deviations, which it does with
    probability Φ(-√(2s)) <= ½e^{-s} = δ√(π/8) < δ.

    >>> round(Extended().stddev(1.0, 1e-5, sensitivity=1.0), 4)
    4.8542
    """

    name = "extended"
    delta_below = sqrt(2 / pi)

    def _deviations(self, epsilon: Floats, delta: Floats) -> Floats:
        s = np.log(self.delta_below / delta)
        few: Floats = sqrt(2) * epsilon / (np.sqrt(s) + np.sqrt(s + epsilon))
        return few


@final
class Analytic(Calibration):
    """The smallest σ of all: the inverse of the exact `gaussian_delta` (Balle and Wang, 2018).

    **Guarantee.** `gaussian_delta` of what is returned is at most δ, rounding included; it is tight to 1e-11.

    >>> round(Analytic().stddev(1.0, 1e-5, sensitivity=1.0), 4)
    3.7306
    """

    name = "analytic"

    def _deviations(self, epsilon: Floats, delta: Floats) -> Floats:
        # Few enough: where the first term of δ alone is δ; or where ε = 0 is reached, too.
        first = ndtri(delta)
        root = np.sqrt(first**2 + 2 * epsilon)
        enough = np.where(first < 0, 2 * epsilon / (root - np.minimum(first, 0)), first + root)
        low: Floats = np.maximum(enough, sqrt(8) * erfinv(delta))
        # Too many: the half-line {x > s} has e^ε Φ(-s) = η under the one law and Φ(m - s) = δ + η under the other.
        spare = np.minimum(delta, (1 - delta) / 2)
        high = np.maximum(ndtri(delta + spare) - ndtri_exp(np.log(spare) - epsilon), low)
        for _ in range(_HALVINGS):
            middle = np.sqrt(low * high)
            private = gaussian_delta(epsilon, middle) <= delta
            low, high = np.where(private, middle, low), np.where(private, high, middle)
        return low * (1 - _ROUNDING)


CALIBRATIONS: dict[str, Calibration] = {one.name: one for one in (Classical(), Extended(), Analytic())}


def spread(stddev: float, redistribution: Tensor) -> Tensor:
    """Standard deviations σ√(K r_i) of a heterogeneous Gaussian mechanism (Phan et al., 2019, Theorem 2).

    The noise's total variance stays Kσ², and `redistribution` says what share r_i of it each of the K coordinates gets;
    only the ratios of its entries matter, so that r sums to 1.

    **Guarantee.** Divided by √(K r_i), which can be undone, coordinate i carries noise N(0, σ²). So the mechanism is
    (ε, δ)-DP iff an ordinary one is, with the same σ, for the sensitivity of the divided map:
    max ‖(A(x) - A(x'))/√(K r)‖₂. The sensitivity of the map itself is not enough.

    >>> spread(2.0, torch.tensor([1.0, 4.0, 4.0, 16.0])).tolist()
    [0.8, 1.6, 1.6, 3.2]
    """
    if not (isfinite(stddev) and stddev > 0):
        raise SettingError(f"stddev={stddev:g} is not a positive number.", remedy="Use a number above 0.")
    shares = redistribution.detach().double()
    if not shares.numel() or not bool((shares.isfinite() & (shares > 0)).all()):
        raise SettingError(
            "a share of the noise is 0, negative or not a number, or there is none.",
            why="A coordinate without noise is released as it is.",
            remedy="Give every coordinate a number above 0.",
        )
    return stddev * torch.sqrt(shares / shares.mean())
