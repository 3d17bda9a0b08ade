"""Privacy accounting: ε(δ) of T steps of the Poisson-subsampled Gaussian mechanism, always an upper bound.

The arithmetic is that of the maintained `dp-accounting` package (privacy loss distributions, PLD); this module chooses
its parameters. Every approximation errs upwards:

* **Dominating pair.** For any other records and any contributions of norm <= C, one step is no easier to distinguish
  than N(0, σ²) from (1 - q) N(0, σ²) + q N(1, σ²), in both directions (a record removed, a record added), and
  adaptive steps no easier than T independent copies. ε is the larger of the two directions.
* **Grid.** The privacy loss of one step is discretised by connect-the-dots, whose hockey-stick divergence is on or
  above the true one everywhere. The grid's interval is a sixteenth of the standard deviation of that loss, which
  costs less than 1e-3 of ε; one fixed interval would be too coarse for a small q and slow for a large one. A grid has
  at most 30,000 points: for a small q (below 1e-3) with little noise it is coarser, hence ε larger.
* **Tails.** Truncated mass, δ/1000 over all steps and δ/1000 after composition, counts as certain disclosure.
* **Floating point.** What rounding may lose of δ (`rounding_of_delta`) is subtracted from δ beforehand. Where little
  is left of it, with δ around 1e-11, Rényi accounting is used instead: looser, and an upper bound as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtri

from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.dp.library import dp_event, privacy_loss_distribution, rdp
from stobatch.dp.roots import brentq
from stobatch.errors import SettingError
from stobatch.types import Neighbours, Status

LEAST_NOISE, MOST_NOISE = 0.1, 1e4
"""The range in which `noise_for` searches."""

MOST_STEPS = 1_000_000

_SMALLEST_NOISE, _LARGEST_NOISE, _SMALLEST_RATE = 1e-2, 1e12, 1e-100
"""Beyond these, intermediate values overflow or underflow."""
_NOISE_TOLERANCE = 1e-3
_POINTS_PER_DEVIATION = 16
_COARSEST_GRID = 0.01
_FINEST_GRID = 1e-8
_MOST_POINTS = 30_000
_MOST_COMPOSED_POINTS = 1_000_000
TAIL_SHARE = 1e-3
RENYI_ORDERS = (*range(2, 64), 80, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Integer orders only: their divergences are finite sums, where series of fractional orders may not converge."""
_CURVE_POINTS = 512
_CURVE_DELTA = 1e-10
_CURVE_EPSILON = 25.0
"""A trade-off curve is computed up to the ε of that δ, or to this ε; beyond it concerns rates below 1e-10 only."""

Floats = NDArray[np.float64]


def _require(name: str, value: Any, *, ok: Callable[[Any], bool], why: str, remedy: str) -> None:
    if not isinstance(value, Real):
        raise SettingError(f"{name}={value!r} is a {type(value).__name__}, and no number.", why=why, remedy=remedy)
    if not math.isfinite(value) or not ok(value):
        raise SettingError(f"{name}={value:g} is not allowed.", why=why, remedy=remedy)


def check_delta(delta: float) -> None:
    """Raise unless 0 < delta < 1."""
    _require(
        "delta",
        delta,
        ok=lambda one: 0 < one < 1,
        why="It is the probability with which the bound on the privacy loss may fail; Gaussian noise has no δ of 0.",
        remedy="Use a number above 0 and far below 1 over the number of training examples, such as 1e-5.",
    )


def _check_steps(name: str, steps: int) -> None:
    _require(
        name,
        steps,
        ok=lambda one: one == int(one) and 1 <= one <= MOST_STEPS,
        why="It is a count, and the accountant's rounding is known up to a million.",
        remedy="Use a whole number from 1 to 1000000; take larger batches rather than more steps.",
    )


def _check_rate(sampling_rate: float) -> None:
    _require(
        "sampling_rate",
        sampling_rate,
        ok=lambda one: 0 < one <= 1,
        why="It is the probability that a step takes a record.",
        remedy="Use the expected batch size over the public number of training examples.",
    )


