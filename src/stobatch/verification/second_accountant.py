"""ε of the Poisson-subsampled Gaussian mechanism, and of a search, by ways that share no code with the first.

`dp.accounting` asks the package dp-accounting. Here the law of the privacy loss is composed by hand, after Gopi,
Lee and Wutschitz (2021): the loss of one step is rounded to the nearest point of a grid and moved to its true mean, its
T-fold sum comes from one Fourier transform, and what rounding can have changed is bounded from both sides.

**Guarantee.** `bracket` contains the true ε(δ) of T steps, both for a record that is added and for one that is removed,
up to floating-point rounding, which is allowed for (`_rounding`). The error of each step's rounding has mean 0 and lies
in an interval as wide as the grid, so by Hoeffding's inequality the sum of T of them exceeds
η = h √(T log(2/p)/2) with probability at most p; beyond the grid lie at most what the tails of x and Chernoff's bound
leave. So δ(ε) lies between δ̃(ε + η) - p' and δ̃(ε - η) + p', with p' the sum of these probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp, ndtr, ndtri

Floats = NDArray[np.float64]

_SHARE = 1e-3
"""Of δ, for each of the errors that are bounded by a probability."""
_MOST_POINTS = 2**22
_ORDERS = np.array([0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512])
_POINTS = 40_001


def _rounding(steps: int) -> float:
    """Return an allowance, well over what a Fourier transform and its T-th power lose of a probability."""
    return 1e-13 + 1e-15 * steps


@dataclass(frozen=True)
class Bracket:
    """ε lies from `low` to `high`."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"[{self.low:.6g}, {self.high:.6g}]"


@dataclass(frozen=True)
class _Loss:
    """The privacy loss of one step, in one direction: its distribution function, and its law on a fine grid of x."""

    below: Callable[[Floats], Floats]
    values: Floats
    log_weights: Floats

    @property
    def mean(self) -> float:
        return float(np.exp(self.log_weights) @ self.values)

    def log_moments(self, orders: Floats) -> Floats:
        """Return log E e^{tL} for each order t."""
        moments: Floats = np.array([logsumexp(self.log_weights + order * self.values) for order in orders])
        return moments


@lru_cache(maxsize=256)
def bracket(sampling_rate: float, noise_multiplier: float, steps: int, delta: float) -> Bracket | None:
    """Return where ε(δ) of all the steps lies; None where δ is too small for float64."""
    if _rounding(steps) > 0.1 * delta:
        return None
    furthest = -float(ndtri(_SHARE * delta / (4 * steps)))
    brackets = [
        _bracket_one_direction(loss, steps, delta) for loss in _losses(sampling_rate, noise_multiplier, furthest)
    ]
    return Bracket(max(one.low for one in brackets), max(one.high for one in brackets))


def _losses(q: float, sigma: float, furthest: float) -> tuple[_Loss, _Loss]:
    """Return the losses of a record removed, x ~ (1 - q) N(0, σ²) + q N(1, σ²), and of one added, x ~ N(0, σ²)."""
    log_rest = math.log1p(-q) if q < 1 else -math.inf
    x = np.linspace(-furthest * sigma, 1 + furthest * sigma, _POINTS)
    loss = np.logaddexp(log_rest, math.log(q) + (2 * x - 1) / (2 * sigma**2))
    out, in_ = -((x / sigma) ** 2) / 2, -(((x - 1) / sigma) ** 2) / 2
    mixed = np.logaddexp(log_rest + out, math.log(q) + in_)

    def x_of(value: Floats) -> Floats:
        """Return where the loss has this value; minus infinity where it is larger everywhere."""
        with np.errstate(divide="ignore", invalid="ignore"):
            # e^l - (1 - q) as e^l (1 - e^(log(1 - q) - l)), which overflows for no l.
            rest = np.where(value > log_rest, np.log1p(-np.exp(np.minimum(log_rest - value, 0.0))), -np.inf)
        outputs: Floats = sigma**2 * (value + rest - math.log(q)) + 0.5
        return outputs

    def removed(value: Floats) -> Floats:
        at = x_of(value)
        share: Floats = (1 - q) * ndtr(at / sigma) + q * ndtr((at - 1) / sigma)
        return share

    def added(value: Floats) -> Floats:
        share: Floats = ndtr(-x_of(-value) / sigma)
        return share

    return (
        _Loss(removed, loss, mixed - logsumexp(mixed)),
        _Loss(added, -loss, out - logsumexp(out)),
    )


