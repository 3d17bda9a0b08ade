"""What a check says: that something agrees, that it differs, or that it could not be checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import isclose
from typing import Any

RELATIVE = 1e-9
"""Floats that differ by less are the same: another release of SciPy may round the last bits of an interval."""


class Outcome(StrEnum):
    """Of one check."""

    AGREES = "agrees"
    DIFFERS = "differs"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: the file it is about, and what was found."""

    name: str
    outcome: Outcome
    detail: str
    file: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "outcome": str(self.outcome), "file": self.file, "detail": self.detail}


def agrees(name: str, detail: str, file: str = "") -> Check:
    return Check(name, Outcome.AGREES, detail, file)


def differs(name: str, detail: str, file: str = "") -> Check:
    return Check(name, Outcome.DIFFERS, detail, file)


def not_checked(name: str, detail: str, file: str = "") -> Check:
    return Check(name, Outcome.NOT_CHECKED, detail, file)


def compared(name: str, file: str, pairs: Iterable[tuple[str, Any, Any]], detail: str) -> Check:
    """Differs at the first of (what, recorded, computed) that is not the same; else agrees, with the detail."""
    for what, recorded, computed in pairs:
        difference = first_difference(recorded, computed, what)
        if difference:
            return differs(name, difference, file)
    return agrees(name, detail, file)


def first_difference(recorded: Any, computed: Any, where: str) -> str:
    """Where two documents differ first, and how; nothing where they are the same up to the rounding of floats.

    >>> first_difference({"a": [1, 2.0]}, {"a": [1, 2.5]}, "scores")
    'scores.a[1] is 2.0, computed again it is 2.5'
    """
    return next(_differences(recorded, computed, where), "")


def _differences(recorded: Any, computed: Any, where: str) -> Iterator[str]:
    if isinstance(recorded, dict) and isinstance(computed, dict):
        yield from (f"{where} has no {key}" for key in computed if key not in recorded)
        yield from (f"{where}.{key} should not be there" for key in recorded if key not in computed)
        for key in computed:
            yield from _differences(recorded[key], computed[key], f"{where}.{key}")
    elif isinstance(recorded, list) and isinstance(computed, list):
        if len(recorded) != len(computed):
            yield f"{where} has {len(recorded)} entries, computed again it has {len(computed)}"
        for place, (one, other) in enumerate(zip(recorded, computed, strict=False)):
            yield from _differences(one, other, f"{where}[{place}]")
    elif not _same(recorded, computed):
        yield f"{where} is {_short(recorded)}, computed again it is {_short(computed)}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool) or not isinstance(one, (int, float)):
        return type(one) is type(other) and bool(one == other)
    return isinstance(other, (int, float)) and isclose(one, other, rel_tol=RELATIVE, abs_tol=1e-15)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
