"""Private hyper-parameter search: the cost of training a random number of candidates and releasing the best.

Releasing the best of a fixed number of trainings costs about as much as all of them together. With a secret random
number K it costs two or three trainings (Papernot and Steinke, 2022, Theorems 2 and 6): K has a Poisson or a truncated
negative binomial distribution, every candidate is the same random mechanism, the choice of its settings included, and
only the best one is released. docs/guarantees/search.md has the statement and its proof from theirs.

The arithmetic is that of `dp-accounting` (`RepeatAndSelectDpEvent`), at integer Rényi orders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stobatch.dp.accounting import RENYI_ORDERS, PoissonGaussian, check_delta, noise_for
from stobatch.dp.library import dp_event, rdp
from stobatch.dp.roots import brentq
from stobatch.errors import SettingError
from stobatch.seeds import Stream

MOST_RUNS = 1000.0
"""The largest mean number of candidates."""
LEAST_DELTA = 1e-10
_ROUNDING = 1e-12
"""Subtracted from δ: far more than the error of float64 in drawing the number of candidates."""
_LARGEST_COUNT = 1_000_000


@dataclass(frozen=True)
class RunLaw:
    """The distribution of the number of candidates: Poisson if `shape` is infinite, else truncated negative binomial.

    A shape of 1 is the geometric distribution, 0 the logarithmic one. A Poisson number may be 0: then nothing is
    trained or released.

    >>> law = RunLaw(mean=5.0, shape=math.inf)
    >>> [round(probability, 4) for _, probability in zip(range(3), law.probabilities())]
    [0.0067, 0.0337, 0.0842]
    """

    mean: float
    shape: float

    def __post_init__(self) -> None:
        if not 1 < self.mean <= MOST_RUNS:
            raise SettingError(
                f"a search with {self.mean:g} candidates on average is not allowed.",
                why="With one there is nothing to choose from, and with more than a thousand ε is lost.",
                remedy="Use a number above 1, such as 5.",
            )
        if not self.shape >= 0:
            raise SettingError(f"shape={self.shape} is negative.", remedy="Use 0, 0.5 or 1.")

    @property
    def is_poisson(self) -> bool:
        return math.isinf(self.shape)

    @property
    def success(self) -> float:
        """Return γ of the truncated negative binomial distribution with this mean."""
        if self.shape == 1:
            return 1 / self.mean
        low, high = 1e-12, 1 - 1e-12
        return float(brentq(lambda gamma: _mean(gamma, self.shape) - self.mean, low, high, xtol=1e-15, rtol=1e-13))

    def probabilities(self) -> Iterator[float]:
        """Yield P(K = 0), P(K = 1), ... by the ratios of successive probabilities."""
        if self.is_poisson:
            probability = math.exp(-self.mean)
            yield probability
            for count in range(1, _LARGEST_COUNT):
                probability *= self.mean / count
                yield probability
            return
        eta, gamma = self.shape, self.success
        rest = 1 - gamma
        probability = rest / -math.log(gamma) if eta == 0 else eta * rest / math.expm1(-eta * math.log(gamma))
        yield 0.0
        yield probability
        for count in range(1, _LARGEST_COUNT):
            probability *= rest * (count + eta) / (count + 1)
            yield probability

    def draw(self, stream: Stream) -> int:
        """Draw a number of candidates by inverting its distribution function at 64 random bits."""
        uniform = (int(next(stream.blocks(1))[0]) + 0.5) / 2**64
        cumulative = 0.0
        for count, probability in enumerate(self.probabilities()):
            cumulative += probability
            if uniform < cumulative:
                return count
        return _LARGEST_COUNT

    def __str__(self) -> str:
        named = {math.inf: "Poisson", 0.0: "logarithmic", 1.0: "geometric"}.get(self.shape)
        return f"{named or f'truncated negative binomial (shape {self.shape:g})'}, mean {self.mean:g}"


def _mean(gamma: float, eta: float) -> float:
    if eta == 0:
        return (1 / gamma - 1) / -math.log(gamma)
    return eta * (1 - gamma) / (gamma * -math.expm1(eta * math.log(gamma)))


@dataclass(frozen=True)
class AnyOfDpEvent(dp_event.DpEvent):  # type: ignore[misc]
    """One of several events: which one depends on nothing private, or a record takes part in only one of them."""

    events: tuple[dp_event.DpEvent, ...]

    def __init__(self, events: Sequence[dp_event.DpEvent]) -> None:
        object.__setattr__(self, "events", tuple(events))


class RenyiAccountant(rdp.RdpAccountant):  # type: ignore[misc]
    """Rényi accounting with `AnyOfDpEvent`: the largest divergence at each order.

    exp((α - 1) D_α) is jointly convex, so a mixture's divergence is at most the largest of its parts.
    """

    _rdp: NDArray[np.float64]

    def _maybe_compose(self, event: dp_event.DpEvent, count: int, do_compose: bool) -> object:
        if not isinstance(event, AnyOfDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        before, curves = self._rdp, []
        for one in event.events:
            self._rdp = np.zeros_like(before)
            error = self._maybe_compose(one, count, do_compose)
            if error is not None:
                self._rdp = before
                return error
            curves.append(self._rdp)
        self._rdp = before + np.max(curves, axis=0)
        return None


@dataclass(frozen=True)
class Search:
    """A search: the possible trainings of a candidate, the noise on its score, and the distribution of their number.

    For a candidate, a record is either held out, and changes the score by at most 1, or trained on, and the score is
    computed from the model and other records. So towards a record a candidate is a training or a noisy score, never
    both. Where persons are held out as a whole, this holds for persons.

    **Guarantee**: the best candidate's model, settings and noisy score are (epsilon(δ), δ)-differentially private when
    one record is added or removed, if the number of candidates and every other candidate stay secret.

    >>> training = PoissonGaussian(sampling_rate=0.07, noise_multiplier=10.0, steps=400)
    >>> search = Search((training,), score_noise=10.0, law=RunLaw(5.0, math.inf))
    >>> round(training.epsilon(1e-5), 2), round(search.epsilon(1e-5), 2)
    (0.5, 0.94)
    """

    mechanisms: tuple[PoissonGaussian, ...]
    score_noise: float
    """Standard deviation of the noise on the number of held-out records that are classified correctly."""
    law: RunLaw

    def __post_init__(self) -> None:
        if not 0.1 <= self.score_noise <= 1e6:
            raise SettingError(
                f"score_noise={self.score_noise:g} is not allowed.",
                why="It is the standard deviation of the noise on a number of records.",
                remedy="Use a number such as 10.",
            )

    @property
    def event(self) -> dp_event.DpEvent:
        """Return the whole search as a `dp-accounting` event."""
        trainings = [one.event for one in dict.fromkeys(self.mechanisms)]
        candidate = AnyOfDpEvent([*trainings, dp_event.GaussianDpEvent(self.score_noise)])
        return dp_event.RepeatAndSelectDpEvent(candidate, self.law.mean, self.law.shape)

    def epsilon(self, delta: float) -> float:
        """Return ε of the whole search at this δ: an upper bound."""
        check_delta(delta)
        if delta < LEAST_DELTA:
            raise SettingError(
                f"delta={delta:g} is too small for a search.",
                why="The distribution of the number of candidates is exact to about 1e-15 only.",
                remedy=f"Use {LEAST_DELTA:g} or more.",
            )
        return _search_epsilon(self, float(delta))


NOT_LOOKED = ", like all other settings, without looking at the private data"
"""How the assumption on settings ends where it holds; files of older versions have it in any case."""


@dataclass(frozen=True)
class Searched:
    """The search that a training is a candidate of, as its plan describes it."""

    search: Search
    candidate_epsilon: float
    """The ε of each candidate by itself, which its noise is chosen for."""
    combinations: int
    held_out: int
    score: str
    word: str = "record"
    """What is held out as a whole: "record" or "person"."""

    def to_dict(self) -> dict[str, Any]:
        """Return the public numbers of the search, ready for JSON."""
        law = self.search.law
        return {
            "trainings": [vars(one) for one in self.search.mechanisms],
            "score_noise": self.search.score_noise,
            "mean": law.mean,
            "shape": None if law.is_poisson else law.shape,
            "candidate_epsilon": self.candidate_epsilon,
            "combinations": self.combinations,
            "held_out": self.held_out,
            "score": self.score,
        }

    def assumptions(self, *, tuned_on_private_data: bool) -> tuple[str, ...]:
        """Return the assumptions of a search's cost; that other settings were chosen by looking is an objection."""
        not_looked = "" if tuned_on_private_data else NOT_LOOKED
        return (
            f"this training is the best of a random number of trainings ({self.search.law}), which was drawn in secret "
            "before the first of them and is told to nobody; of the others nothing is released",
            f"each of them drew its settings from {self.combinations} combinations, which were fixed before the data "
            f"were read{not_looked}",
            f"the best has the largest noisy score: {self.score}, of {self.held_out} training {self.word}s that it "
            f"held out by a secret draw, with Gaussian noise of standard deviation {self.search.score_noise:g} on "
            f"their number; a {self.word} is held out or trained on, never both",
            f"places of {self.word}s are fixed: which are held out does not change when a {self.word} is added or "
            "removed",
        )


