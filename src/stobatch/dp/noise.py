"""`add_noise`: Gaussian noise that is exactly an ideal normal number rounded to a grid (docs/guarantees/noise.md).

A normal number in floating point is not an ideal one: its low bits depend on its size, and a sum that was rounded after
noise was added shows them. On a grid that is fixed beforehand nothing of the kind is left. If s is a multiple of the
step, s + round(Z) = round(s + Z), a function of the ideal release s + Z alone. (Halves have to be rounded up, always:
rounding them to even does not commute with shifts.)

round(Z) is computed in float64 with a bound on all that float64 gets wrong. Where the bound leaves open which multiple
is nearest, once in some ten thousand draws, the same number is computed by interval arithmetic from more and more of
its random bits, until it is certain. So the draw depends on the stream alone, and not on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from mpmath.ctx_iv import MPIntervalContext
from mpmath.libmp import to_int
from numpy.typing import NDArray
from torch import Tensor

from stobatch.errors import SettingError
from stobatch.seeds import BLOCK, Seeds, Stream

FINEST, COARSEST = 2.0**-60, 2.0**-24
"""Steps of grids on which sums are exact (`training/exact_sum.py`)."""
_STEPS_PER_DEVIATION = 32
"""The standard deviation of the noise is from 2³² to 2³³ steps."""
_MOST_STEPS = 2.0**49
"""Of a standard deviation, so that every multiple that is ever drawn is a float64."""
_RELATIVE = 2.0**-48
"""What float64 gets wrong of R cos θ, in units of R, apart from R's own argument; 23 · 2⁻⁵³ would do."""
_WORD = 64
_INTERVALS = MPIntervalContext()


@dataclass(frozen=True)
class Grid:
    """What sums are rounded to, a power of two, and what they are multiplied with afterwards.

    >>> Grid.for_noise(1.0).step == 2.0**-32
    True
    """

    step: float
    scale: float = 1.0

    @classmethod
    def for_noise(cls, stddev: float, scale: float = 1.0) -> Grid:
        """Return the grid for noise of a planned standard deviation: its step hardly counts beside it."""
        if not stddev > 0:
            return cls(FINEST, scale)
        step = 2.0 ** (math.frexp(stddev)[1] - 1 - _STEPS_PER_DEVIATION)
        return cls(min(max(step, FINEST), COARSEST), scale)


def add_noise(
    sums: Mapping[str, Tensor], stddev: float, stream: Stream | None = None, grid: Grid | None = None
) -> dict[str, Tensor]:
    """Add N(0, stddev²) to every value of the sums: what a private step of training ends in.

    Without a stream the random bits are secret, from the operating system. A step on several devices sums its parts
    exactly, on the same grid; one device adds the noise to its own part, and the order of parts does not matter.

    **Guarantee.** Let s be a sum, rounded to the grid before any noise is drawn. With ideal bits, what is returned is a
    function of round(s + Z), Z ~ N(0, stddev²) for each value: it gives away no more than the ideal Gaussian mechanism
    does about s. Rounding may put √d steps more between two sums of d values, so those that differ by up to C count as
    differing by C + √d·step, a millionth more or so: `ClippedGradients.noise_stddev` pays for it in noise, the sound
    method in clipping. Nothing is promised where others know the stream's key.

    >>> sums = {"weight": torch.tensor([0.3, -2.0])}
    >>> noise = Stream(b"k" * 32)
    >>> bool((add_noise(sums, 1.0, noise)["weight"] - sums["weight"]).abs().max() > 0.1)
    True
    """
    if not 0 <= stddev < math.inf:
        raise SettingError(
            f"stddev={stddev} is not a positive number.", remedy="Give the noise multiplier times the clipping norm."
        )
    stream = Seeds.secret().stream("noise") if stream is None else stream
    step = (Grid.for_noise(stddev) if grid is None else grid).step
    sizes = [value.numel() for value in sums.values()]
    drawn = torch.split(torch.from_numpy(rounded_normal(stream, sum(sizes), stddev, step)), sizes)
    return {
        # One addition in float64 is a function of its exact result, and so is what a shorter format keeps of it.
        name: (_nearest(value, step) + noise.view(value.shape).to(value.device)).to(value.dtype)
        for (name, value), noise in zip(sums.items(), drawn, strict=True)
    }