def _check_target(target_epsilon: float) -> None:
    _require(
        "target_epsilon",
        target_epsilon,
        ok=lambda one: one > 0,
        why="It is the bound on the privacy loss.",
        remedy="Use a number above 0, such as 1.",
    )


def _check_noise(noise_multiplier: float) -> None:
    _require(
        "noise_multiplier",
        noise_multiplier,
        ok=lambda one: one > 0,
        why="It is the noise's standard deviation over the clipping norm; without noise nothing is private.",
        remedy="Use a number above 0, or compute one for a target epsilon with noise_for.",
    )


@dataclass(frozen=True)
class PoissonGaussian:
    """T steps of the Poisson-subsampled Gaussian mechanism with sampling rate q and noise multiplier σ.

    Each step takes every record independently with probability q and releases a sum to which a record adds a vector of
    norm at most C, with fresh noise N(0, (σC)² I). Batches of a fixed size, shuffled or cut from a permutation, are a
    different mechanism, for which `gaussian_epsilon` is valid and this class is not.

    **Guarantee**: T steps are (epsilon(δ), δ)-differentially private when one record is added or removed.

    >>> dp_sgd = PoissonGaussian(sampling_rate=0.01, noise_multiplier=1.0, steps=10_000)
    >>> round(dp_sgd.epsilon(1e-5), 2), round(dp_sgd.renyi_epsilon(1e-5), 2)
    (6.19, 6.72)
    """

    sampling_rate: float
    noise_multiplier: float
    steps: int

    def __post_init__(self) -> None:
        _check_rate(self.sampling_rate)
        _check_noise(self.noise_multiplier)
        _require(
            "noise_multiplier",
            self.noise_multiplier,
            ok=lambda one: _SMALLEST_NOISE <= one <= _LARGEST_NOISE,
            why=f"The accountant's arithmetic is sound from {_SMALLEST_NOISE:g} to {_LARGEST_NOISE:g}.",
            remedy="Use a number between 0.1 and 10000.",
        )
        _require(
            "sampling_rate",
            self.sampling_rate,
            ok=lambda one: one >= _SMALLEST_RATE,
            why="The accountant's arithmetic is sound from there on.",
            remedy=f"Use {_SMALLEST_RATE:g} or more.",
        )
        _check_steps("steps", self.steps)

    def epsilon(self, delta: float) -> float:
        """Return ε of all steps at this δ: an upper bound, tight to about 1e-3 of itself."""
        check_delta(delta)
        return _epsilon(self, float(delta))

    def renyi_epsilon(self, delta: float) -> float:
        """Return ε by Rényi accounting: looser, and an independent check on `epsilon`."""
        check_delta(delta)
        return _renyi_epsilon(self, float(delta))

    @property
    def event(self) -> dp_event.DpEvent:
        """Return the mechanism as a `dp-accounting` event."""
        gaussian = dp_event.GaussianDpEvent(self.noise_multiplier)
        return dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(self.sampling_rate, gaussian), self.steps)

    def trade_off(self, false_positive_rates: Floats) -> Floats:
        """Return lower bounds on the false-negative rate of any test for one record, at these false-positive rates.

        An event and its complement under (ε, δ)-DP give β >= 1 - δ - e^ε α and β >= e^-ε (1 - δ - α). Both hold for
        each ε of a grid with its accounted δ(ε), an upper bound; so does the largest. δ(ε) is that of the worse
        direction, so it does not matter which of the two hypotheses has the record.

        >>> dp_sgd = PoissonGaussian(sampling_rate=1.0, noise_multiplier=1.0, steps=1)
        >>> [round(float(beta), 3) for beta in dp_sgd.trade_off(np.array([0.01, 0.5]))]  # Φ(Φ^-1(1 - α) - 1)
        [0.908, 0.159]
        """
        exp_epsilon, one_minus_delta = _curve(self)
        false_negative_rates = np.zeros(len(false_positive_rates))
        for start in range(0, len(false_negative_rates), _CURVE_POINTS):  # in parts, to bound memory
            rates = false_positive_rates[start : start + _CURVE_POINTS, None]
            bounds = np.maximum(one_minus_delta - exp_epsilon * rates, (one_minus_delta - rates) / exp_epsilon)
            false_negative_rates[start : start + _CURVE_POINTS] = bounds.max(axis=1)
        return np.maximum(false_negative_rates, 0.0)


