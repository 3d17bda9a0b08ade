"""Units that cannot be mixed up: input ranges, radii, neighbouring relations and the status of a claim.

A radius without its norm and the range of the pixels is not a number anyone can use: 0.1 on [0, 1] is 0.2 on
[-1, 1]. Comparing two radii of different units is an error here, not a quietly wrong accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stobatch.errors import UnitError


class Norm(StrEnum):
    """The norm in which a perturbation is measured."""

    L1 = "l1"
    L2 = "l2"
    LINF = "linf"


class Neighbours(StrEnum):
    """When two data sets count as neighbours. An epsilon is meaningless without it."""

    REPLACE_ONE = "replace-one"
    ADD_REMOVE = "add-or-remove-one"


class Status(StrEnum):
    """Who vouches for a guarantee. `VOID` is a privacy guarantee of a run whose seed is public: it protects nobody."""

    NONE = "none"
    CLAIMED = "claimed"
    PROVED = "proved"
    REFUTED = "refuted"
    VOID = "void"


class Verdict(StrEnum):
    """What an audit can say. It never proves: an attack that fails may only have been too weak.

    Of a single claim it is consistent, refuted or not tested; partly tested is said of several.
    """

    CONSISTENT = "consistent"
    REFUTED = "refuted"
    PARTLY_TESTED = "partly tested"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class InputRange:
    """The interval that every input value lies in.

    >>> InputRange(-1, 1).width
    2
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise UnitError(
                f"input range [{self.low:g}, {self.high:g}] is empty.",
                remedy="Give low < high, as in InputRange(-1, 1).",
            )

    @property
    def width(self) -> float:
        return self.high - self.low

    def __str__(self) -> str:
        return f"[{self.low:g}, {self.high:g}]"


UNIT_RANGE = InputRange(0.0, 1.0)
PAPER_RANGE = InputRange(-1.0, 1.0)
"""The library works here throughout, as the paper does."""


@dataclass(frozen=True)
class Radius:
    """The size of a norm ball around an input, in stated units.

    >>> Radius(0.1, Norm.LINF, UNIT_RANGE).to(PAPER_RANGE)
    Radius(size=0.2, norm=<Norm.LINF: 'linf'>, range=InputRange(low=-1.0, high=1.0))
    >>> Radius(0.1, Norm.LINF, UNIT_RANGE) < Radius(0.2, Norm.LINF, PAPER_RANGE)
    Traceback (most recent call last):
    ...
    stobatch.errors.UnitError: radius is linf over [0, 1]; you compare it with linf over [-1, 1]. \
Convert with radius.to(InputRange(-1, 1)).
    """

    size: float
    norm: Norm = Norm.LINF
    range: InputRange = PAPER_RANGE

    def __post_init__(self) -> None:
        if not self.size >= 0:
            raise UnitError(f"a radius of {self.size} is not a size.", remedy="Give a number that is at least 0.")

    @classmethod
    def of(cls, size: Radius | float, norm: Norm | str = Norm.LINF, range: InputRange = PAPER_RANGE) -> Radius:
        """Return a radius as it is, or a number with its norm and the range of the inputs.

        >>> Radius.of(0.3, "l2").norm is Norm.L2, Radius.of(Radius(0.3), "l2").norm is Norm.LINF
        (True, True)
        """
        if isinstance(size, Radius):
            return size
        if norm not in tuple(Norm):
            raise UnitError(f"there is no norm '{norm}'.", remedy=f"Use one of {', '.join(Norm)}.")
        return cls(float(size), Norm(norm), range)

    def to(self, range: InputRange) -> Radius:
        """Return the same ball, measured on inputs rescaled to another range."""
        return Radius(self.size * range.width / self.range.width, self.norm, range)

    def _require_same_unit(self, other: Radius) -> None:
        if self.norm != other.norm:
            raise UnitError(
                f"radius is {self.norm} over {self.range}; you compare it with {other.norm} over {other.range}.",
                remedy="Certify or attack in the norm you compare with.",
            )
        if self.range != other.range:
            raise UnitError(
                f"radius is {self.norm} over {self.range}; you compare it with {other.norm} over {other.range}.",
                remedy=f"Convert with radius.to(InputRange({other.range.low:g}, {other.range.high:g})).",
            )

    def __lt__(self, other: Radius) -> bool:
        self._require_same_unit(other)
        return self.size < other.size

    def __le__(self, other: Radius) -> bool:
        self._require_same_unit(other)
        return self.size <= other.size

    def __gt__(self, other: Radius) -> bool:
        return other < self

    def __ge__(self, other: Radius) -> bool:
        return other <= self

    def __str__(self) -> str:
        return f"{self.norm} {self.size:g} over {self.range}"
