"""Slow and independent answers in NumPy, and inputs that lie at the ends of their range as digits do."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stobatch.attacks import Ball
from stobatch.types import PAPER_RANGE, Norm, Radius

Floats = NDArray[np.float64]

NORMS = sorted(Norm)
SHAPES = [(7,), (1, 3, 4), (2, 3, 3)]
ROUNDING = 1e-14
"""What two orders of one sum in double precision may differ by."""


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_points(ball: Ball, generator: torch.Generator) -> Tensor:
    """One in each ball, as attacks that start at random take them."""
    return ball.at(ball.random_offsets(len(ball.centre), generator))


def digits(
    count: int, shape: tuple[int, ...] = (1, 4, 4), *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """In [-1, 1]: half of the values at the lower end, a few at the upper one, the rest anywhere."""
    values, kind = (torch.rand(count, *shape, generator=seeded(2 * seed + i), dtype=torch.float64) for i in range(2))
    return torch.where(kind < 0.5, -1.0, torch.where(kind > 0.9, 1.0, 2 * values - 1)).to(dtype)


def widest(norm: Norm, values: int) -> float:
    """The radius of a ball that holds the whole range, whatever its centre."""
    return {Norm.LINF: 2.0, Norm.L2: 2 * sqrt(values), Norm.L1: 2.0 * values}[norm]


def ball(centre: Tensor, norm: Norm, share: float) -> Ball:
    """A ball whose radius is a share of the widest."""
    return Ball.around(centre, Radius(share * widest(norm, centre[0].numel()), norm, PAPER_RANGE))


def rows(values: Tensor) -> Floats:
    return values.detach().flatten(1).double().numpy()


def length(offset: Floats, norm: Norm) -> float:
    return float(np.linalg.norm(offset, {Norm.LINF: np.inf, Norm.L2: 2, Norm.L1: 1}[norm]))


def best_offset(gradient: Floats, low: Floats, high: Floats, size: float, norm: Norm) -> Floats:
    """The maximiser of the inner product with the gradient among offsets in [low, high] up to that length."""
    if norm is Norm.LINF:
        return np.where(gradient > 0, np.minimum(high, size), np.where(gradient < 0, np.maximum(low, -size), 0.0))
    if norm is Norm.L1:
        return _fill_the_steepest(gradient, low, high, size)
    return _stretch(lambda factor: np.clip(factor * gradient, low, high), size)


def _fill_the_steepest(gradient: Floats, low: Floats, high: Floats, size: float) -> Floats:
    """A fractional knapsack: all items cost the same per unit, so the most valuable ones go first."""
    offset, left = np.zeros_like(gradient), size
    for index in np.argsort(-np.abs(gradient), kind="stable"):
        amount = min(left, high[index] if gradient[index] > 0 else -low[index]) if gradient[index] else 0.0
        offset[index], left = amount * np.sign(gradient[index]), left - amount
    return offset


def _stretch(curve: Callable[[float], Floats], size: float) -> Floats:
    """The last point of a curve of growing length that is not too long, by bisection of the logarithm."""
    short, long = -60.0, 60.0
    if length(curve(np.exp(long)), Norm.L2) <= size:
        return curve(np.exp(long))
    for _ in range(200):
        middle = (short + long) / 2
        short, long = (middle, long) if length(curve(np.exp(middle)), Norm.L2) <= size else (short, middle)
    return curve(np.exp(short))


def best_gains(around: Ball, gradient: Floats) -> Floats:
    """For each example: the most that an inner product with the gradient can grow in the ball."""
    return np.array(
        [
            gradient @ best_offset(gradient, -1 - centre, 1 - centre, around.radius.size, around.radius.norm)
            for centre in rows(around.centre)
        ]
    )


def excess(around: Ball, points: Tensor) -> float:
    """How far the furthest point is outside of its ball or of the range; not positive when all are inside."""
    offsets, size = rows(points) - rows(around.centre), around.radius.size
    too_far = max(length(offset, around.radius.norm) - size for offset in offsets)
    return max(too_far, float(np.abs(rows(points)).max()) - 1)
