"""Norm balls intersected with the input range: projections, steepest steps and random points.

Every operation respects the range: most pixels of a digit lie at its ends, so a step or a projection that ignores it
wastes most of its length. Results are feasible up to rounding; `Ball.make_feasible` ensures it in float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.errors import ModelError
from stobatch.types import Norm, Radius

Size = Tensor | float
"""A radius or a step size: one for all examples, or one for each in a shape that broadcasts with them."""

_FILLING_ROUNDS = 12
"""Rounds of water filling; each saturates at least one more value or ends. Too few only leave some length unused."""
_BISECTIONS = 40
_LARGEST_SCALE = 1e18
_LARGEST_OVERSHOOT = 1e9
"""How many times its size an l2 step may leave the range before it is projected."""


@dataclass(frozen=True)
class Ball:
    """The points within a radius of each centre that also lie in the input range.

    `lower` and `upper` are the ends of the range, for l-infinity already intersected with the ball. `sizes` gives every
    centre a radius of its own, in float64; `radius` then holds their unit and the largest of them.

    **Guarantee.** `make_feasible` returns points in the range whose distance, computed in float64, is at most the
    radius; it raises if it cannot.
    """

    centre: Tensor
    lower: Tensor
    upper: Tensor
    radius: Radius
    sizes: Tensor | None = None

    @classmethod
    def around(cls, centre: Tensor, radius: Radius, *, shift: Tensor | None = None) -> Ball:
        """Return the balls of one radius; `shift` moves the input range, for centres that carry a fixed noise."""
        low: Tensor | float = radius.range.low if shift is None else radius.range.low + shift
        high: Tensor | float = radius.range.high if shift is None else radius.range.high + shift
        lower, upper = (torch.as_tensor(end, dtype=centre.dtype, device=centre.device) for end in (low, high))
        if radius.norm is Norm.LINF:
            # Ball and range intersect in one box: projecting is one clamp.
            lower, upper = torch.maximum(centre - radius.size, lower), torch.minimum(centre + radius.size, upper)
        return cls(centre, lower, upper, radius)

    @classmethod
    def around_each(cls, centre: Tensor, sizes: Tensor, unit: Radius) -> Ball:
        """Return balls with a radius for each centre; of `unit` only norm and range are used."""
        sizes = sizes.to(device=centre.device, dtype=torch.float64)
        ball = replace(cls.around(centre, Radius(float(sizes.max()), unit.norm, unit.range)), sizes=sizes)
        if unit.norm is not Norm.LINF:
            return ball
        size = ball.size_for(centre)
        lower, upper = torch.maximum(ball.lower, centre - size), torch.minimum(ball.upper, centre + size)
        return replace(ball, lower=lower, upper=upper)

    @property
    def geometry(self) -> Geometry:
        return GEOMETRIES[self.radius.norm]

    def part(self, which: slice | Tensor) -> Ball:
        """Return the balls around some of the centres."""
        lower, upper = (end[which] if end.shape == self.centre.shape else end for end in (self.lower, self.upper))
        return Ball(self.centre[which], lower, upper, self.radius, None if self.sizes is None else self.sizes[which])

    def size_for(self, like: Tensor) -> Size:
        """Return the radius: one for all examples, or one for each, broadcast to `like` in its precision."""
        return self.radius.size if self.sizes is None else per_example(self.sizes, like).to(like)

    def project(self, points: Tensor) -> Tensor:
        """Return the nearest points of the ball."""
        return self.geometry.project(self, points)

    def ascend(self, points: Tensor, gradient: Tensor, size: Size) -> Tensor:
        """Return the points after a steepest-ascent step of the given size, projected into the ball."""
        return self.geometry.ascend(self, points, gradient, size)

    def random_offsets(self, count: int, generator: torch.Generator) -> Tensor:
        """Return uniform points of `count` unit balls, drawn on the CPU so that they do not depend on the device."""
        return self.geometry.random(torch.Size((count, *self.centre.shape[1:])), generator)

    def at(self, offsets: Tensor | None) -> Tensor:
        """Return centre + radius · offset of each ball, projected; the centres if there are no offsets."""
        if offsets is None:
            return self.centre.clone()
        if self.centre.is_cuda and offsets.is_cpu:
            # A copy from pinned memory is asynchronous.
            offsets = offsets.pin_memory()
        offsets = offsets.to(self.centre, non_blocking=True)
        return self.project(self.centre + self.size_for(offsets) * offsets)

    def distance(self, points: Tensor) -> Tensor:
        """Return the distance of each point from its centre, in float64."""
        return self.geometry.length(points.double() - self.centre.double())

    def make_feasible(self, points: Tensor) -> Tensor:
        """Return the same points, moved by rounding errors at most, such that all are inside; raise if that fails."""
        points = self.geometry.round_inwards(self, torch.clamp(points, self.lower, self.upper))
        for attempt in range(8):
            # Not `distance > size`: NaN has to count as outside.
            distance = self.distance(points)
            outside = per_example(~(distance <= self.size_for(distance)), points)
            if not bool(outside.any()):
                return points
            slack = 4.0**attempt * torch.finfo(points.dtype).eps
            points = torch.where(outside, self.geometry.tighten(self, points, slack), points)
        raise ModelError(
            f"an attack ended outside its ball ({self.radius}).",
            why="The radius is below the precision of the points, or a point is NaN.",
            remedy="Use a larger radius, or float64.",
        )


class Geometry(ABC):
    """The geometry of one norm."""

    path_length = 1.0
    """How far, in radii, small steepest steps may have to go to reach the best point of the ball."""

    @abstractmethod
    def length(self, offset: Tensor) -> Tensor:
        """Return the norm of each example's offset from its centre."""

    @abstractmethod
    def project(self, ball: Ball, points: Tensor) -> Tensor:
        """Return the nearest points of ball and range."""

    @abstractmethod
    def ascend(self, ball: Ball, points: Tensor, gradient: Tensor, size: Size) -> Tensor:
        """Return the points after a steepest step of this size, projected."""

    @abstractmethod
    def random(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return offsets uniformly distributed over the unit ball."""

    def round_inwards(self, ball: Ball, points: Tensor) -> Tensor:
        """Return the points, some of those that rounding put outside moved as `tighten` moves them; may do nothing.

        A first and cheap correction, whose result is checked like any other.
        """
        return points

    @abstractmethod
    def tighten(self, ball: Ball, points: Tensor, slack: float) -> Tensor:
        """Return points that rounding put outside, moved towards their centres, by a share `slack` where that helps."""


@final
class MaxNorm(Geometry):
    """l-infinity: values move independently, within the intersection of ball and range, which is a box."""

    def length(self, offset: Tensor) -> Tensor:
        return offset.abs().flatten(1).amax(1)

    def project(self, ball: Ball, points: Tensor) -> Tensor:
        return torch.clamp(points, ball.lower, ball.upper)

    def ascend(self, ball: Ball, points: Tensor, gradient: Tensor, size: Size) -> Tensor:
        step = gradient.sign()
        # A sign times a size is exact, so both ways round once.
        moved = step.mul_(size).add_(points) if isinstance(size, Tensor) else torch.add(points, step, alpha=size)
        return moved.clamp_(ball.lower, ball.upper)

    def round_inwards(self, ball: Ball, points: Tensor) -> Tensor:
        """Move values that float32 knows to be outside to their neighbours, which is where `tighten` puts them.

        Rounding preserves order: a difference that rounds to more than the rounded radius is more than the radius.
        Steps as long as the radius end a rounding error outside in half of their values, and float64, which finds all
        of them, needs four times the memory traffic.
        """
        if points.dtype != torch.float32 or ball.sizes is not None:
            return points
        # The offset where it is too large, else 0; `where` would take as long as all of this.
        too_large = F.hardshrink(points - ball.centre, ball.radius.size)
        return torch.nextafter(points, points - too_large)

    def random(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=generator) * 2 - 1

    def tighten(self, ball: Ball, points: Tensor, slack: float) -> Tensor:
        centre = ball.centre.double()
        size = ball.size_for(centre)
        nearest = points.double().clamp(centre - size, centre + size).to(points.dtype)
        too_far = (nearest.double() - centre).abs() > size
        return torch.where(too_far, torch.nextafter(nearest, ball.centre), nearest)


class _Coupled(Geometry):
    """A norm that couples the values of an example. `low` <= 0 <= `high` bound the offset: they come from the range."""

    @abstractmethod
    def shrink(self, offset: Tensor, low: Tensor, high: Tensor, size: Size) -> Tensor:
        """Return the nearest offset in [low, high] whose length is `size`, for clamped offsets that are longer."""

    @abstractmethod
    def steepest(self, gradient: Tensor, low: Tensor, high: Tensor, size: Size) -> Tensor:
        """Return argmax ⟨gradient, offset⟩ over offsets in [low, high] of length at most `size`."""

    def project(self, ball: Ball, points: Tensor) -> Tensor:
        offset, low, high = points - ball.centre, ball.lower - ball.centre, ball.upper - ball.centre
        inside, size = offset.clamp(low, high), ball.size_for(offset)
        fits = per_example(self.length(inside), offset) <= size
        return ball.centre + torch.where(fits, inside, self.shrink(offset, low, high, size))

    def tighten(self, ball: Ball, points: Tensor, slack: float) -> Tensor:
        centre = ball.centre.double()
        offset = points.double() - centre
        length = self.length(offset)
        scaled = offset * per_example((ball.size_for(length) / length).clamp(max=1) * (1 - slack), offset)
        nearest = (centre + scaled).to(points.dtype)
        # Rounding to nearest can lengthen every value of a tiny offset; rounding towards the centre cannot.
        too_far = (nearest.double() - centre).abs() > scaled.abs()
        return torch.where(too_far, torch.nextafter(nearest, ball.centre), nearest)


@final
class Euclidean(_Coupled):
    """l2."""

    # A path along the faces of the range is longer than the distance of its end.
    path_length = 2.0

    def length(self, offset: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(offset.flatten(1), dim=1)
        return length

    def shrink(self, offset: Tensor, low: Tensor, high: Tensor, size: Size) -> Tensor:
        # With a Lagrange multiplier λ >= 0 for the ball, the nearest point of ball and box solves, value by value,
        # min (o - offset)² + λ o² over [low, high]: it is clamp(offset / (1 + λ)). Its length decreases in λ, so it is
        # the point of the clamped ray t · offset, t = 1/(1 + λ), whose length is the radius. The linear problem of
        # `steepest` has solutions of the same form, clamp(t · gradient).
        return self.steepest(offset, low, high, size)

    def ascend(self, ball: Ball, points: Tensor, gradient: Tensor, size: Size) -> Tensor:
        """Step along the unclamped ray, which may leave the range, and project once.

        Clamping the step first would let the projection scale back saturated values too, and the best point of the ball
        would not be a fixed point.
        """
        ray = self._ray(gradient, ball.lower - points, ball.upper - points, size)
        longest = per_example(ray.abs().flatten(1).amax(1).clamp(min=torch.finfo(ray.dtype).tiny), ray)
        return self.project(ball, points + ray * (_LARGEST_OVERSHOOT * size / longest).clamp(max=1))

    def steepest(self, gradient: Tensor, low: Tensor, high: Tensor, size: Size) -> Tensor:
        return self._ray(gradient, low, high, size).clamp(low, high)

    def _ray(self, gradient: Tensor, low: Tensor, high: Tensor, size: Size) -> Tensor:
        """Return t · gradient for the t at which clamp(t · gradient, low, high) has length `size`, by water filling.

        Given the set F of clamped values, t² = (size² - Σ_F clamped²) / Σ_{not F} gradient². F starts empty and only
        grows, t with it; each round's clamped ray is at most `size` long, so stopping early is feasible.
        """
        tiny = torch.finfo(gradient.dtype).tiny
        unit = gradient / per_example(gradient.abs().flatten(1).amax(1).clamp(min=tiny), gradient)
        square = torch.as_tensor(size, dtype=unit.dtype, device=unit.device) ** 2
        ray, clamped, saturated = unit, torch.zeros_like(unit), torch.zeros_like(unit, dtype=torch.bool)
        for _ in range(_FILLING_ROUNDS):
            spent = per_example(torch.where(saturated, clamped, 0).square().flatten(1).sum(1), unit)
            free = per_example(torch.where(saturated, 0, unit).square().flatten(1).sum(1), unit)
            scale = ((square - spent).clamp(min=0) / free.clamp(min=tiny)).sqrt().clamp(max=_LARGEST_SCALE)
            ray = scale * unit
            clamped = ray.clamp(low, high)
            saturated = clamped != ray
        return ray

    def random(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        direction = torch.randn(shape, generator=generator)
        return _scale_into_ball(direction / per_example(self.length(direction), direction), generator)


@final
class SumNorm(_Coupled):
    """l1: the best point of a linear function spends the radius on the largest gradients, value after value."""

    # Every step goes straight to the best point of the linearised objective, but that point may change on the way.
    path_length = 2.0

    def length(self, offset: Tensor) -> Tensor:
        return offset.abs().flatten(1).sum(1)

    def shrink(self, offset: Tensor, low: Tensor, high: Tensor, size: Size) -> Tensor:
        """Soft-threshold and clamp; find the threshold by bisection, ending on the feasible side.

        With a Lagrange multiplier λ >= 0 for the ball, the nearest point solves, value by value,
        min (o - offset)²/2 + λ |o| over [low, high], which contains 0: soft thresholding by λ, then clamping.
        Its length decreases in λ.
        """
        enough = per_example(offset.abs().flatten(1).amax(1), offset)
        short = torch.zeros_like(enough)
        for _ in range(_BISECTIONS):
            middle = (short + enough) / 2
            feasible = per_example(self.length(_soft_threshold(offset, middle).clamp(low, high)), offset) <= size
            enough, short = torch.where(feasible, middle, enough), torch.where(feasible, short, middle)
        return _soft_threshold(offset, enough).clamp(low, high)

    def ascend(self, ball: Ball, points: Tensor, gradient: Tensor, size: Size) -> Tensor:
        """Step straight towards the ball's best point for the linearised objective, which needs no projection.

        A projected steepest step would lose: soft thresholding takes the same amount from every value, also from those
        with the largest gradients.
        """
        low, high = ball.lower - ball.centre, ball.upper - ball.centre
        best = ball.centre + self.steepest(gradient, low, high, ball.size_for(points))
        # Without a gradient there is no best point: stay.
        direction = torch.where(per_example(gradient.flatten(1).any(1), points), best - points, 0)
        share = size / per_example(self.length(direction).clamp(min=torch.finfo(direction.dtype).tiny), direction)
        return points + share.clamp(max=1) * direction

    def steepest(self, gradient: Tensor, low: Tensor, high: Tensor, size: Size) -> Tensor:
        # A linear function over box and l1 ball is a fractional knapsack: move values to their ends, the largest
        # gradient first, until the radius is spent. Values without gradient stay.
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
        # Exponential weights over their sum are uniform on the simplex.
        return _scale_into_ball(sign * weight / per_example(self.length(weight), weight), generator)


GEOMETRIES: dict[Norm, Geometry] = {Norm.LINF: MaxNorm(), Norm.L2: Euclidean(), Norm.L1: SumNorm()}


def per_example(values: Tensor, like: Tensor) -> Tensor:
    """Return one value for each example, in a shape that broadcasts with `like`."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _soft_threshold(values: Tensor, threshold: Tensor) -> Tensor:
    return values.sign() * (values.abs() - threshold).clamp(min=0)


def _scale_into_ball(direction: Tensor, generator: torch.Generator) -> Tensor:
    """Return uniform points of the unit ball from points of its sphere: a radius U^(1/d) in d dimensions."""
    share = torch.rand(len(direction), generator=generator) ** (1 / max(1, direction[0].numel()))
    return per_example(share, direction) * direction
