"""Roots of functions of one number, bit for bit as `scipy.optimize.brentq` finds them.

Importing `scipy.optimize` takes more processor time than all roots of a plan or a report together. A recorded noise
multiplier is such a root and is compared when it is computed again, so its bits may not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_MOST_STEPS = 100


def brentq(
    function: Callable[[float], float], low: float, high: float, *, xtol: float = 2e-12, rtol: float = 2**-50
) -> float:
    """Return a root between two ends at which the signs differ, by Brent's method.

    **Guarantee.** The root is off by at most `xtol + rtol · |root|`, as far as the computed signs are right.

    >>> brentq(lambda x: x * x - 2, 0, 2)
    1.4142135623731364
    """
    before, now = float(low), float(high)
    f_before, f_now = _value(function, before), _value(function, now)
    if f_before == 0 or f_now == 0:
        return before if f_before == 0 else now
    if (f_before < 0) == (f_now < 0):
        raise ValueError(f"the function has the same sign at {low} and at {high}")
    across, f_across, last_step, step = before, f_before, now - before, now - before
    for _ in range(_MOST_STEPS):
        if (f_before < 0) != (f_now < 0):
            across, f_across = before, f_before
            last_step = step = now - before
        if abs(f_across) < abs(f_now):
            before, now, across = now, across, now
            f_before, f_now, f_across = f_now, f_across, f_now
        tolerance = (xtol + rtol * abs(now)) / 2
        half = (across - now) / 2
        if f_now == 0 or abs(half) < tolerance:
            return now
        trial = math.inf
        if abs(last_step) > tolerance and abs(f_now) < abs(f_before):
            trial = _interpolate((before, f_before), (now, f_now), (across, f_across))
        if 2 * abs(trial) < min(abs(last_step), 3 * abs(half) - tolerance):
            last_step, step = step, trial
        else:
            last_step = step = half
        before, f_before = now, f_now
        now += step if abs(step) > tolerance else math.copysign(tolerance, half)
        f_now = _value(function, now)
    raise RuntimeError(f"no root after {_MOST_STEPS} steps, the last at {now}")


Point = tuple[float, float]


def _interpolate(before: Point, now: Point, across: Point) -> float:
    """Return the step to the root of a line through two points or of an inverse parabola through three."""
    (x_before, f_before), (x_now, f_now), (x_across, f_across) = before, now, across
    if x_before == x_across:
        return -f_now * (x_now - x_before) / (f_now - f_before)
    slope = (f_before - f_now) / (x_before - x_now)
    slope_across = (f_across - f_now) / (x_across - x_now)
    # SciPy's order of operations: another one rounds differently.
    below = slope_across * slope * (f_across - f_before)
    return -f_now * (f_across * slope_across - f_before * slope) / below if below else math.inf


def _value(function: Callable[[float], float], x: float) -> float:
    value = float(function(x))
    if math.isnan(value):
        raise ValueError(f"the function is NaN at {x}")
    return value
