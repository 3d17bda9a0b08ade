"""Accuracies: shares of test examples with their intervals, by radius, attack, class and seed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from pydantic import Field

from stobatch.results.document import Count, Flag, Number, Part, Size, Text, Whole
from stobatch.types import Norm


class Share(Part):
    """A share of examples, with its 95% interval (Clopper and Pearson)."""

    value: Number
    count: Count
    total: Count
    low: Number
    high: Number

    def __str__(self) -> str:
        return f"{100 * self.value:.1f}% [{100 * self.low:.1f}, {100 * self.high:.1f}]"


class Difference(Part):
    """A difference of two shares of the same examples, with its 95% interval."""

    value: Number
    low: Number
    high: Number


class _AtRadius(Part):
    radius: Size


class _OfClass(Part):
    label: Whole = Field(validation_alias="class", serialization_alias="class")


class _UnderAttack(Part):
    protocol: Text
    function: Text
    attack: Text
    radius: Size
    norm: Norm
    input_range: Text


class ShareAt(Share, _AtRadius):
    """A share at a radius, in the unit that its document names."""


class ClassShare(Share, _OfClass):
    """A share of the examples of one class."""


class AttackedShare(Share, _UnderAttack):
    """An accuracy under attack, with all one must know to compare it with another."""


class Gap(Part):
    """How much accuracy the published protocol shows that an adaptive attack takes away."""

    radius: Size
    published: Share
    adaptive: Share
    gap: Difference


class TTest(Part):
    """Two-tailed t-test on the mean over seeds; its false-alarm rate at level p is p for normal errors."""

    difference: Number
    low: Number
    high: Number
    p_value: Number
    paired: Flag
    num_seeds: tuple[Count, Count]


AtRadius = TypeVar("AtRadius", ShareAt, AttackedShare, Gap)


def at_radius(rows: Iterable[AtRadius], radius: float) -> AtRadius | None:
    """Return the row of a radius; None where there is none."""
    return next((row for row in rows if row.radius == radius), None)