def epsilon(
    *, noise_multiplier: float, poisson_sampling_rate: float, steps: int, delta: float, unit: str = "example"
) -> PrivacyGuarantee:
    """Return the guarantee of a user's own DP-SGD loop, for adding or removing one record.

    **Guarantee.** The mechanism that the assumptions describe, T steps of `PoissonGaussian`, is (ε, δ)-differentially
    private for adding or removing one record. The author of a program has to make sure that it is this mechanism: the
    assumptions list what to check. Shuffled or fixed batches, and replacing a record, need another ε.

    >>> print(epsilon(noise_multiplier=1.0, poisson_sampling_rate=0.01, steps=1000, delta=1e-5))
    proved ε = 1.82884, δ = 1e-05 (add-or-remove-one, per example; for the mechanism assumed; no program was checked)
    """
    mechanism = PoissonGaussian(poisson_sampling_rate, noise_multiplier, steps)
    return PrivacyGuarantee(
        epsilon=mechanism.epsilon(delta),
        delta=delta,
        neighbours=Neighbours.ADD_REMOVE,
        unit=unit,
        status=Status.PROVED,
        source="for the mechanism assumed; no program was checked",
        assumptions=(
            f"Poisson sampling: each step takes every {unit} independently with probability "
            f"{poisson_sampling_rate:.6g}; shuffled or fixed batches are another mechanism",
            f"a step releases a sum to which each {unit} adds a vector of norm at most C, and nothing else "
            "(`dp.clipped_sum`)",
            f"on every value of the sum lies fresh secret Gaussian noise of standard deviation {noise_multiplier:.6g} "
            "C, empty batches included (`dp.add_noise`)",
            f"there are at most {steps} steps, fixed beforehand, and nothing else is computed from the data: no choice "
            "of settings, no statistics, no division by the realised batch size",
            "the number of records, the sampling rate and every other setting are public",
            "how sums of clipped contributions round, in the precision of training, is not bounded",
        ),
    )


def noise_multiplier(*, target_epsilon: float, poisson_sampling_rate: float, steps: int, delta: float) -> float:
    """Return a noise multiplier with which `epsilon` is at most the target, for the same neighbours and sampling.

    >>> round(noise_multiplier(target_epsilon=1.0, poisson_sampling_rate=0.01, steps=1000, delta=1e-5), 3)
    1.415
    """
    # Before its answer is looked up among those that are known.
    _check_target(target_epsilon)
    _check_rate(poisson_sampling_rate)
    _check_steps("steps", steps)
    check_delta(delta)
    return noise_for(target_epsilon, delta, poisson_sampling_rate, steps)


def grid_interval(mechanism: PoissonGaussian, delta: float) -> float:
    """Return the PLD grid's interval: a sixteenth of the standard deviation of a step's loss, within limits.

    The loss log(1 - q + q e^((x - ½)/σ²)) is integrated over x on 1001 points, without and with the record.
    """
    q, sigma = mechanism.sampling_rate, mechanism.noise_multiplier
    log_rest = math.log1p(-q) if q < 1 else -math.inf
    furthest = -float(ndtri(0.5 * math.exp(_log_tail(mechanism, delta))))
    normal = np.linspace(-furthest, furthest, 1001)
    weight = np.exp(-(normal**2) / 2) / np.exp(-(normal**2) / 2).sum()
    if_out, if_in = (
        np.logaddexp(log_rest, math.log(q) + (normal * sigma + shift - 0.5) / sigma**2) for shift in (0.0, 1.0)
    )
    deviation = math.sqrt((1 - q) * (weight @ if_out**2) + q * (weight @ if_in**2))
    fine = min(_COARSEST_GRID, deviation / _POINTS_PER_DEVIATION)
    span = if_in[-1] - if_out[0]
    composed_span = 2 * furthest * deviation * math.sqrt(mechanism.steps)
    return float(max(fine, _FINEST_GRID, span / _MOST_POINTS, composed_span / _MOST_COMPOSED_POINTS))


