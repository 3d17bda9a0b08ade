"""Make something hostile of something valid: of plain data with its structure known, of text, of bytes."""

from __future__ import annotations

import copy
import json
import math
import sys
from random import Random
from typing import Any

HOSTILE_NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, -0.0, 0.5, 1e-320, 5e-324, 1e308, -1e308, math.inf, -math.inf, math.nan),
    *(2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 2**64 + 1, 10**30, 10**400, 1 << 20000),
)
HOSTILE_TEXTS: tuple[str, ...] = (
    *("", " ", "\0", "a\0b", "\n", "two\nlines", "\u2028", "\x1b[31mred", "\ud800", "\udcff", "\U0010ffff", "ε", "٣"),
    *(
        "None",
        "null",
        "true",
        "nan",
        "inf",
        "1e400",
        "-",
        "..",
        "../../etc/passwd",
        "/dev/full",
        "%s%n",
        "{0}",
        "a" * 5000,
    ),
    *("'", '"', "\\", "$(id)", "{}", "[]", "{", "[", "1_000", "0x10", "1e5", "９"),
)


def hostile(rng: Random) -> Any:
    """One value of any type, most of them where they do not belong."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(HOSTILE_NUMBERS)
    if kind == 1:
        return rng.choice(HOSTILE_TEXTS)
    if kind == 2:
        return rng.choice((None, True, False, [], {}, [[]], [None], {"": None}))
    if kind == 3:
        return [hostile(rng) for _ in range(rng.randrange(4))]
    if kind == 4:
        return {rng.choice(HOSTILE_TEXTS): hostile(rng) for _ in range(rng.randrange(3))}
    return nested(rng.choice((5, 35, 41, 200)))


def as_json(value: Any) -> str:
    """What JSON would say of it, with NaN, infinities and numbers of any length as Python writes them."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value, default=str)
    finally:
        sys.set_int_max_str_digits(before)


def nested(depth: int) -> Any:
    found: Any = 0
    for _ in range(depth):
        found = [found]
    return found


def mutated(rng: Random, value: Any, times: int = 1) -> Any:
    """A copy of plain data with a few changes: a value replaced, nudged, moved, or a key renamed, lost or doubled."""
    found = copy.deepcopy(value)
    for _ in range(times):
        place = _place(rng, found)
        if place is None:
            return hostile(rng)
        holder, key = place
        if isinstance(holder, list):
            _change_list(rng, holder, key)
        else:
            _change_dict(rng, holder, key)
    return found


def _place(rng: Random, value: Any) -> tuple[Any, Any] | None:
    """A random entry somewhere inside, as its holder and its key."""
    places: list[tuple[Any, Any]] = []
    level = [value]
    while level:
        one = level.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            places.append((one, key))
            level.append(one[key])
    return rng.choice(places) if places else None


def _change_list(rng: Random, holder: list[Any], key: int) -> None:
    kind = rng.randrange(5)
    if kind == 0:
        holder.pop(key)
    elif kind == 1:
        holder.append(holder[key])
    elif kind == 2:
        holder[key] = hostile(rng)
    else:
        holder[key] = nudged(rng, holder[key])


def _change_dict(rng: Random, holder: dict[str, Any], key: str) -> None:
    kind = rng.randrange(6)
    if kind == 0:
        holder.pop(key)
    elif kind == 1:
        holder[mutated_text(rng, key)] = holder.pop(key)
    elif kind == 2:
        holder[key] = hostile(rng)
    elif kind == 3:
        other = rng.choice(list(holder))
        holder[key], holder[other] = holder[other], holder[key]
    else:
        holder[key] = nudged(rng, holder[key])


def nudged(rng: Random, value: Any) -> Any:
    """A value of the same type, a little or much larger or smaller."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice((-1, 1, 10, -value, 2**31, 2**63, -(2**70)))
    if isinstance(value, float):
        return value * rng.choice((-1, 0, 1e-300, 1e300, 1.5, math.nan))
    if isinstance(value, str):
        return mutated_text(rng, value)
    return hostile(rng)


def mutated_text(rng: Random, text: str) -> str:
    if not text or rng.random() < 0.2:
        return rng.choice(HOSTILE_TEXTS)
    at = rng.randrange(len(text))
    kind = rng.randrange(5)
    if kind == 0:
        return text[:at] + text[at + 1 :]
    if kind == 1:
        return text[:at] + rng.choice(HOSTILE_TEXTS) + text[at:]
    if kind == 2:
        return text[:at] + chr(ord(text[at]) ^ (1 << rng.randrange(7))) + text[at + 1 :]
    if kind == 3:
        return text[:at]
    return text + text[at:]


def mutated_bytes(rng: Random, content: bytes, times: int = 1) -> bytes:
    """Flipped bits, cuts, holes, repetitions, foreign bytes: what disks and editors do."""
    found = bytearray(content)
    for _ in range(times):
        at = rng.randrange(len(found)) if found else 0
        kind = rng.randrange(7)
        if kind <= 2 and found:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 3:
            del found[at:]
        elif kind == 4:
            found[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 5:
            del found[at : at + rng.randrange(1, 17)]
        else:
            found[at : at + 8] = bytes(8) if rng.random() < 0.5 else b"\xff" * 8
    return bytes(found)