def _nearest(values: Tensor, step: float) -> Tensor:
    """Return the nearest multiples of the step, in float64: a power of two, so that scaling by it rounds nothing."""
    return (values.detach().to(torch.float64) / step).round_().mul_(step)


def rounded_normal(stream: Stream, count: int, stddev: float, step: float) -> NDArray[np.float64]:
    """Draw `count` independent normal numbers of that standard deviation, each rounded to the nearest multiple of a
    power of two.

    **Guarantee.** With ideal bits in the stream the law is that of round(Z/step)·step, Z ~ N(0, stddev²), exactly.
    Assumes that NumPy's float64 log, sin and cos err by at most 2⁻⁵⁰ of their result (it states at most 4 ulp).

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
        nearest, unsure = _fast(words, ratio)
        for place in unsure.tolist():
            nearest[place] = certain(stream, number, words, ratio, place)
        start = BLOCK * number
        drawn[start : start + len(words)] = nearest[: count - start]
    drawn *= step
    return drawn


def _fast(words: NDArray[np.uint64], ratio: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the nearest integers to ratio·R cos θ and ratio·R sin θ (Box and Muller), and where that is not certain.

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
        # U is within 2⁻⁵² of itself by rounding, and within 2⁻⁶⁵ by its unseen bits. As R² = -2 ln U, an error d of
        # ln U moves R by at most 2d/R; 1.25 pays for the curvature of the logarithm.
        wrong = np.divide(2.5 * 2.0**-65, uniform, out=uniform)
        wrong += 2.5 * 2.0**-52
        wrong /= radius
        radius *= ratio
        wrong *= ratio
        wrong += radius * _RELATIVE
    angle = words[half:].view(np.int64).astype(np.float64)
    angle *= math.pi * 2.0**-63
    exact = np.empty((2, half))
    np.cos(angle, out=exact[0])
    np.sin(angle, out=exact[1])
    exact *= radius
    nearest = np.rint(exact)
    exact -= nearest
    np.abs(exact, out=exact)
    np.subtract(0.5, exact, out=exact)
    # Written so that what is not a number is unsure, too.
    return nearest.reshape(-1), np.flatnonzero(~(exact > wrong))


def certain(stream: Stream, block: int, words: NDArray[np.uint64], ratio: float, place: int) -> float:
    """Return the same nearest integer at one place of a block, from as many bits as it takes."""
    half = len(words) // 2
    positions = (place % half, place % half + half)
    leading = int(words[positions[0]]), int(words.view(np.int64)[positions[1]])
    more = 0
    while True:
        uniform, turn = (
            (word << _WORD * more) + (stream.further_bits(BLOCK * block + position, more) if more else 0)
            for word, position in zip(leading, positions, strict=True)
        )
        low, high = _bounds(uniform, turn, _WORD * (1 + more), ratio, sine=place >= half)
        if low == high:
            return float(low)
        more += 1


def _bounds(of_radius: int, of_angle: int, bits: int, ratio: float, *, sine: bool) -> tuple[int, int]:
    """Return the nearest integers to the ends of an interval that holds ratio·R cos θ, given the leading bits of U
    and θ.
    """
    if of_radius == 0:
        return -1, 1  # U may be as small as it likes
    arithmetic = _INTERVALS
    arithmetic.prec = bits + 64
    uniform = arithmetic.mpf([of_radius, of_radius + 1]) / arithmetic.mpf(2) ** bits
    turn = arithmetic.mpf([of_angle, of_angle + 1]) / arithmetic.mpf(2) ** (bits - 1)
    radius = arithmetic.sqrt(-2 * arithmetic.log(uniform))
    angle = arithmetic.pi * turn
    value = radius * (arithmetic.sin(angle) if sine else arithmetic.cos(angle)) * ratio + arithmetic.mpf(0.5)
    low, high = (to_int(end, "f") for end in value._mpi_)
    return int(low), int(high)


def laplace(shape: tuple[int, ...], scale: float, generator: torch.Generator) -> Tensor:
    """Independent draws of Lap(scale), in float64 from the generator, returned in float32."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64).sub_(0.5)
    # -log1p(-2|u|) is exponential; u = -1/2 can occur and would give an infinity, so it moves by one float.
    size = uniform.abs().clamp_(max=0.5 - 2**-54).mul_(-2).log1p_().mul_(-scale)
    return size.copysign_(uniform).float()