@lru_cache(maxsize=1024)
def _search_epsilon(search: Search, delta: float) -> float:
    accountant = RenyiAccountant(orders=RENYI_ORDERS)
    accountant.compose(search.event)
    # As in `dp.accounting`: 1e-9 of ε exceeds the rounding of orders up to 1024.
    return float(accountant.get_epsilon(delta - _ROUNDING)) * (1 + 1e-9)


def budget_of_candidates(
    target_epsilon: float, delta: float, trainings: Sequence[tuple[float, int]], score_noise: float, law: RunLaw
) -> float:
    """Return the largest ε of one candidate with which the whole search stays within the target.

    `trainings` are the sampling rate and the number of steps of each possible candidate; each gets the smallest noise
    within that ε. The result itself has been accounted.
    """

    def search_epsilon(candidate_epsilon: float) -> float:
        mechanisms = tuple(
            PoissonGaussian(rate, noise_for(candidate_epsilon, delta, rate, steps), steps)
            for rate, steps in dict.fromkeys(trainings)
        )
        return Search(mechanisms, score_noise, law).epsilon(delta)

    # With practically private trainings, what remains is the cost of the scores.
    alone = Search((PoissonGaussian(1e-6, 1e4, 1),), score_noise, law).epsilon(delta)
    if alone > target_epsilon:
        raise SettingError(
            f"the scores of a search alone cost ε = {alone:.3g}, more than epsilon={target_epsilon:g}.",
            remedy="Raise search.score_noise, or method.epsilon, or lower search.mean.",
        )
    low, high = target_epsilon / 64, target_epsilon
    if search_epsilon(low) > target_epsilon:
        raise SettingError(
            f"epsilon={target_epsilon:g} is out of reach of a search of {law.mean:g} candidates on average.",
            remedy="Raise method.epsilon, or lower search.mean.",
        )
    while high - low > 1e-3 * target_epsilon:
        middle = (low + high) / 2
        low, high = (middle, high) if search_epsilon(middle) <= target_epsilon else (low, middle)
    # Rounded down to five digits, which stays within the target.
    digits = 10.0 ** (4 - math.floor(math.log10(low)))
    return math.floor(low * digits) / digits
