"""The Gaussian mechanism: how much noise a sensitivity needs, by three theorems, and heterogeneous noise.

Everything depends on one number, m = Δ/σ: N(0, σ²) noise on a map of l2 sensitivity Δ is no easier to distinguish than
N(0, 1) from N(m, 1). A calibration is a theorem that calls some m (ε, δ)-differentially private.
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
    """Return the Mills ratio Φ(-t)/φ(t), which decreases from 1.25 at 0 like 1/t."""
    ratio: Floats = sqrt(pi / 2) * erfcx(values / sqrt(2))
    return ratio


def gaussian_delta(epsilon: Floats | float, deviations: Floats | float) -> Floats:
    """Return the exact δ(ε) of noise that a neighbour shifts by m standard deviations (Balle and Wang, 2018).

    δ = Φ(m/2 - ε/m) - e^ε Φ(-m/2 - ε/m), the hockey-stick divergence of N(m, 1) and N(0, 1); e^ε φ(u) = φ(t) for
    t = ε/m - m/2 and u = ε/m + m/2, so that no large number appears: δ = φ(t) (M(t) - M(u)) with M the Mills ratio.
    For small m the difference is computed as the integral of -M' = 1 - sM(s), without cancellation.

    **Guarantee.** Relative error below 1e-12 for m up to 100 and δ down to 1e-300; for ε, m >= 0.

    >>> gaussian_delta(np.array([0.0, 1.0, 700.0]), 1.0).round(4).tolist()
    [0.3829, 0.1269, 0.0]
    """
    epsilon, deviations = np.broadcast_arrays(np.float64(epsilon), np.float64(deviations))
    # The limits of no noise (δ = 1) and no shift (δ = 0) come out right.
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        centre = np.where(deviations > 0, epsilon / deviations, inf)
        low, high = centre - deviations / 2, centre + deviations / 2
        density = np.exp(-(low**2) / 2) / sqrt(2 * pi)
        near, far = _mills(np.abs(low)), _mills(high)
        nodes = np.maximum(centre, 0)[..., None] + np.minimum(deviations, _FEW_DEVIATIONS)[..., None] / 2 * _NODES
        integral = deviations / 2 * ((1 - nodes * _mills(nodes)) @ _WEIGHTS)
        for_small = density * np.where(centre < inf, integral, 0.0)
    for_large = np.where(low < 0, 1 - density * (near + far), density * (near - far))
    return np.where(deviations < _FEW_DEVIATIONS, for_small, for_large)


class Calibration(ABC):
    """A theorem on how much Gaussian noise suffices for (ε, δ)-differential privacy."""

    name: ClassVar[str]
    largest_epsilon: ClassVar[float] = inf
    """The theorem holds up to this ε."""
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
                f"sensitivity={sensitivity:g} is not a positive number.",
                remedy="Use a number above 0.",
            )
        return sensitivity / float(self.deviations(epsilon, delta))

    def deviations(self, epsilon: Floats | float, delta: Floats | float) -> Floats:
        """Return the largest Δ/σ that the theorem calls (ε, δ)-DP; a larger ε than it covers counts as the largest."""
        epsilon, delta = np.asarray(epsilon, dtype=np.float64), np.asarray(delta, dtype=np.float64)
        if not bool(((epsilon >= 0) & (epsilon < inf)).all()):
            raise SettingError(
                "an epsilon is negative, infinite or NaN.",
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
        """Return `deviations` for values that the theorem covers."""


@final
class Classical(Calibration):
    """σ = Δ √(2 ln(1.25/δ))/ε, for ε up to 1 only (Dwork and Roth, 2014, Theorem A.1).

    >>> round(Classical().stddev(1.0, 1e-5, sensitivity=1.0), 4)
    4.8448
    """

    name = "classical"
    largest_epsilon = 1.0

    def _deviations(self, epsilon: Floats, delta: Floats) -> Floats:
        deviations: Floats = epsilon / np.sqrt(2 * np.log(1.25 / delta))
        return deviations


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
        deviations: Floats = sqrt(2) * epsilon / (np.sqrt(s) + np.sqrt(s + epsilon))
        return deviations


@final
class Analytic(Calibration):
    """The smallest possible σ: the inverse of the exact `gaussian_delta` (Balle and Wang, 2018).

    **Guarantee.** `gaussian_delta` of the result is at most δ, rounding included; it is tight to 1e-11.

    >>> round(Analytic().stddev(1.0, 1e-5, sensitivity=1.0), 4)
    3.7306
    """

    name = "analytic"

    def _deviations(self, epsilon: Floats, delta: Floats) -> Floats:
        # Lower end: m at which the first term of δ alone is δ, Φ(m/2 - ε/m) = δ; or at which even ε = 0 is reached.
        first = ndtri(delta)
        root = np.sqrt(first**2 + 2 * epsilon)
        enough = np.where(first < 0, 2 * epsilon / (root - np.minimum(first, 0)), first + root)
        low: Floats = np.maximum(enough, sqrt(8) * erfinv(delta))
        # Upper end: the half-line {x > s} with e^ε Φ(-s) = η under N(0, 1) has Φ(m - s) = δ + η under N(m, 1).
        eta = np.minimum(delta, (1 - delta) / 2)
        high = np.maximum(ndtri(delta + eta) - ndtri_exp(np.log(eta) - epsilon), low)
        for _ in range(_HALVINGS):
            middle = np.sqrt(low * high)
            private = gaussian_delta(epsilon, middle) <= delta
            low, high = np.where(private, middle, low), np.where(private, high, middle)
        return low * (1 - _ROUNDING)


CALIBRATIONS: dict[str, Calibration] = {one.name: one for one in (Classical(), Extended(), Analytic())}


def heterogeneous_stddevs(stddev: float, redistribution: Tensor) -> Tensor:
    """Return the standard deviations σ√(K r_i) of a heterogeneous Gaussian mechanism (Phan et al., 2019, Theorem 2).

    The total variance stays Kσ², and `redistribution` gives the share r_i of it that each of the K coordinates gets;
    it is normalised to a sum of 1.

    **Guarantee.** Divided by √(K r_i), which can be undone, coordinate i carries noise N(0, σ²). So the mechanism is
    (ε, δ)-DP iff an ordinary one is, with the same σ, for the sensitivity of the divided map:
    max ‖(A(x) - A(x'))/√(K r)‖₂. The sensitivity of the map itself is not enough.

    >>> heterogeneous_stddevs(2.0, torch.tensor([1.0, 4.0, 4.0, 16.0])).tolist()
    [0.8, 1.6, 1.6, 3.2]
    """
    if not (isfinite(stddev) and stddev > 0):
        raise SettingError(f"stddev={stddev:g} is not a positive number.", remedy="Use a number above 0.")
    shares = redistribution.detach().double()
    if not shares.numel() or not bool((shares.isfinite() & (shares > 0)).all()):
        raise SettingError(
            "a share of the noise is 0, negative or NaN, or there is none.",
            why="A coordinate without noise is not private.",
            remedy="Give every coordinate a number above 0.",
        )
    return stddev * torch.sqrt(shares / shares.mean())
