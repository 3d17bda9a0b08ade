"""`add_noise`: Gaussian noise drawn exactly, as an ideal normal number rounded to a grid (docs/guarantees/noise.md).

Floating-point noise is not ideal: its low bits depend on its size, and they show in a sum rounded after the noise was
added (Mironov, 2012). On a grid that is fixed beforehand they cannot. If s is a multiple of the step, then
s + round(Z) = round(s + Z), a function of the ideal release s + Z alone. (Halves are always rounded up: rounding them
to even does not commute with shifts.)

round(Z) is computed in float64 with a bound on its error. Where the bound does not decide which multiple is nearest,
about 3 times in 100,000 draws, interval arithmetic computes it from more and more random bits until it is certain. So
the draw depends on the stream alone, not on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stobatch.errors import SettingError
from stobatch.seeds import BLOCK, Seeds, Stream

FINEST, COARSEST = 2.0**-60, 2.0**-24
"""Steps of grids on which sums are exact (`training/exact_sum.py`)."""
_STEPS_PER_DEVIATION = 32
"""The standard deviation of the noise is from 2³² to 2³³ steps."""
_MOST_STEPS = 2.0**49
"""The largest standard deviation in steps: every multiple that is ever drawn is then a float64."""
_RELATIVE_ERROR = 2.0**-48
"""Bound on the error of R cos θ in float64, in units of R, without that of U in R; 23 · 2⁻⁵³ would suffice."""
_WORD = 64


@dataclass(frozen=True)
class Grid:
    """The step that sums are rounded to multiples of, a power of two, and a factor that is applied afterwards.

    >>> Grid.for_noise(1.0).step == 2.0**-32
    True
    """

    step: float
    scale: float = 1.0

    @classmethod
    def for_noise(cls, stddev: float, scale: float = 1.0) -> Grid:
        """Return the grid for noise of a planned standard deviation: its step is 2⁻³² to 2⁻³³ of it."""
        if not stddev > 0:
            return cls(FINEST, scale)
        step = 2.0 ** (math.frexp(stddev)[1] - 1 - _STEPS_PER_DEVIATION)
        return cls(min(max(step, FINEST), COARSEST), scale)


def add_noise(
    sums: Mapping[str, Tensor], stddev: float, stream: Stream | None = None, grid: Grid | None = None
) -> dict[str, Tensor]:
    """Add N(0, stddev²) to every value of the sums: the end of every private training step.

    Without a stream the random bits are secret, from the operating system. A step on several devices sums its parts
    exactly, on the same grid; one device adds the noise to its own part, and the order of parts does not matter.

    **Guarantee.** Let s be a sum, rounded to the grid before any noise is drawn. With ideal bits, the result is a
    function of round(s + Z), Z ~ N(0, stddev²) for each value: post-processing of the ideal Gaussian mechanism on s.
    Rounding may move two sums of d values apart by √d·step, so a sensitivity of C becomes C + √d·step, about a
    millionth more: `ClippedGradients.noise_stddev` adds noise for it, the sound method clips to less. Nothing is
    promised where others know the stream's key.

    >>> sums = {"weight": torch.tensor([0.3, -2.0])}
    >>> noise = Stream(b"k" * 32)
    >>> bool((add_noise(sums, 1.0, noise)["weight"] - sums["weight"]).abs().max() > 0.1)
    True
    """
    # Whoever hands over a stream may ask for no noise, as experiments do; nobody gets it by mistake.
    if not (0 < stddev < math.inf or (stddev == 0 and stream is not None)):
        raise SettingError(
            f"stddev={stddev} is not a positive number.", remedy="Give the noise multiplier times the clipping norm."
        )
    stream = Seeds.secret().stream("noise") if stream is None else stream
    step = (Grid.for_noise(stddev) if grid is None else grid).step
    sizes = [value.numel() for value in sums.values()]
    noises = torch.split(torch.from_numpy(rounded_normal(stream, sum(sizes), stddev, step)), sizes)
    return {
        # The float64 sum is a function of the exact one, and so is its conversion to a shorter format.
        name: (_round_to_grid(value, step) + noise.view(value.shape).to(value.device)).to(value.dtype)
        for (name, value), noise in zip(sums.items(), noises, strict=True)
    }


def _round_to_grid(values: Tensor, step: float) -> Tensor:
    """Return the nearest multiples of the step in float64; scaling by a power of two is exact."""
    return (values.detach().to(torch.float64) / step).round_().mul_(step)


def rounded_normal(stream: Stream, count: int, stddev: float, step: float) -> NDArray[np.float64]:
    """Draw `count` independent normal numbers of this standard deviation, each rounded to a multiple of `step`.

    **Guarantee.** With ideal bits in the stream the distribution is exactly that of round(Z/step)·step,
    Z ~ N(0, stddev²). Assumes that NumPy's float64 log, sin and cos err by at most 2⁻⁵⁰ of their result (it states at
    most 4 ulp).

    >>> drawn = rounded_normal(Stream(b"k" * 32), 3, 1.0, 0.25)
    >>> bool((drawn / 0.25 == np.rint(drawn / 0.25)).all())
    True
    """
    drawn = np.empty(count)
    if not stddev or not count:
        drawn.fill(0.0)
        return drawn
    ratio = stddev / step
    if not ratio <= _MOST_STEPS:
        raise ValueError(f"noise of {ratio:.3g} steps has multiples that float64 does not have")
    for number, words in enumerate(stream.blocks(count + count % 2)):
        nearest, undecided = _round_fast(words, ratio)
        for index in undecided.tolist():
            nearest[index] = round_exactly(stream, number, words, ratio, index)
        start = BLOCK * number
        drawn[start : start + len(words)] = nearest[: count - start]
    drawn *= step
    return drawn


def _round_fast(words: NDArray[np.uint64], ratio: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the nearest integers to ratio·R cos θ and ratio·R sin θ (Box and Muller), and where they are undecided.

    The first half of the words are the leading bits of U in R = √(-2 ln U), the others those of θ/π in [-1, 1).
    """
    half = len(words) // 2
    uniform = words[:half].astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-64
    with np.errstate(divide="ignore", over="ignore"):
        radius = np.log(uniform)
        radius *= -2
        radius = np.sqrt(np.abs(radius, out=radius), out=radius)
        # U has a relative rounding error of 2⁻⁵² and an absolute one of 2⁻⁶⁵ from its unseen bits. As R² = -2 ln U, an
        # error d of ln U moves R by at most 2d/R; the factor 1.25 in 2.5 covers the curvature of the logarithm.
        error = np.divide(2.5 * 2.0**-65, uniform, out=uniform)
        error += 2.5 * 2.0**-52
        error /= radius
        radius *= ratio
        error *= ratio
        error += radius * _RELATIVE_ERROR
    angle = words[half:].view(np.int64).astype(np.float64)
    angle *= math.pi * 2.0**-63
    values = np.empty((2, half))
    np.cos(angle, out=values[0])
    np.sin(angle, out=values[1])
    values *= radius
    nearest = np.rint(values)
    # The distance to the next half, in place: decided where it exceeds the error. NaN has to count as undecided.
    values -= nearest
    np.abs(values, out=values)
    distance = np.subtract(0.5, values, out=values)
    return nearest.reshape(-1), np.flatnonzero(~(distance > error))


