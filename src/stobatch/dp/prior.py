"""The public prior: weights that a training starts from, the data they were made from, and the data they may contain.

**Guarantee.** Weights that were made without the private records are a constant: the same for all neighbouring data
sets. A mechanism that starts from them is as private as one that starts from random weights, and everything computed
from its releases and the constant is post-processing. This fails for weights that may have seen the records: they can
reveal a record without noise, and the ε of the training does not count that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

UNKNOWN = "unknown"
"""Stands for data that is not known, among the names of data that weights may contain."""
_RELATED = tuple(
    re.compile(pattern)
    for pattern in (
        r"(tiny)?imagenet.*|ilsvrc.*",
        r"[eq]?mnist|smalldigits|nist.*",
        r"cifar10(?!0).*|(80million|80m)?tinyimages.*",
    )
)
"""Families of data sets that share records, by normalised names: Tiny ImageNet is a part of ImageNet."""


@dataclass(frozen=True)
class Prior:
    """The weights that a training starts from, as described by their card."""

    name: str
    weights_sha256: str
    read: tuple[str, ...]
    """Sources that they were made from, with licence, and digest where there is one."""
    may_contain: tuple[str, ...]
    """Data sets whose records they may have seen, or `unknown`."""
    promise: str | None = None
    """For weights of a run: that run's guarantee to its own training records."""
    new_head: bool = False
    """Whether the last layer is initialised anew."""
    conflict: str | None = None
    """Why they may contain the private records; None if nothing suggests it."""
    tuned: str | None = None
    """Why their settings may have been chosen on the private records; None if nothing suggests it."""

    @property
    def assumption(self) -> str:
        """Return the assumption of a guarantee that the prior does not contain the private records."""
        seen = ", ".join(self.may_contain) or "no data set by name"
        return (
            f"the weights that training starts from, {self.name} ({self.weights_sha256[:12]}…), were trained without "
            f"the private records, as their card says (they may have seen {seen}; made from {'; '.join(self.read)}): a "
            "constant, about which this guarantee says nothing"
        )

    @property
    def objection(self) -> str:
        """Return the objection to a prior that may contain the private records."""
        return (
            f"the weights that training starts from, {self.name} ({self.weights_sha256[:12]}…), may contain the "
            f"private records: {self.conflict}; ε counts the training alone, and accuracies may be those of records "
            "that were seen before"
        )

    @property
    def tuning_objection(self) -> str:
        """Return the objection to a prior whose settings may have been chosen on the private data."""
        return (
            f"how the weights that training starts from, {self.name}, are made was chosen by looking at the private "
            f"data: {self.tuned}; that choice is not covered by this ε, which holds for this training alone"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "read": list(self.read), "may_contain": list(self.may_contain)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Prior:
        """Return the inverse of `to_dict`."""
        return cls(**{**values, "read": tuple(values["read"]), "may_contain": tuple(values["may_contain"])})


def find_tuning(tuned_on: Iterable[str], private: Iterable[str]) -> str | None:
    """Return why settings chosen on some data sets were chosen on the private one; None if they were not.

    >>> find_tuning(["mnist"], ["small_digits"]), find_tuning(["mnist"], ["cifar10"])
    ('somebody looked at mnist, and the private data are small_digits', None)
    """
    names = list(private)
    pairs = ((name, other) for name in tuned_on for other in names if _share_records(_plain(name), _plain(other)))
    return next((f"somebody looked at {name}, and the private data are {other}" for name, other in pairs), None)


def find_conflict(may_contain: Iterable[str], private: Iterable[str]) -> str | None:
    """Return why weights that may contain some data sets may contain the private records; None if they do not.

    >>> find_conflict(["imagenet"], ["tiny_imagenet"])
    'they may have seen imagenet, and the private data are tiny_imagenet'
    >>> find_conflict(["cifar100", "fashion_mnist"], ["cifar10"]) is None
    True
    """
    for name in may_contain:
        if _plain(name) == UNKNOWN:
            return "their card says that nobody knows which records they have seen"
        for other in private:
            if _share_records(_plain(name), _plain(other)):
                return f"they may have seen {name}, and the private data are {other}"
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _share_records(one: str, other: str) -> bool:
    return one == other or any(family.fullmatch(one) and family.fullmatch(other) for family in _RELATED)
