"""What a training starts from, where that is not random weights: what was read to make it, and what may be in it.

**Guarantee.** Weights that were made without the private records are a constant: the same for every two neighbouring
data sets. A mechanism that starts from them is as private as one that starts from random weights, and whatever is
computed from its releases and from the constant is post-processing. Of weights that may have seen the records none of
this holds: they can carry a record past the noise, and no ε of the training counts that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

UNKNOWN = "unknown"
"""Among the names of data that weights may contain: nobody can say."""
_RELATED = tuple(
    re.compile(pattern)
    for pattern in (
        r"(tiny)?imagenet.*|ilsvrc.*",
        r"[eq]?mnist|smalldigits|nist.*",
        r"cifar10(?!0).*|(80million|80m)?tinyimages.*",
    )
)
"""Data sets that share records, by their names in small letters and digits: Tiny ImageNet is a part of ImageNet."""


@dataclass(frozen=True)
class Prior:
    """The weights that a training starts from, as their card describes them."""

    name: str
    weights_sha256: str
    read: tuple[str, ...]
    """What they were made from: each source with its licence, and its digest where it has one."""
    may_contain: tuple[str, ...]
    """Data sets whose records they may have seen, or `unknown`."""
    promise: str | None = None
    """Of a run: what that run guarantees to the records that it was trained on."""
    new_head: bool = False
    """Whether the last layer is not taken from them."""
    conflict: str | None = None
    """Why they may contain the private records; None where nothing says so."""
    tuned: str | None = None
    """Why choosing how they are made may have told something of the private records; None where nothing says so."""

    @property
    def assumption(self) -> str:
        """What a guarantee assumes of a start that is said to be free of the private records."""
        seen = ", ".join(self.may_contain) or "no data set by name"
        return (
            f"the weights that training starts from, {self.name} ({self.weights_sha256[:12]}…), were trained without "
            f"the private records, as their card says (they may have seen {seen}; made from {'; '.join(self.read)}): a "
            "constant, about which this guarantee says nothing"
        )

    @property
    def objection(self) -> str:
        return (
            f"the weights that training starts from, {self.name} ({self.weights_sha256[:12]}…), may contain the "
            f"private records: {self.conflict}; ε counts the training alone, and accuracies may be those of records "
            "that were seen before"
        )

    @property
    def tuning_objection(self) -> str:
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
    """Say why a choice that was made by looking at some data sets was made by looking at the private one.

    >>> find_tuning(["mnist"], ["small_digits"]), find_tuning(["mnist"], ["cifar10"])
    ('somebody looked at mnist, and the private data are small_digits', None)
    """
    own = list(private)
    pairs = ((name, one) for name in tuned_on for one in own if _share_records(_plain(name), _plain(one)))
    return next((f"somebody looked at {name}, and the private data are {one}" for name, one in pairs), None)


def find_conflict(may_contain: Iterable[str], private: Iterable[str]) -> str | None:
    """Say why weights that may contain some data sets may contain the records of the private one, known by its names.

    >>> find_conflict(["imagenet"], ["tiny_imagenet"])
    'they may have seen imagenet, and the private data are tiny_imagenet'
    >>> find_conflict(["cifar100", "fashion_mnist"], ["cifar10"]) is None
    True
    """
    for name in may_contain:
        if _plain(name) == UNKNOWN:
            return "their card says that nobody knows which records they have seen"
        for own in private:
            if _share_records(_plain(name), _plain(own)):
                return f"they may have seen {name}, and the private data are {own}"
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _share_records(one: str, other: str) -> bool:
    return one == other or any(family.fullmatch(one) and family.fullmatch(other) for family in _RELATED)