def _bracket_one_direction(loss: _Loss, steps: int, delta: float) -> Bracket:
    tail = math.log(1 / (_SHARE * delta))
    up, down = steps * loss.log_moments(_ORDERS), steps * loss.log_moments(-_ORDERS)
    # Chernoff: beyond these lies a share _SHARE of δ, above and below.
    highest, lowest = float(np.min((up + tail) / _ORDERS)), -float(np.min((down + tail) / _ORDERS))
    loose = max(float(np.min((up + math.log(1 / delta)) / _ORDERS)), 1e-3)
    reach = math.sqrt(steps / 2 * math.log(2 / (_SHARE * delta)))
    width = max(highest, float(loss.values.max())) - min(lowest, float(loss.values.min()))
    grid = max(1e-3 * loose / reach, width / (_MOST_POINTS - 4))
    size = 2 ** math.ceil(math.log2(width / grid + 4))

    # One step: a cell's mass to its middle, then all of it moved so that the mean is the true one.
    first, last = math.floor(loss.values.min() / grid) - 1, math.ceil(loss.values.max() / grid) + 1
    cells = np.arange(first, last + 1)
    mass = np.diff(loss.below((np.arange(first, last + 2) - 0.5) * grid))
    lost = max(0.0, 1 - float(mass.sum()))
    shift = loss.mean - grid * float(cells @ mass)
    one = np.zeros(size)
    np.add.at(one, cells % size, mass)
    whole = np.fft.irfft(np.fft.rfft(one) ** steps, size)

    # The sum has its indices modulo `size`, which is wider than the range between the Chernoff bounds: around that
    # range's centre each residue stands for one value, but for the mass beyond the bounds.
    centre = round((highest + lowest) / 2 / grid - steps * shift / grid)
    sums = np.arange(centre - size // 2, centre - size // 2 + size)
    values, weights = sums * grid + steps * shift, np.maximum(whole[sums % size], 0.0)
    # Four shares of δ: Chernoff's above and below, Hoeffding's for the rounding, and the tails of x over all steps.
    error = 4 * _SHARE * delta + steps * lost + _rounding(steps)
    eta = grid * reach
    return Bracket(
        max(0.0, _epsilon(values, weights, delta + error) - eta),
        max(0.0, _epsilon(values, weights, delta - error) + eta),
    )


def _epsilon(values: Floats, weights: Floats, delta: float) -> float:
    """Solve Σ_{l > ε} (1 - e^{ε - l}) P(l) = δ for ε, at least 0."""
    start = int(np.searchsorted(values, 0.0, side="right"))
    values, weights = values[start:], weights[start:]
    # δ(ε) = A(ε) - e^ε B(ε), with the sums of P(l) and of e^-l P(l) over all l above ε.
    whole, shrunk = (np.cumsum(part[::-1])[::-1] for part in (weights, weights * np.exp(-values)))

    def excess(epsilon: float) -> float:
        first = int(np.searchsorted(values, epsilon, side="right"))
        return float(whole[first] - math.exp(epsilon) * shrunk[first]) - delta if first < len(values) else -delta

    if not len(values) or excess(0.0) <= 0:
        return 0.0
    return _bisect(excess, 0.0, float(values[-1]))


def _bisect(falling: Callable[[float], float], low: float, high: float) -> float:
    """Return the first number at which a falling function is no longer above 0, to the last bit."""
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high


ORDERS = np.array([*range(2, 64), 80, 96, 128, 192, 256, 384, 512, 768, 1024], dtype=np.float64)


def search_epsilon(
    trainings: Iterable[tuple[float, float, int]], score_noise: float, mean: float, shape: float | None, delta: float
) -> float:
    """Return ε of the best of a random number of candidates, each one of the trainings (rate, noise, steps) or a score.

    A shape of None is the Poisson law. Rényi divergences of the subsampled Gaussian mechanism are summed by hand at
    whole orders (Mironov, Talwar and Zhang, 2019), those of the best of a random number of runs follow from Theorems 2
    and 6 of Papernot and Steinke (2022), and ε from Proposition 12 of Canonne, Kamath and Steinke (2020).
    """
    each = [steps * _sampled_divergences(rate, noise) for rate, noise, steps in trainings]
    one = np.max([*each, ORDERS / (2 * score_noise**2)], axis=0)
    below = ORDERS - 1
    if shape is None:
        allowed = np.array([_delta(one, float(np.log1p(1 / lower))) for lower in below])
        best = one + mean * allowed + np.log(mean) / below
    else:
        constant = (1 + shape) * np.min((1 - 1 / ORDERS) * one - np.log(_solve_success(mean, shape)) / ORDERS)
        best = one + constant + np.log(mean) / below
        # A divergence is no larger than those of larger orders.
        best = np.minimum.accumulate(best[::-1])[::-1]
    return float(np.min(best + np.log1p(-1 / ORDERS) - np.log(delta * ORDERS) / below))


def _sampled_divergences(rate: float, noise: float) -> Floats:
    """Return the Rényi divergence of one step at each whole order α.

    It is log(E_x (1 - q + q e^{(2x - 1)/2σ²})^α)/(α - 1) over x ~ N(0, σ²). The binomial theorem gives the terms
    C(α, k) q^k (1 - q)^{α - k} E e^{k (2x - 1)/2σ²}, and that mean is e^{k (k - 1)/2σ²}.
    """
    if rate == 1:
        return ORDERS / (2 * noise**2)
    divergences = []
    for order in ORDERS:
        k = np.arange(order + 1)
        chosen = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        terms = chosen + k * np.log(rate) + (order - k) * np.log1p(-rate) + k * (k - 1) / (2 * noise**2)
        divergences.append(max(float(logsumexp(terms)), 0.0) / (order - 1))
    return np.array(divergences)


def _delta(divergences: Floats, epsilon: float) -> float:
    """Return the least δ that divergences prove for an ε: by their moments, or by the total variation."""
    below = ORDERS - 1
    moments = below * (divergences - epsilon + np.log1p(-1 / ORDERS)) - np.log(ORDERS)
    variation = np.sqrt(-np.expm1(-divergences))
    return float(min(np.exp(min(moments.min(), 0.0)), variation.min(), 1.0))


def _solve_success(mean: float, shape: float) -> float:
    """Solve mean(γ) = `mean` for γ, the success probability of the truncated negative binomial law.

    For a shape η its mean is η (1 - γ)/(γ (1 - γ^η)); the limit η = 0, the logarithmic law, has (1/γ - 1)/log(1/γ).
    """

    def excess(success: float) -> float:
        if shape == 0:
            return (1 / success - 1) / -float(np.log(success)) - mean
        return shape * (1 / success - 1) / -float(np.expm1(shape * np.log(success))) - mean

    return _bisect(excess, 1e-12, 1 - 1e-12)
