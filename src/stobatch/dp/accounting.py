"""What T noisy steps on random batches cost: ε(δ) of the Poisson-subsampled Gaussian mechanism, never undercounted.

The arithmetic is that of the maintained `dp-accounting` package; this module fixes how it is asked. Every
approximation errs upwards:

* **Worst pair.** Whatever the other records and the contributions of norm <= C are, one step is no easier to tell
  apart than N(0, σ²) from (1 - q) N(0, σ²) + q N(1, σ²), in both directions (a record removed, a record added), and
  adaptive steps no easier than T independent copies. ε is the larger of the two directions.
* **Grid.** The privacy loss of one step is moved to a grid by connect-the-dots, whose hockey-stick divergence lies on
  or above the true one everywhere. The grid's interval is a sixteenth of the standard deviation of that loss, which
  costs less than 1e-3 of ε; one fixed interval would be blind to a small q and slow for a large one. A grid has at
  most 30,000 points: where a rare record (q below 1e-3) meets little noise it is coarser, hence ε larger.
* **Tails.** What is cut off, δ/1000 per step's share and δ/1000 after composition, counts as certain disclosure.
* **Floating point.** What rounding may have lost of δ (`rounding_of_delta`) is taken from δ beforehand. Where little
  is left of it, with δ around 1e-11, the answer comes from Rényi accounting: looser, and an upper bound as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting import dp_event, rdp
from dp_accounting.pld import privacy_loss_distribution
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri

from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.errors import SettingError
from stobatch.types import Neighbours, Status

LEAST_NOISE, MOST_NOISE = 0.1, 1e4
"""Noise multipliers that `noise_for` looks at."""

MOST_STEPS = 1_000_000

_SMALLEST_NOISE, _LARGEST_NOISE, _SMALLEST_RATE = 1e-2, 1e12, 1e-100
"""Beyond these, numbers in between overflow or vanish."""
_NOISE_TOLERANCE = 1e-3
_POINTS_PER_DEVIATION = 16
_COARSEST_GRID = 0.01
_FINEST_GRID = 1e-8
_MOST_POINTS = 30_000
_MOST_COMPOSED_POINTS = 1_000_000
TAIL_SHARE = 1e-3
RENYI_ORDERS = (*range(2, 64), 80, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Whole orders only: they are finite sums, where the series of broken orders may fail to converge."""
_CURVE_POINTS = 512
_CURVE_DELTA = 1e-10
_CURVE_EPSILON = 25.0
"""A trade-off curve is drawn up to the ε of that δ, or to this ε: beyond it speaks only of rates below 1e-10."""

Floats = NDArray[np.float64]


def _require(name: str, value: float, *, ok: bool, why: str, remedy: str) -> None:
    if not ok or not math.isfinite(value):
        raise SettingError(f"{name}={value:g} is not allowed.", why=why, remedy=remedy)


def check_delta(delta: float) -> None:
    _require(
        "delta",
        delta,
        ok=0 < delta < 1,
        why="It is the probability with which the bound on the privacy loss may fail; Gaussian noise has no δ of 0.",
        remedy="Use a number above 0 and far below 1 over the number of training examples, such as 1e-5.",
    )


def _check_steps(name: str, steps: int) -> None:
    _require(
        name,
        steps,
        ok=steps == int(steps) and 1 <= steps <= MOST_STEPS,
        why="It is a count, and the accountant's rounding is known up to a million.",
        remedy="Use a whole number from 1 to 1000000; take larger batches rather than more steps.",
    )


def _check_noise(noise_multiplier: float) -> None:
    _require(
        "noise_multiplier",
        noise_multiplier,
        ok=noise_multiplier > 0,
        why="It is the noise's standard deviation over the clipping norm; without noise nothing is private.",
        remedy="Use a number above 0, or let noise_for find one for a target epsilon.",
    )