def round_exactly(stream: Stream, block: int, words: NDArray[np.uint64], ratio: float, index: int) -> float:
    """Return the nearest integer at one index of a block, by interval arithmetic from as many bits as it takes."""
    half = len(words) // 2
    positions = (index % half, index % half + half)
    leading = int(words[positions[0]]), int(words.view(np.int64)[positions[1]])
    more = 0
    while True:
        uniform, turn = (
            (word << _WORD * more) + (stream.further_bits(BLOCK * block + position, more) if more else 0)
            for word, position in zip(leading, positions, strict=True)
        )
        low, high = _bounds(uniform, turn, _WORD * (1 + more), ratio, sine=index >= half)
        if low == high:
            return float(low)
        more += 1


def _bounds(of_radius: int, of_angle: int, bits: int, ratio: float, *, sine: bool) -> tuple[int, int]:
    """Return the nearest integers to both ends of an interval around ratio·R cos θ, given leading bits of U and θ."""
    if of_radius == 0:
        return -1, 1  # U may be arbitrarily small: undecided
    from mpmath.libmp import to_int

    interval = _interval_arithmetic()
    interval.prec = bits + 64
    uniform = interval.mpf([of_radius, of_radius + 1]) / interval.mpf(2) ** bits
    turn = interval.mpf([of_angle, of_angle + 1]) / interval.mpf(2) ** (bits - 1)
    radius = interval.sqrt(-2 * interval.log(uniform))
    angle = interval.pi * turn
    # Nearest with halves up: the floor of the value plus a half.
    value = radius * (interval.sin(angle) if sine else interval.cos(angle)) * ratio + interval.mpf(0.5)
    low, high = (to_int(end, "f") for end in value._mpi_)
    return int(low), int(high)


@cache
def _interval_arithmetic() -> Any:
    """Return mpmath's intervals, imported at the first draw that needs them: most commands draw none."""
    from mpmath.ctx_iv import MPIntervalContext

    return MPIntervalContext()


def laplace(shape: tuple[int, ...], scale: float, generator: torch.Generator) -> Tensor:
    """Return independent draws of Lap(scale), computed in float64, returned in float32."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64).sub_(0.5)
    # -log1p(-2|u|) is exponential; u = -1/2 can occur and would give an infinity, so it moves by one float.
    size = uniform.abs().clamp_(max=0.5 - 2**-54).mul_(-2).log1p_().mul_(-scale)
    return size.copysign_(uniform).float()
