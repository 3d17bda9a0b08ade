"""Norm balls cut by the input range: where an attack may go, and its steepest step there.

Every operation knows the range: pixels of a digit sit at its ends, so a step or a projection that forgets it wastes
most of its length. All results are feasible by construction; `Ball.settle` checks it once more, in float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from stobatch.errors import ModelError
from stobatch.types import Norm, Radius

Size = Tensor | float
"""The length of a step: one for all examples, or one for each."""

_FILLING_ROUNDS = 12
"""Rounds of water filling; each saturates at least one more value or ends. Fewer only leave some length unused."""
_BISECTIONS = 40
_LONGEST_SCALE = 1e18
_FAR = 1e9
"""How many times its length a step may pass the range."""


@dataclass(frozen=True)
class Ball:
    """The points within a radius of each centre that also lie in the input range.

    `sizes` gives every centre a radius of its own, in float64; `radius` then says their unit and the largest of them.

    **Guarantee.** `settle` returns points whose distance, computed in float64, is at most the radius and which lie in
    the range; it raises if it cannot.
    """

    centre: Tensor
    lower: Tensor
    upper: Tensor
    radius: Radius
    sizes: Tensor | None = None

    @classmethod
    def around(cls, centre: Tensor, radius: Radius, *, shift: Tensor | None = None) -> Ball:
        """Return a ball in the input range; `shift` moves the range for inputs that already carry a fixed noise."""
        low: Tensor | float = radius.range.low if shift is None else radius.range.low + shift
        high: Tensor | float = radius.range.high if shift is None else radius.range.high + shift
        lower, upper = (torch.as_tensor(end, dtype=centre.dtype, device=centre.device) for end in (low, high))
        if radius.norm is Norm.LINF:
            # In this norm ball and range are one box, and projecting is one clamp.
            lower, upper = torch.maximum(centre - radius.size, lower), torch.minimum(centre + radius.size, upper)
        return cls(centre, lower, upper, radius)

    @classmethod
    def around_each(cls, centre: Tensor, sizes: Tensor, unit: Radius) -> Ball:
        """Return a ball of its own size around every centre; of `unit` only norm and range matter."""
        sizes = sizes.to(device=centre.device, dtype=torch.float64)
        ball = replace(cls.around(centre, Radius(float(sizes.max()), unit.norm, unit.range)), sizes=sizes)
        if unit.norm is not Norm.LINF:
            return ball
        own = ball.size_for(centre)
        lower, upper = torch.maximum(ball.lower, centre - own), torch.minimum(ball.upper, centre + own)
        return replace(ball, lower=lower, upper=upper)

    @property
    def geometry(self) -> Geometry:
        return GEOMETRIES[self.radius.norm]

    def part(self, which: slice | Tensor) -> Ball:
        """Return the balls around some of the centres."""
        lower, upper = (end[which] if end.shape == self.centre.shape else end for end in (self.lower, self.upper))
        return Ball(self.centre[which], lower, upper, self.radius, None if self.sizes is None else self.sizes[which])

    def size_for(self, like: Tensor) -> Size:
        """Return the radius: one for all, or one for each example in a shape and precision that combine with `like`."""
        return self.radius.size if self.sizes is None else per_example(self.sizes, like).to(like)

    def project(self, points: Tensor) -> Tensor:
        """Return the nearest points of the ball."""
        return self.geometry.project(self, points)

    def climb(self, points: Tensor, gradient: Tensor, size: Size) -> Tensor:
        """Return the steepest step of the given length from points of the ball, and back into the ball."""
        return self.geometry.climb(self, points, gradient, size)

    def random_offsets(self, count: int, generator: torch.Generator) -> Tensor:
        """Random points of `count` unit balls; drawn on the CPU, so that they do not depend on the device."""
        return self.geometry.random(torch.Size((count, *self.centre.shape[1:])), generator)

    def at(self, offsets: Tensor | None) -> Tensor:
        """Return the point of each ball at this offset in units of its radius; the centres without one."""
        if offsets is None:
            return self.centre.clone()
        if self.centre.is_cuda and offsets.is_cpu:
            # From pinned memory a copy waits for its turn on the GPU, and nobody waits for the copy.
            offsets = offsets.pin_memory()
        offsets = offsets.to(self.centre, non_blocking=True)
        return self.project(self.centre + self.size_for(offsets) * offsets)

    def distance(self, points: Tensor) -> Tensor:
        """Return how far each point is from its centre, in float64."""
        return self.geometry.length(points.double() - self.centre.double())

    def settle(self, points: Tensor) -> Tensor:
        """Return the same points, up to rounding, and certainly inside."""
        points = torch.minimum(torch.maximum(points, self.lower), self.upper)
        for attempt in range(8):
            # Not "further than": a distance that is not a number is outside, too.
            distance = self.distance(points)
            outside = per_example(~(distance <= self.size_for(distance)), points)
            if not bool(outside.any()):
                return points
            slack = 4.0**attempt * torch.finfo(points.dtype).eps
            points = torch.where(outside, self.geometry.tighten(self, points, slack), points)
        raise ModelError(
            f"an attack ended outside of its ball ({self.radius}).",
            why="The radius is smaller than the arithmetic resolves, or a point is not a number.",
            remedy="Use a larger radius, or float64.",
        )


class Geometry(ABC):
    """One norm."""

    path = 1.0
    """Radii that an attack must be able to walk to get anywhere in the ball by steps that never turn back."""

    @abstractmethod
    def length(self, offset: Tensor) -> Tensor:
        """Return the norm of each example's offset from its centre."""

    @abstractmethod
    def project(self, ball: Ball, points: Tensor) -> Tensor: ...

    @abstractmethod
    def climb(self, ball: Ball, points: Tensor, gradient: Tensor, size: Size) -> Tensor: ...

    @abstractmethod
    def random(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return offsets spread uniformly over the unit ball."""

    @abstractmethod
    def tighten(self, ball: Ball, points: Tensor, slack: float) -> Tensor:
        """Return points that rounding put too far out, moved towards their centre by a share `slack` where needed."""


@final
class MaxNorm(Geometry):
    """l-infinity: every value moves on its own, within the box that ball and range have in common."""

    def length(self, offset: Tensor) -> Tensor:
        return offset.abs().flatten(1).amax(1)

    def project(self, ball: Ball, points: Tensor) -> Tensor:
        return torch.clamp(points, ball.lower, ball.upper)

    def climb(self, ball: Ball, points: Tensor, gradient: Tensor, size: Size) -> Tensor:
        return gradient.sign().mul_(size).add_(points).clamp_(ball.lower, ball.upper)

    def random(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=generator) * 2 - 1

    def tighten(self, ball: Ball, points: Tensor, slack: float) -> Tensor:
        centre = ball.centre.double()
        size = ball.size_for(centre)
        nearest = points.double().clamp(centre - size, centre + size).to(points.dtype)
        too_far = (nearest.double() - centre).abs() > size
        return torch.where(too_far, torch.nextafter(nearest, ball.centre), nearest)


class _Coupled(Geometry):
    """A norm in which one value's offset leaves less for the others. `low` and `high` are the room in the range."""

    @abstractmethod
    def shrink(self, offset: Tensor, low: Tensor, high: Tensor, size: Size) -> Tensor:
        """Return the nearest offset within the room whose length is the size, for offsets that are longer."""

    @abstractmethod
    def steepest(self, gradient: Tensor, low: Tensor, high: Tensor, size: Size) -> Tensor:
        """Return the offset up to that length, within the room, that gains most along the gradient."""

    def project(self, ball: Ball, points: Tensor) -> Tensor:
        offset, low, high = points - ball.centre, ball.lower - ball.centre, ball.upper - ball.centre
        inside, size = offset.clamp(low, high), ball.size_for(offset)
        fits = per_example(self.length(inside), offset) <= size
        return ball.centre + torch.where(fits, inside, self.shrink(offset, low, high, size))

    def tighten(self, ball: Ball, points: Tensor, slack: float) -> Tensor:
        centre = ball.centre.double()
        offset = points.double() - centre
        length = self.length(offset)
        wanted = offset * per_example((ball.size_for(length) / length).clamp(max=1) * (1 - slack), offset)
        nearest = (centre + wanted).to(points.dtype)
        # Rounding to nearest can lengthen every value of a tiny offset; rounding towards the centre cannot.
        too_far = (nearest.double() - centre).abs() > wanted.abs()
        return torch.where(too_far, torch.nextafter(nearest, ball.centre), nearest)


@final
class Euclidean(_Coupled):
    """l2."""

    # Along the faces of the range the way is longer than its end is far.
    path = 2.0

    def length(self, offset: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(offset.flatten(1), dim=1)
        return length

    def shrink(self, offset: Tensor, low: Tensor, high: Tensor, size: Size) -> Tensor:
        # With a multiplier λ >= 0 of the ball, the nearest point of ball and box solves value by value
        # min (o - offset)² + λ o² over [low, high]: it is clamp(offset / (1 + λ)). Its length falls with λ, so it is
        # the point of the clamped ray t · offset whose length is the radius.
        return self.steepest(offset, low, high, size)

    def climb(self, ball: Ball, points: Tensor, gradient: Tensor, size: Size) -> Tensor:
        """Past the range where the gradient says so: the projection then shortens the other values, not these.

        A step that stops at the range would have all values scaled back, and the best point would not stay put.
        """
        ray = self._ray(gradient, ball.lower - points, ball.upper - points, size)
        longest = per_example(ray.abs().flatten(1).amax(1).clamp(min=torch.finfo(ray.dtype).tiny), ray)
        return self.project(ball, points + ray * (_FAR * size / longest).clamp(max=1))

    def steepest(self, gradient: Tensor, low: Tensor, high: Tensor, size: Size) -> Tensor:
        return self._ray(gradient, low, high, size).clamp(low, high)

    def _ray(self, gradient: Tensor, low: Tensor, high: Tensor, size: Size) -> Tensor:
        """t · gradient for the t at which its part within the room has the given length, by water filling.

        t grows from what would be right without the room, so the part of every round is short enough.
        """
        tiny = torch.finfo(gradient.dtype).tiny
        unit = gradient / per_example(gradient.abs().flatten(1).amax(1).clamp(min=tiny), gradient)
        square = torch.as_tensor(size, dtype=unit.dtype, device=unit.device) ** 2
        ahead, filled, full = unit, torch.zeros_like(unit), torch.zeros_like(unit, dtype=torch.bool)
        for _ in range(_FILLING_ROUNDS):
            spent = per_example(torch.where(full, filled, 0).square().flatten(1).sum(1), unit)
            slope = per_example(torch.where(full, 0, unit).square().flatten(1).sum(1), unit)
            scale = ((square - spent).clamp(min=0) / slope.clamp(min=tiny)).sqrt().clamp(max=_LONGEST_SCALE)
            ahead = scale * unit
            filled = ahead.clamp(low, high)
            full = filled != ahead
        return ahead

    def random(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        direction = torch.randn(shape, generator=generator)
        return _into_the_ball(direction / per_example(self.length(direction), direction), generator)


@final
class SumNorm(_Coupled):
    """l1: the best point spends the radius where the gradient is largest, value after value."""

    # Every step goes straight, but the best point may change on the way.
    path = 2.0

    def length(self, offset: Tensor) -> Tensor:
        return offset.abs().flatten(1).sum(1)

    def shrink(self, offset: Tensor, low: Tensor, high: Tensor, size: Size) -> Tensor:
        """Soft thresholding, clamped to the room; the threshold by bisection, ending on the feasible side.

        With a multiplier λ >= 0 of the ball, the nearest point solves value by value min (o - offset)² / 2 + λ |o| over
        the room, which contains 0: soft thresholding by λ, then clamping. Its length falls with λ.
        """
        enough = per_example(offset.abs().flatten(1).amax(1), offset)
        short = torch.zeros_like(enough)
        for _ in range(_BISECTIONS):
            middle = (short + enough) / 2
            feasible = per_example(self.length(_soft(offset, middle).clamp(low, high)), offset) <= size
            enough, short = torch.where(feasible, middle, enough), torch.where(feasible, short, middle)
        return _soft(offset, enough).clamp(low, high)

    def climb(self, ball: Ball, points: Tensor, gradient: Tensor, size: Size) -> Tensor:
        """Straight towards the best point of the ball, which needs no projection.

        Soft thresholding would take as much from the values that gain most as from all others.
        """
        low, high = ball.lower - ball.centre, ball.upper - ball.centre
        best = ball.centre + self.steepest(gradient, low, high, ball.size_for(points))
        way = torch.where(per_example(gradient.flatten(1).any(1), points), best - points, 0)
        share = size / per_example(self.length(way).clamp(min=torch.finfo(way.dtype).tiny), way)
        return points + share.clamp(max=1) * way

    def steepest(self, gradient: Tensor, low: Tensor, high: Tensor, size: Size) -> Tensor:
        # A linear function over box and l1 ball: fill values to the end of their room, steepest first, until the radius
        # is spent. Values without slope get nothing.
        slope = gradient.abs().flatten(1)
        room = torch.where(gradient > 0, high, -low).flatten(1) * (slope > 0)
        order = slope.argsort(1, descending=True)
        room = room.gather(1, order)
        budget = torch.as_tensor(size, dtype=gradient.dtype, device=gradient.device).reshape(-1, 1)
        spent = torch.minimum((budget - (room.cumsum(1) - room)).clamp(min=0), room)
        amount = torch.zeros_like(slope).scatter_(1, order, spent)
        return amount.reshape(gradient.shape) * gradient.sign()

    def random(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        weight = torch.empty(shape).exponential_(generator=generator)
        return _into_the_ball(sign * weight / per_example(self.length(weight), weight), generator)


GEOMETRIES: dict[Norm, Geometry] = {Norm.LINF: MaxNorm(), Norm.L2: Euclidean(), Norm.L1: SumNorm()}


def per_example(values: Tensor, like: Tensor) -> Tensor:
    """Return one value for each example, in a shape that combines with the examples themselves."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _soft(values: Tensor, threshold: Tensor) -> Tensor:
    return values.sign() * (values.abs() - threshold).clamp(min=0)


def _into_the_ball(direction: Tensor, generator: torch.Generator) -> Tensor:
    """From the sphere into the ball, uniformly."""
    share = torch.rand(len(direction), generator=generator) ** (1 / max(1, direction[0].numel()))
    return per_example(share, direction) * direction