@dataclass(frozen=True)
class PoissonGaussian:
    """T steps; each takes every record independently with probability q and releases a noisy sum.

    A record adds a vector of norm at most C to the sum; the noise is N(0, (σC)² I), fresh at every step. Only q, σ and
    T matter. Batches of a fixed size, shuffled or cut from a permutation, are a different mechanism: this class says
    nothing about them, and `gaussian_epsilon` does.

    **Guarantee**: T steps are (epsilon(δ), δ)-differentially private when one record is added or removed.

    >>> dp_sgd = PoissonGaussian(sampling_rate=0.01, noise_multiplier=1.0, steps=10_000)
    >>> round(dp_sgd.epsilon(1e-5), 2), round(dp_sgd.renyi_epsilon(1e-5), 2)
    (6.19, 6.72)
    """

    sampling_rate: float
    noise_multiplier: float
    steps: int

    def __post_init__(self) -> None:
        _require(
            "sampling_rate",
            self.sampling_rate,
            ok=0 < self.sampling_rate <= 1,
            why="It is the probability that a step takes a record.",
            remedy="Use the expected batch size over the public number of training examples.",
        )
        _check_noise(self.noise_multiplier)
        _require(
            "noise_multiplier",
            self.noise_multiplier,
            ok=_SMALLEST_NOISE <= self.noise_multiplier <= _LARGEST_NOISE,
            why=f"The accountant's arithmetic is sound from {_SMALLEST_NOISE:g} to {_LARGEST_NOISE:g}.",
            remedy="Use a number between 0.1 and 10000.",
        )
        _require(
            "sampling_rate",
            self.sampling_rate,
            ok=self.sampling_rate >= _SMALLEST_RATE,
            why="The accountant's arithmetic is sound from there on.",
            remedy=f"Use {_SMALLEST_RATE:g} or more.",
        )
        _check_steps("steps", self.steps)

    def epsilon(self, delta: float) -> float:
        """Return the ε that the steps cost at this δ: an upper bound, tight to about 1e-3 of itself."""
        check_delta(delta)
        return _epsilon(self, float(delta))

    def renyi_epsilon(self, delta: float) -> float:
        """Return the same by Rényi accounting: looser, computed by other means, so a check on `epsilon`."""
        check_delta(delta)
        return _renyi_epsilon(self, float(delta))

    @property
    def event(self) -> dp_event.DpEvent:
        """The same in the words of `dp-accounting`."""
        gaussian = dp_event.GaussianDpEvent(self.noise_multiplier)
        return dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(self.sampling_rate, gaussian), self.steps)

    def trade_off(self, false_positive_rates: Floats) -> Floats:
        """The least false-negative rates of any test for one record, given these false-positive rates: lower bounds.

        An event and its complement under (ε, δ)-DP give β >= 1 - δ - e^ε α and β >= e^-ε (1 - δ - α). Both hold for
        each ε of a grid with its accounted δ(ε), which is never too small; the largest holds as well. δ(ε) is that of
        the worse direction, so it does not matter which of the two hypotheses has the record.

        >>> dp_sgd = PoissonGaussian(sampling_rate=1.0, noise_multiplier=1.0, steps=1)
        >>> [round(float(beta), 3) for beta in dp_sgd.trade_off(np.array([0.01, 0.5]))]  # Φ(Φ^-1(1 - α) - 1)
        [0.908, 0.159]
        """
        growth, kept = _curve(self)
        least = np.zeros(len(false_positive_rates))
        for start in range(0, len(least), _CURVE_POINTS):  # in parts, so that the table stays small
            rates = false_positive_rates[start : start + _CURVE_POINTS, None]
            bounds = np.maximum(kept - growth * rates, (kept - rates) / growth)
            least[start : start + _CURVE_POINTS] = bounds.max(axis=1)
        return np.maximum(least, 0.0)


def epsilon(
    *, noise_multiplier: float, poisson_sampling_rate: float, steps: int, delta: float, unit: str = "example"
) -> PrivacyGuarantee:
    """Account for a training loop of one's own: what its steps promise when one record is added or removed.

    **Guarantee.** The mechanism that the assumptions describe, T steps of `PoissonGaussian`, is (ε, δ)-differentially
    private for adding or removing one record. That a program is this mechanism is for its author to see to: the
    assumptions are what to look for. Shuffled or fixed batches, and replacing a record, need another ε.

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
    """Find the noise multiplier with which `epsilon` is at most the target; the same relation and sampling are meant.

    >>> round(noise_multiplier(target_epsilon=1.0, poisson_sampling_rate=0.01, steps=1000, delta=1e-5), 3)
    1.415
    """
    return noise_for(target_epsilon, delta, poisson_sampling_rate, steps)


def grid_interval(mechanism: PoissonGaussian, delta: float) -> float:
    """Return a sixteenth of the standard deviation of a step's privacy loss, within what is accurate and small."""
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
    """Well over what rounding loses of δ: 6e-17 per step, measured at q = 1, where δ is known, up to a million."""
    return 1e-13 + 1e-15 * steps


@lru_cache(maxsize=4096)
def _epsilon(mechanism: PoissonGaussian, delta: float) -> float:
    spare = delta - rounding_of_delta(mechanism.steps)
    if spare < delta / 2:
        # Both hold; without sampling the closed form is exact, and with it an upper bound.
        whole = gaussian_epsilon(mechanism.noise_multiplier, mechanism.steps, delta)
        return min(_renyi_epsilon(mechanism, delta), whole)
    return float(privacy_loss(mechanism, delta).get_epsilon_for_delta(spare))


@lru_cache(maxsize=1024)
def _curve(mechanism: PoissonGaussian) -> tuple[Floats, Floats]:
    """(e^ε, 1 - δ(ε)) for a grid of ε."""
    loss = privacy_loss(mechanism, _CURVE_DELTA)
    furthest = min(_CURVE_EPSILON, float(loss.get_epsilon_for_delta(_CURVE_DELTA)))
    epsilons = np.linspace(0.0, furthest, _CURVE_POINTS)
    kept = 1 - rounding_of_delta(mechanism.steps) - np.asarray(loss.get_delta_for_epsilon(epsilons))
    return np.exp(epsilons), kept


