"""JSON as this program writes it, and nothing else that Python's own reader lets pass."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

DEEPEST = 40
"""Lists and objects inside of each other; no document of this program comes near."""


def read(text: str | bytes) -> Any:
    """Read JSON, or raise ValueError.

    Refused as well as what is no JSON: NaN and infinities, also as numbers that overflow to them; whole numbers of
    thousands of digits; a key that is there twice, of which one would be lost; text that is not Unicode; nesting that
    would exhaust the stack of the next reader.

    >>> read('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        value = json.loads(
            text, parse_float=_require_finite, parse_constant=_require_finite, object_pairs_hook=require_distinct_keys
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _require_shallow(value)
    return value


def _require_finite(digits: str) -> float:
    number = float(digits)
    if not isfinite(number):
        raise ValueError(f"{digits} is not a finite number")
    return number


def require_distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key is there twice")
    return content


def _require_shallow(value: Any) -> None:
    """Check the value level by level, since a recursion would fail on what it is to refuse."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.keys()
                inner += one.values()
            elif isinstance(one, list):
                inner += one
            elif isinstance(one, str) and not one.isascii():
                one.encode("utf-8")  # a lone half of a surrogate pair raises UnicodeEncodeError, a ValueError
        level = inner
