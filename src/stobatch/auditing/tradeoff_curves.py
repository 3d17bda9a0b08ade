"""Families of mechanisms: what a pair of error rates says about ε where the shape of the trade-off is known.

The trade-off curve of a mechanism is the least false-negative rate that a false-positive rate allows to anyone who
tells D from D'.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stobatch.dp.accounting import LEAST_NOISE, PoissonGaussian, check_delta

Floats = NDArray[np.float64]

_CELLS = 1024
"""Noise multipliers are tried on a grid of this many per factor of e: a grid finds the accountant's answers cached."""
_NEXT_TO_NOTHING = 1e-4
"""The search ends where q√T/σ, the leakage of so much noise, is this small; what leaks less is reported as 0."""
_ACCOUNTING_SLACK = 3e-3
"""By this share of itself the accountant's ε may be too large (see `dp.accounting`)."""
MOST_EPSILON = 100.0
"""The largest ε that one may ask about: no audit counts e^100 trainings."""

_ROUNDING = 1e-12
_BISECTIONS = 40


class Family(ABC):
    """Mechanisms ordered by how much they leak, each with its trade-off curve.

    Knowing the curve's shape, one pair of rates says what the mechanism leaks at a δ that no number of trainings
    could show.
    """

    name: ClassVar[str]
    assumes: ClassVar[str]

    @abstractmethod
    def epsilon(self, fpr: float, fnr: float, delta: float) -> float:
        """Return the largest ε such that every member with a smaller ε(δ) makes this pair of rates impossible.

        **Guarantee.** Where the rates are upper bounds on those of a test of a member, the member's ε(δ) is no
        smaller: its curve f falls, so f(fpr) <= f(true FPR) <= true FNR <= fnr, and the pair is possible for it.
        """

    @abstractmethod
    def strongest(self, fpr: Floats, fnr: Floats, delta: float) -> int:
        """Return which of these pairs promises the largest ε. It only chooses a threshold, so any answer is sound."""


Curve = Callable[[float], float]
"""The least false-positive rate that a true-positive rate demands: a trade-off curve read as tpr -> f(1 - tpr).

f speaks of D and D' in either order, so it is its own inverse. A curve may lie below the true one, never above. It
takes the true-positive rate because 1 - tpr has lost a tiny one.
"""


class CurveFamily(Family):
    """A family whose members' curves are known, so that a contradiction to the curve refutes the member."""

    @abstractmethod
    def most_refuted(self, refuted: Callable[[Curve], bool], delta: float) -> float:
        """Return ε(δ) of the leakiest member that was refuted, 0 if none was.

        **Guarantee.** If refuting a curve refutes all higher ones, a member whose true curve is not refuted has no
        smaller ε(δ): the member returned leaks less, on any path of the search.
        """


class AnyMechanism(Family):
    """Every mechanism: (ε, δ)-DP gives 1 - FNR <= e^ε FPR + δ, and 1 - FPR <= e^ε FNR + δ for the mirrored guess.

    The rarer error gives the larger of the two bounds wherever one is above 0.

    >>> round(AnyMechanism().epsilon(0.01, 0.3, delta=0.1), 3)  # log(0.6 / 0.01)
    4.094
    """

    name = "clopper_pearson"
    assumes = ""

    def epsilon(self, fpr: float, fnr: float, delta: float) -> float:
        rarer, kept = min(fpr, fnr), 1 - delta - max(fpr, fnr)
        if kept <= rarer:
            return 0.0
        return math.log(kept / rarer) if rarer > 0 else math.inf

    def strongest(self, fpr: Floats, fnr: Floats, delta: float) -> int:
        kept = np.maximum(1 - delta - np.maximum(fpr, fnr), 0)
        return int(np.argmax(kept / np.minimum(fpr, fnr)))


@dataclass(frozen=True)
class PoissonGaussianFamily(CurveFamily):
    """`PoissonGaussian(sampling_rate, σ, steps)` for every σ: more noise can be added by anyone, so it leaks less.

    A σ is refuted where its trade-off curve, a lower bound on the true one, lies above the pair of rates; then so is
    every larger σ. The answer is the ε of the least σ refuted on a grid from 0.1 up, hence never that of too little
    noise, less the share by which the accountant may overcount. Where the accountant itself says that it is coarser
    than that (δ around 1e-11, q below 1e-3 with little noise), the answer bounds the ε that it accounts.
    """

    sampling_rate: float
    steps: int
    name: ClassVar[str] = "poisson_family"
    assumes: ClassVar[str] = (
        "the trade-off is that of Gaussian noise on Poisson-sampled batches, as the mechanism's proof says"
    )

    def __post_init__(self) -> None:
        self._member(0)  # it checks both settings

    def epsilon(self, fpr: float, fnr: float, delta: float) -> float:
        check_delta(delta)
        return self._epsilon(self._least_refuted(lambda member: self._best(member, fpr, fnr)[0] > 0), delta)

    def strongest(self, fpr: Floats, fnr: Floats, delta: float) -> int:
        member = self._least_refuted(lambda member: self._best(member, fpr, fnr)[0] > 0, within=_CELLS // 32)
        return self._best(member, fpr, fnr)[1] if member else int(np.argmin(fpr + fnr))

    def most_refuted(self, refuted: Callable[[Curve], bool], delta: float) -> float:
        check_delta(delta)

        def at_fault(member: PoissonGaussian) -> bool:
            return refuted(lambda tpr: float(member.trade_off(np.array([1 - tpr]))[0]))

        return self._epsilon(self._least_refuted(at_fault), delta)

    @staticmethod
    def _best(member: PoissonGaussian, fpr: ArrayLike, fnr: ArrayLike) -> tuple[float, int]:
        """Return the most by which the curve lies above one of the pairs of rates, and which pair it is."""
        surplus = member.trade_off(np.atleast_1d(fpr)) - np.atleast_1d(fnr) - _ROUNDING
        return float(surplus.max()), int(surplus.argmax())

    @staticmethod
    def _epsilon(member: PoissonGaussian | None, delta: float) -> float:
        return member.epsilon(delta) * (1 - _ACCOUNTING_SLACK) if member else 0.0

    def _member(self, cell: int) -> PoissonGaussian:
        return PoissonGaussian(self.sampling_rate, math.exp(cell / _CELLS), self.steps)

    def _least_refuted(self, refuted: Callable[[PoissonGaussian], bool], within: int = 1) -> PoissonGaussian | None:
        """Return the member with the grid's least refuted σ; None if not even the largest σ is refuted.

        The answer is refuted itself, and at most `within` cells above the least one.
        """
        most_noise = max(1.0, self.sampling_rate * math.sqrt(self.steps) / _NEXT_TO_NOTHING)
        low, high = math.ceil(math.log(LEAST_NOISE) * _CELLS) - 1, math.ceil(math.log(most_noise) * _CELLS)
        if not refuted(self._member(high)):
            return None
        while high - low > within:
            middle = (low + high) // 2
            low, high = (low, middle) if refuted(self._member(middle)) else (middle, high)
        return self._member(high)


def most_refuted(refuted: Callable[[float], bool]) -> float:
    """Return a refuted number next to one that is not (what leaks less is refuted with it); 0 if none is."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while high < MOST_EPSILON and refuted(high):
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