def privacy_loss(
    mechanism: PoissonGaussian, delta: float, interval: float | None = None
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Return the law of all steps' privacy loss, never too low, with tails cut that are small against this δ.

    Laws that are composed need one interval of the grid.
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
    """By whole orders; where they say 0, by the closed form for q = 1, which costs no less.

    A divergence of 1e-16 is all rounding, and the accountant calls it 0, or takes it for one: a δ of 1e-12 may then
    be called enough by itself when ε is 1e-9.
    """
    found = _renyi_orders_epsilon(mechanism, delta)
    # Orders up to 1024 give at least a hundredth where δ is small, next to which their rounding is nothing.
    return found * (1 + 1e-9) if found > 0 else gaussian_epsilon(mechanism.noise_multiplier, mechanism.steps, delta)


def _renyi_orders_epsilon(mechanism: PoissonGaussian, delta: float) -> float:
    accountant = rdp.RdpAccountant(orders=RENYI_ORDERS)
    accountant.compose(mechanism.event)
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=1024)
def noise_for(target_epsilon: float, delta: float, sampling_rate: float, steps: int) -> float:
    """Return the smallest noise multiplier, to a thousandth, whose accounted ε is at most the target.

    The number returned has itself been accounted: its ε is at most the target. Below a multiplier of 0.1 the search
    refuses rather than answers: there the promise would rest on δ, or on a record being left out by luck, and not
    on noise.

    >>> sigma = noise_for(1.0, 1e-5, sampling_rate=2499 / 60_000, steps=240)
    >>> round(sigma, 2), PoissonGaussian(2499 / 60_000, sigma, 240).epsilon(1e-5) <= 1.0
    (2.61, True)
    """
    _require(
        "target_epsilon",
        target_epsilon,
        ok=target_epsilon > 0,
        why="It is the bound on the privacy loss.",
        remedy="Use a number above 0, such as 1.",
    )

    def excess(log_noise: float) -> float:
        """log(ε/target), cut where it is far from 0 so that an ε of 0 does no harm."""
        epsilon = PoissonGaussian(sampling_rate, math.exp(log_noise), steps).epsilon(delta)
        return math.log(min(max(epsilon / target_epsilon, 1e-2), 1e2))

    low, high = _bracket(excess, target_epsilon, steps)
    log_noise = brentq(excess, low, high, xtol=_NOISE_TOLERANCE / 8) if excess(high) < 0 else high
    while excess(log_noise) > 0:
        log_noise += _NOISE_TOLERANCE / 8
    return math.exp(log_noise)


def _bracket(excess: Callable[[float], float], target_epsilon: float, steps: int) -> tuple[float, float]:
    """Logarithms of (too little noise, enough noise), at most a factor of two apart, found from 1 outwards."""
    least, most = math.log(LEAST_NOISE), math.log(MOST_NOISE)
    high = 0.0
    while excess(high) > 0:
        if high == most:
            raise SettingError(
                f"target_epsilon={target_epsilon:g} is out of reach of {steps} steps.",
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
    """ε of E Gaussian releases of one record's contribution: in closed form, by Gaussian differential privacy.

    With fixed disjoint batches a record takes part once in each of E epochs, and what other batches do is
    post-processing: the run is μ-GDP with μ = √E/σ, whatever the number of batches. It is also the case q = 1 of
    `PoissonGaussian`. δ(ε) = Φ(-ε/μ + μ/2) - e^ε Φ(-ε/μ - μ/2), solved for ε.

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
        """log δ(ε) - log δ, never too small: without the term that is subtracted where rounding swallows the rest."""
        kept, lost = float(log_ndtr(mu / 2 - epsilon / mu)), epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
        gap = kept - lost
        # Each logarithm is good to a few units in its last place, and so is ε; a small gap magnifies that.
        rounding = 1e-15 * (1 + abs(kept) + abs(lost) + epsilon)
        share = math.log(-math.expm1(-gap)) + rounding / min(gap, 1.0) if gap > 4 * rounding else 0.0
        return kept + min(share, 0.0) + rounding - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    enough = mu * (mu / 2 - float(ndtri(delta)))  # there the first term alone is δ
    if not math.isfinite(enough):
        return math.inf
    high = _upwards(max(enough, 0.0), mu)
    if excess(high) > 0:
        return high
    found = float(brentq(lambda epsilon: max(excess(epsilon), -1e3), 0.0, high, xtol=1e-12 * mu, rtol=1e-13))
    return min(_upwards(found, mu), high)


def _upwards(epsilon: float, mu: float) -> float:
    """More than rounding and the search may have missed."""
    return epsilon * (1 + 1e-11) + 1e-11 * mu