def _log_tail(mechanism: PoissonGaussian, delta: float) -> float:
    return math.log(TAIL_SHARE * delta / mechanism.steps)


def rounding_of_delta(steps: int) -> float:
    """Return more than rounding loses of δ: 6e-17 per step up to 1e6 steps, measured at q = 1, where δ is known."""
    return 1e-13 + 1e-15 * steps


@lru_cache(maxsize=4096)
def _epsilon(mechanism: PoissonGaussian, delta: float) -> float:
    reduced_delta = delta - rounding_of_delta(mechanism.steps)
    if reduced_delta < delta / 2:
        # Both are upper bounds: the closed form is exact at q = 1, and sampling costs no more.
        without_sampling = gaussian_epsilon(mechanism.noise_multiplier, mechanism.steps, delta)
        return min(_renyi_epsilon(mechanism, delta), without_sampling)
    return float(privacy_loss(mechanism, delta).get_epsilon_for_delta(reduced_delta))


@lru_cache(maxsize=1024)
def _curve(mechanism: PoissonGaussian) -> tuple[Floats, Floats]:
    """Return (e^ε, 1 - δ(ε)) for a grid of ε."""
    loss = privacy_loss(mechanism, _CURVE_DELTA)
    largest = min(_CURVE_EPSILON, float(loss.get_epsilon_for_delta(_CURVE_DELTA)))
    epsilons = np.linspace(0.0, largest, _CURVE_POINTS)
    one_minus_delta = 1 - rounding_of_delta(mechanism.steps) - np.asarray(loss.get_delta_for_epsilon(epsilons))
    return np.exp(epsilons), one_minus_delta


