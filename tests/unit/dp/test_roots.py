"""Roots have the bits of SciPy's: recorded noise multipliers are such roots, and are compared to the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from stobatch.dp.roots import brentq

numbers = st.floats(-4, 4, allow_subnormal=False)
Shape = Callable[[float, float, float], float]

SHAPES: dict[str, Shape] = {
    "cubic": lambda x, a, b: a + b * x + x**3,
    "steep": lambda x, a, b: math.atan(1000 * a * (x - b)),
    "exponential": lambda x, a, b: math.exp(a * x) - b,
    "flat at one end": lambda x, a, b: max(a * (x - b), -1e-3),
    "flat at both ends, as the accountant's": lambda x, a, b: math.log(min(max(math.exp(a * x + b), 1e-2), 1e2)),
    "so small that products vanish": lambda x, a, b: 1e-200 * (a + b * x + x**3),
}


def root_or_error(find: Callable[..., float], *given: object, **named: float) -> float | type[Exception]:
    try:
        return find(*given, **named)
    except (ValueError, RuntimeError) as error:
        return type(error)


@settings(max_examples=300)
@given(st.sampled_from(sorted(SHAPES)), numbers, numbers, numbers, numbers, st.floats(-15, -2), st.floats(-15, -5))
def test_every_root_and_every_refusal_is_scipys(
    shape: str, a: float, b: float, low: float, high: float, xtol: float, rtol: float
) -> None:
    arguments = (lambda x: SHAPES[shape](x, a, b), low, high)
    tolerances = {"xtol": 10**xtol, "rtol": 10**rtol}
    assert root_or_error(brentq, *arguments, **tolerances) == root_or_error(optimize.brentq, *arguments, **tolerances)


def test_tolerances_left_open_are_scipys() -> None:
    assert brentq(math.cos, 0, 3) == optimize.brentq(math.cos, 0, 3)


def test_what_has_no_root_is_refused() -> None:
    with pytest.raises(ValueError, match="same sign at 1 and at 2"):
        brentq(lambda x: x, 1, 2)
    with pytest.raises(ValueError, match="NaN at 1"):
        brentq(lambda x: math.nan, 1, 2)
    with pytest.raises(RuntimeError, match="no root after 100 steps"):
        brentq(lambda x: 1 if x > 1 / 3 else -1, 0.0, 1e300, xtol=1e-300)