def privacy_loss(
    mechanism: PoissonGaussian, delta: float, interval: float | None = None
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Return the privacy loss distribution of all steps, pessimistic, with tails truncated that are small against δ.

    Distributions that are composed need the same grid interval.
    """
    one_step = privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=mechanism.noise_multiplier,
        sampling_prob=mechanism.sampling_rate,
        pessimistic_estimate=True,
        value_discretization_interval=interval or grid_interval(mechanism, delta),
        log_mass_truncation_bound=_log_tail(mechanism, delta),
    )
    return one_step.self_compose(mechanism.steps, tail_mass_truncation=TAIL_SHARE * delta)


@lru_cache(maxsize=4096)
def _renyi_epsilon(mechanism: PoissonGaussian, delta: float) -> float:
    """Return ε by integer Rényi orders; where they give 0, by the closed form for q = 1, which is an upper bound.

    A divergence of 1e-16 is only rounding, and an ε of 0 from it cannot be trusted: with δ = 1e-12 the true ε may be
    1e-9.
    """
    accountant = rdp.RdpAccountant(orders=RENYI_ORDERS)
    accountant.compose(mechanism.event)
    epsilon = float(accountant.get_epsilon(delta))
    # A positive ε from orders up to 1024 is at least about 0.01 for small δ: 1e-9 of it exceeds the rounding.
    if epsilon > 0:
        return epsilon * (1 + 1e-9)
    return gaussian_epsilon(mechanism.noise_multiplier, mechanism.steps, delta)


@lru_cache(maxsize=1024)
def noise_for(target_epsilon: float, delta: float, sampling_rate: float, steps: int) -> float:
    """Return the smallest noise multiplier, to a thousandth, whose accounted ε is at most the target.

    The result itself has been accounted: its ε is at most the target. Below a multiplier of 0.1 it raises: there the
    guarantee would rest on δ, or on a record not being sampled, and not on noise.

    >>> sigma = noise_for(1.0, 1e-5, sampling_rate=2499 / 60_000, steps=240)
    >>> round(sigma, 2), PoissonGaussian(2499 / 60_000, sigma, 240).epsilon(1e-5) <= 1.0
    (2.61, True)
    """
    _check_target(target_epsilon)

    def excess(log_noise: float) -> float:
        """Return log(ε/target), clipped so that an ε of 0 stays finite."""
        epsilon = PoissonGaussian(sampling_rate, math.exp(log_noise), steps).epsilon(delta)
        return math.log(min(max(epsilon / target_epsilon, 1e-2), 1e2))

    low, high = _bracket(excess, target_epsilon, steps)
    log_noise = brentq(excess, low, high, xtol=_NOISE_TOLERANCE / 8) if excess(high) < 0 else high
    while excess(log_noise) > 0:
        log_noise += _NOISE_TOLERANCE / 8
    return math.exp(log_noise)


def _bracket(excess: Callable[[float], float], target_epsilon: float, steps: int) -> tuple[float, float]:
    """Return the logs of (too little noise, enough noise), at most a factor of two apart, searching from 1 outwards."""
    least, most = math.log(LEAST_NOISE), math.log(MOST_NOISE)
    high = 0.0
    while excess(high) > 0:
        if high == most:
            raise SettingError(
                f"target_epsilon={target_epsilon:g} is out of reach for {steps} steps.",
                why=f"Even a noise multiplier of {MOST_NOISE:g} costs more.",
                remedy="Raise target_epsilon or delta, or take fewer steps or smaller batches.",
            )
        high = min(high + math.log(2), most)
    low = max(high - math.log(2), least)
    while excess(low) <= 0:
        if low == least:
            raise SettingError(
                f"target_epsilon={target_epsilon:g} would be met by a noise multiplier below {LEAST_NOISE:g}.",
                why="With so little noise the promise rests on delta, or on records being left out by luck.",
                remedy="Lower target_epsilon or delta, or take more steps or larger batches for the same budget.",
            )
        low, high = max(low - math.log(2), least), low
    return low, high


def gaussian_epsilon(noise_multiplier: float, releases: int, delta: float) -> float:
    """Return ε of E Gaussian releases of one record's contribution, in closed form by Gaussian DP (GDP).

    With fixed disjoint batches a record takes part once in each of E epochs, and the other batches are post-processing:
    the run is μ-GDP with μ = √E/σ, for any number of batches. It is also the case q = 1 of `PoissonGaussian`.
    δ(ε) = Φ(-ε/μ + μ/2) - e^ε Φ(-ε/μ - μ/2) is solved for ε.

    **Guarantee.** Never below the true ε; up to a noise multiplier of 10⁹ and a δ of 0.1, above it by less than 1e-4 of
    it or 1e-10. It is 0 only where δ(0) <= δ: the releases are then (0, δ)-differentially private.

    >>> round(gaussian_epsilon(11.8, releases=10, delta=1e-5), 2)
    1.0
    """
    _check_noise(noise_multiplier)
    _check_steps("releases", releases)
    check_delta(delta)
    mu = math.sqrt(releases) / noise_multiplier

    def excess(epsilon: float) -> float:
        """Return log δ(ε) - log δ, rounded up."""
        # log δ(ε) = first + log(1 - e^(second - first)). Each logarithm is accurate to a few ulp, and so is ε; a small
        # gap magnifies that. Where rounding exceeds the gap, the second term is dropped, which only raises δ(ε).
        first, second = float(log_ndtr(mu / 2 - epsilon / mu)), epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
        gap = first - second
        rounding = 1e-15 * (1 + abs(first) + abs(second) + epsilon)
        log_share = math.log(-math.expm1(-gap)) + rounding / min(gap, 1.0) if gap > 4 * rounding else 0.0
        return first + min(log_share, 0.0) + rounding - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    enough = mu * (mu / 2 - float(ndtri(delta)))  # here the first term alone is δ
    if not math.isfinite(enough):
        return math.inf
    high = _round_up(max(enough, 0.0), mu)
    if excess(high) > 0:
        return high
    root = float(brentq(lambda epsilon: max(excess(epsilon), -1e3), 0.0, high, xtol=1e-12 * mu, rtol=1e-13))
    return min(_round_up(root, mu), high)


def _round_up(epsilon: float, mu: float) -> float:
    """Return ε plus more than the errors of rounding and root finding."""
    return epsilon * (1 + 1e-11) + 1e-11 * mu
