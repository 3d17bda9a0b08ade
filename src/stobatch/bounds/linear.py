"""Bounds through a network one layer at a time: boxes forwards, linear lower bounds backwards.

What is bounded is the deployed function, a pass in float32, and not the real function that it approximates. A layer
of the deployed pass returns Wx + b + ρ for some rounding errors ρ, and whatever the order of its sums,
|ρ| <= γ (|W||x| + |b|) with γ = nu/(1 - nu), n = fan-in + 2, u = 2⁻²⁴. Boxes grow by that much at every layer, and a
linear bound with coefficients a loses |a|·|ρ| when it is pulled back through one.

The bounds are computed in float64, whose own errors obey the same law with u = 2⁻⁵³ and n the number of terms in any
sum over the layer. Both are added up in `Affine.allowance`; nothing else in these bounds is rounded the wrong way.

**Assumptions.** Sums of float32 products are accumulated in float32 or wider, in any order, with or without fused
multiply-add; subnormal numbers may be kept or flushed to zero; tanh is within 8 units in the last place. Excluded, and
refused as far as `bounds.arithmetic` can find out: TF32, half precision, and algorithms that are not sums of products
(Winograd, FFT).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

FLOAT32_UNIT = 2.0**-24
FLOAT64_UNIT = 2.0**-53
SMALLEST_NORMAL = 2.0**-126
LARGEST_SUM = 2.0**126
"""Sums of sizes beyond this might overflow in float32."""

SPARE_ROUNDINGS = 1024
"""Roundings in float64 that are paid for beyond those of the sums: products, conversions, additions of layers."""


def gamma(unit: float, roundings: int) -> float:
    """Return the relative error of a sum of products in which no term is rounded more than so many times."""
    return roundings * unit / (1 - roundings * unit) if roundings * unit < 1 else float("inf")


@dataclass(frozen=True)
class Box:
    """All values that one layer of the deployed pass can take, for each example: low <= value <= high.

    Both ends are examples x the layer's shape, in float64.
    Values that nothing is known about are NaN, and so is every bound derived from them.
    """

    low: Tensor
    high: Tensor

    @property
    def centre(self) -> Tensor:
        return (self.low + self.high) / 2

    @property
    def radius(self) -> Tensor:
        return (self.high - self.low) / 2

    @property
    def reach(self) -> Tensor:
        """The largest size of each value."""
        return torch.maximum(self.low.abs(), self.high.abs())

    def of(self, examples: Tensor | slice) -> Box:
        """Return the boxes of some examples."""
        return Box(self.low[examples], self.high[examples])

    def within(self, other: Box) -> Box:
        """Return what lies in both; values that nothing is known about in either are NaN."""
        return Box(torch.maximum(self.low, other.low), torch.minimum(self.high, other.high))

    def half(self, signs: Tensor) -> Box:
        """Return the part in which values are at least 0 where the sign is 1, and at most 0 where it is -1."""
        low, high = torch.where(signs > 0, 0.0, -torch.inf), torch.where(signs < 0, 0.0, torch.inf)
        return Box(torch.maximum(self.low, low), torch.minimum(self.high, high))


@dataclass(frozen=True)
class Rows:
    """Quantities with linear lower bounds: each is at least coefficients · layer + constant.

    Row p speaks of the example `owner[p]`, and holds for every pass that starts inside the box of that example.
    Coefficients are rows x the layer's shape, constants and owners one per row.
    """

    coefficients: Tensor
    constant: Tensor
    owner: Tensor

    def lowest(self, box: Box) -> Tensor:
        """Return the lower bounds over a box of the layer, with the rounding of these very sums taken off."""
        # min over the box of c·x is c·m - |c|·r, m its centre and r its radius. Computed, the two sums miss by at most
        # γ|c|·|m| and γ|c|·r, and |m| + r is the reach: a radius that is wider by γ · reach pays for both. n counts
        # every term four times, for the roundings of m, r and the wider radius.
        sums = gamma(FLOAT64_UNIT, 4 * box.low[0].numel() + SPARE_ROUNDINGS)
        radius = box.radius + sums * box.reach
        at_centre = _dot(self.coefficients, box.centre[self.owner])
        return self.constant + at_centre - _dot(self.coefficients.abs(), radius[self.owner]) - SMALLEST_NORMAL


def _dot(rows: Tensor, others: Tensor) -> Tensor:
    products: Tensor = torch.linalg.vecdot(rows.flatten(1), others.flatten(1))
    return products


LowerSlope = Callable[[Box, Tensor], Tensor]
"""The slope of the line below a ReLU whose sign is open, from its box and the slope of the chord above it."""

LOWER_SLOPES: dict[str, LowerSlope] = {
    "smaller area": lambda box, chord: (box.high > -box.low).double(),
    "chord": lambda box, chord: chord,
    "zero": lambda box, chord: torch.zeros_like(chord),
    "one": lambda box, chord: torch.ones_like(chord),
}
"""Every slope in [0, 1] is sound, so the best of several bounds is."""


class Step(ABC):
    """One layer, as a map of bounds."""

    @abstractmethod
    def forward(self, before: Box) -> Passed:
        """Return the box after the layer."""

    def backward(self, rows: Rows, passed: Passed, lower_slope: LowerSlope) -> Rows | None:
        """Return the same lower bounds in terms of the values before the layer; None where boxes are all there is."""
        return None


class Join(ABC):
    """One operation on several values, as a map of bounds."""

    @abstractmethod
    def join(self, parts: Sequence[Box]) -> tuple[Box, Tensor | None]:
        """Return the box after it, and how far it rounds."""

    @abstractmethod
    def split(self, coefficients: Tensor, parts: Sequence[Box]) -> list[Tensor]:
        """Return the coefficients of each of the values, from those of what it made of them."""


@dataclass(frozen=True)
class Passed:
    """What a forward pass of boxes leaves behind at one layer."""

    step: Step | Join
    before: Box
    after: Box
    rounding: Tensor | None = None
    """How far each value may lie from the real number that it stands for, given the values before."""
    inputs: tuple[int, ...] | None = None
    """Where in the trace its values come from, -1 for the network's input; None for the layer before."""
    parts: tuple[Box, ...] = ()
    """All boxes that a join was given; `before` is the first."""
    slope: Tensor | None = None
    """Of the lines below open ReLUs, where somebody chose them one by one; else a rule says."""
    multiplier: Tensor | None = None
    """What a unit of each ReLU's input is taken off the bound, where its sign is known."""


class Affine(Step):
    """Wx + b, in whatever form W comes."""

    weight: Tensor
    bias: Tensor | None
    fan_in: int

    @abstractmethod
    def product(self, weight: Tensor, values: Tensor) -> Tensor:
        """Wx, for the layer's own W or for the sizes of its weights."""

    @abstractmethod
    def transposed(self, coefficients: Tensor, shape: torch.Size) -> Tensor:
        """aᵀW, for inputs of this shape."""

    def allowance(self, num_in: int, num_out: int) -> float:
        """Rounding as a share of |W||x| + |b|: of the deployed pass, and of these bounds in both directions."""
        bounds = gamma(FLOAT64_UNIT, 4 * (num_in + num_out) + SPARE_ROUNDINGS)
        return gamma(FLOAT32_UNIT, self.fan_in + 2) + bounds

    def underflow(self, reach: Tensor) -> Tensor:
        """Results and operands that are flushed to zero, at most two per term, for each example."""
        largest = 1 + reach.flatten(1).amax(1)
        return SMALLEST_NORMAL * 2 * (self.fan_in + 2) * (1 + self.weight.abs().max()) * largest

    def forward(self, before: Box) -> Passed:
        # W maps a box of centre m and radius r into one of centre Wm + b and radius |W|r. The deployed pass adds ρ, at
        # most a share of |W||x| + |b|; |x| is at most the reach, so one array bounds ρ for every x of the box.
        centre, sizes = self.product(self.weight, before.centre), self.product(self.weight.abs(), before.reach)
        if self.bias is not None:
            centre, sizes = centre + self.bias, sizes + self.bias.abs()
        rounding = self.allowance(before.low[0].numel(), centre[0].numel()) * sizes
        rounding = rounding + self.underflow(before.reach).view(-1, *(1,) * (centre.dim() - 1))
        # NaN, which certifies nothing, where a sum might overflow: there no share of its size bounds the error.
        rounding = torch.where(sizes < LARGEST_SUM, rounding, torch.nan)
        radius = self.product(self.weight.abs(), before.radius) + rounding
        return Passed(self, before, Box(centre - radius, centre + radius), rounding)

    def backward(self, rows: Rows, passed: Passed, lower_slope: LowerSlope) -> Rows:
        # With y = Wx + b + ρ: c·y + k >= (cᵀW)x + (k + c·b - |c|·|ρ|). The rounding goes into the constant here, before
        # the coefficients change: |ρ| is known for this layer's values.
        assert passed.rounding is not None
        constant = rows.constant - _dot(rows.coefficients.abs(), passed.rounding[rows.owner])
        if self.bias is not None:
            constant = constant + _dot(rows.coefficients, self.bias.expand_as(rows.coefficients))
        return Rows(self.transposed(rows.coefficients, passed.before.low.shape[1:]), constant, rows.owner)


@final
class Dense(Affine):
    """A matrix."""

    def __init__(self, layer: nn.Linear) -> None:
        self.weight = layer.weight.detach().double()
        self.bias = None if layer.bias is None else layer.bias.detach().double()
        self.fan_in = layer.in_features

    def product(self, weight: Tensor, values: Tensor) -> Tensor:
        return values @ weight.t()

    def transposed(self, coefficients: Tensor, shape: torch.Size) -> Tensor:
        return coefficients @ self.weight


@final
class Convolution(Affine):
    """A kernel at every position, zeros around the picture."""

    def __init__(self, layer: nn.Conv2d) -> None:
        self.weight = layer.weight.detach().double()
        self.bias = None if layer.bias is None else layer.bias.detach().double()[:, None, None]
        self.fan_in = self.weight[0].numel()
        assert not isinstance(layer.padding, str)
        self.stride, self.padding = _pair(layer.stride), _pair(layer.padding)

    def product(self, weight: Tensor, values: Tensor) -> Tensor:
        return F.conv2d(values, weight, stride=self.stride, padding=self.padding)

    def transposed(self, coefficients: Tensor, shape: torch.Size) -> Tensor:
        return _spread(coefficients, self.weight, shape, self.stride, self.padding)


@final
class AveragePool(Affine):
    """The mean of every window: one kernel, map by map."""

    bias = None

    def __init__(self, size: tuple[int, int], stride: tuple[int, int], device: torch.device) -> None:
        self.stride, self.fan_in = stride, size[0] * size[1]
        self.weight = torch.full((1, 1, *size), 1 / self.fan_in, dtype=torch.float64, device=device)

    def product(self, weight: Tensor, values: Tensor) -> Tensor:
        maps = F.conv2d(values.flatten(0, 1).unsqueeze(1), weight, stride=self.stride)
        return maps.view(*values.shape[:2], *maps.shape[2:])

    def transposed(self, coefficients: Tensor, shape: torch.Size) -> Tensor:
        maps = coefficients.flatten(0, 1).unsqueeze(1)
        return _spread(maps, self.weight, shape, self.stride, (0, 0)).view(len(coefficients), *shape)


@final
class AdaptivePool(Step):
    """The mean of windows whose size follows from the picture's."""

    def __init__(self, window: Callable[[Sequence[int]], tuple[int, int]], device: torch.device) -> None:
        self.window, self.device = window, device

    def forward(self, before: Box) -> Passed:
        window = self.window(before.low.shape[2:])
        return AveragePool(window, window, self.device).forward(before)


@final
class ChannelScaling(Affine):
    """A factor and a shift for every channel: one product and one sum, which the error model counts as three."""

    fan_in = 1

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        self.weight, self.shift = scale.detach().double(), shift.detach().double()

    @property
    def bias(self) -> Tensor:  # type: ignore[override]
        return self.shift

    def forward(self, before: Box) -> Passed:
        channels = (-1, *(1,) * (before.low.dim() - 2))
        return Affine.forward(ChannelScaling(self.weight.view(channels), self.shift.view(channels)), before)

    def product(self, weight: Tensor, values: Tensor) -> Tensor:
        return values * weight

    def transposed(self, coefficients: Tensor, shape: torch.Size) -> Tensor:
        return coefficients * self.weight


@final
class Sum(Join):
    """x + y, rounded once."""

    def join(self, parts: Sequence[Box]) -> tuple[Box, Tensor]:
        one, other = parts
        # |fl(x + y) - (x + y)| <= u|x + y| <= u(|x| + |y|). The bounds' own share pays, as an affine layer's does, for
        # their sums here and for the roundings of coefficients that meet these values on the way back.
        sizes = one.reach + other.reach
        share = gamma(FLOAT32_UNIT, 2) + gamma(FLOAT64_UNIT, 4 * sizes[0].numel() + SPARE_ROUNDINGS)
        rounding = torch.where(sizes < LARGEST_SUM, share * sizes + 4 * SMALLEST_NORMAL, torch.nan)
        return Box(one.low + other.low - rounding, one.high + other.high + rounding), rounding

    def split(self, coefficients: Tensor, parts: Sequence[Box]) -> list[Tensor]:
        return [coefficients, coefficients]


@final
class Concatenation(Join):
    """Values beside each other, along their channels: exact."""

    def join(self, parts: Sequence[Box]) -> tuple[Box, None]:
        return Box(torch.cat([part.low for part in parts], 1), torch.cat([part.high for part in parts], 1)), None

    def split(self, coefficients: Tensor, parts: Sequence[Box]) -> list[Tensor]:
        return list(torch.split(coefficients, [part.low.shape[1] for part in parts], 1))


def _pair(setting: tuple[int, ...]) -> tuple[int, int]:
    return setting[0], setting[1]


def _spread(
    coefficients: Tensor, weight: Tensor, shape: torch.Size, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """Return the transpose of a convolution, with the rows and columns that no kernel reached filled up."""
    covered = [(coefficients.shape[i] - 1) * stride[i] - 2 * padding[i] + weight.shape[i] for i in (-2, -1)]
    missing = [shape[-2] - covered[0], shape[-1] - covered[1]]
    return F.conv_transpose2d(coefficients, weight, stride=stride, padding=padding, output_padding=missing)


@final
class Rectifier(Step):
    """ReLU: exact on boxes; a line where its sign is known, and between two lines where it is open."""

    def forward(self, before: Box) -> Passed:
        return Passed(self, before, Box(before.low.clamp(min=0), before.high.clamp(min=0)))

    @staticmethod
    def above(box: Box) -> tuple[Tensor, Tensor]:
        """Return slope and height at 0 of the lines above it; the line itself where its sign is known."""
        is_open, identity = (box.low < 0) & (box.high > 0), (box.low >= 0).double()
        chord = torch.where(is_open, box.high / (box.high - box.low), identity)
        # A rounded slope is a slope like any other, if the line is then lifted over both ends of the curve, t >= -sl
        # and t >= (1 - s)u: ReLU is convex, so a line over its ends is over all of it.
        lift = torch.maximum(-chord * box.low, (1 - chord) * box.high) * (1 + 2.0**-50) + SMALLEST_NORMAL
        return chord, torch.where(is_open, lift, 0.0)

    def backward(self, rows: Rows, passed: Passed, lower_slope: LowerSlope) -> Rows:
        box = passed.before
        # For l < 0 < u and any α in [0, 1]: αx <= ReLU(x) <= sx + t, the chord with s = u/(u - l) and t = -sl. A lower
        # bound Σ c ReLU(x) takes the line below where c > 0 and the chord above where c < 0.
        chord, lift = self.above(box)
        slope = lower_slope(box, chord) if passed.slope is None else passed.slope.clamp(0, 1)
        below = torch.where((box.low < 0) & (box.high > 0), slope, chord)
        helps, harms = rows.coefficients.clamp(min=0), rows.coefficients.clamp(max=0)
        coefficients = helps * below[rows.owner] + harms * chord[rows.owner]
        if passed.multiplier is not None:
            # Where no value of the box is negative, βx >= 0 for β >= 0, and -βx may be added to a lower bound; where
            # none is positive, for β <= 0.
            positive, negative = passed.multiplier.clamp(min=0), passed.multiplier.clamp(max=0)
            allowed = torch.where(box.low >= 0, positive, torch.where(box.high <= 0, negative, 0.0))
            coefficients = coefficients - allowed[rows.owner]
        return Rows(coefficients, rows.constant + _dot(harms, lift[rows.owner]), rows.owner)


@final
@dataclass(frozen=True)
class Clamp(Step):
    """clamp(slope·(x - threshold), -1, 1), a map for each threshold: monotone, so it maps boxes to boxes.

    Slope, threshold, difference and product are rounded once each; a threshold's own rounding is absolute.
    """

    slope: float
    thresholds: tuple[float, ...] = (0.0,)

    def forward(self, before: Box) -> Passed:
        maps = [[self._end(end, threshold, way) for threshold in self.thresholds] for end, way in _ends(before)]
        low, high = (torch.cat(each, 1).clamp(-1, 1) for each in maps)
        return Passed(self, before, Box(low, high))

    def _end(self, end: Tensor, threshold: float, way: int) -> Tensor:
        shifted = _outwards(end - threshold, gamma(FLOAT32_UNIT, 2), way) + way * 2 * FLOAT32_UNIT * abs(threshold)
        return _outwards(self.slope * shifted, gamma(FLOAT32_UNIT, 3), way)


@final
class HyperbolicTangent(Step):
    """tanh, as exact as the libraries promise."""

    def forward(self, before: Box) -> Passed:
        low, high = (_outwards(torch.tanh(end), 18 * FLOAT32_UNIT, way) for end, way in _ends(before))
        return Passed(self, before, Box(low, high))


def _ends(box: Box) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
    return (box.low, -1), (box.high, 1)


def _outwards(values: Tensor, relative_error: float, way: int) -> Tensor:
    return values + way * (relative_error * values.abs() + 2 * SMALLEST_NORMAL)


@final
@dataclass(frozen=True)
class LargestPool(Step):
    """The largest value of every window: monotone and exact. At least the value with the highest lower end, and that
    value itself where no other can exceed it; else at most the highest upper end.
    """

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)

    def forward(self, before: Box) -> Passed:
        low, high = (F.max_pool2d(end, self.size, self.stride, self.padding) for end in (before.low, before.high))
        return Passed(self, before, Box(low, high))

    def backward(self, rows: Rows, passed: Passed, lower_slope: LowerSlope) -> Rows:
        box, highest = passed.before, passed.after.high
        # The place of the value with the highest lower end, in its map; -inf around the picture is never chosen.
        floor, chosen = F.max_pool2d(box.low, self.size, self.stride, self.padding, return_indices=True)
        alone = self._highest_of_others(box.high, chosen) <= floor
        # Windows in which something is unknown say nothing.
        unknown = floor.isnan() | highest.isnan()
        helps, harms = rows.coefficients.clamp(min=0), rows.coefficients.clamp(max=0)
        followed = helps + torch.where(alone[rows.owner], harms, 0.0)
        capped = torch.where(alone[rows.owner], 0.0, harms)
        spread = torch.zeros(len(helps), *box.low.shape[1:], dtype=helps.dtype, device=helps.device)
        spread.flatten(2).scatter_add_(2, chosen[rows.owner].flatten(2), followed.flatten(2))
        # Coefficients of several windows may cancel, and none goes on where a value is capped: no layer before can pay
        # for the rounding of these sums.
        cap = torch.where(unknown, torch.nan, highest)
        sums = gamma(FLOAT64_UNIT, 4 * box.low[0].numel() + SPARE_ROUNDINGS)
        paid = _dot(rows.coefficients.abs(), passed.after.reach[rows.owner]) * sums + SMALLEST_NORMAL
        return Rows(spread, rows.constant + _dot(capped, cap[rows.owner]) - paid, rows.owner)

    def _highest_of_others(self, high: Tensor, chosen: Tensor) -> Tensor:
        """Return the highest upper end in every window but that of the chosen value."""
        sides = high.shape[2:]
        places = torch.arange(sides[0] * sides[1], device=high.device, dtype=high.dtype).view(1, 1, *sides)
        down, right = self.padding
        around = (right, right, down, down)

        def windows(values: Tensor, fill: float) -> Tensor:
            padded = F.pad(values, around, value=fill)
            found = padded.unfold(2, self.size[0], self.stride[0]).unfold(3, self.size[1], self.stride[1])
            return found.flatten(4)

        here = windows(places, -1.0) == chosen.unsqueeze(-1)
        return windows(high, -torch.inf).masked_fill(here, -torch.inf).amax(-1)


@final
class Flatten(Step):
    """Another shape for the same numbers."""

    def forward(self, before: Box) -> Passed:
        return Passed(self, before, Box(before.low.flatten(1), before.high.flatten(1)))

    def backward(self, rows: Rows, passed: Passed, lower_slope: LowerSlope) -> Rows:
        shape = passed.before.low.shape[1:]
        return Rows(rows.coefficients.view(-1, *shape), rows.constant, rows.owner)


def lower_bounds(rows: Rows, trace: Sequence[Passed], lower_slope: LowerSlope) -> Tensor:
    """Return the best of the bounds that the rows reach on their way back, from the box they stand on to the first."""
    return reduce(torch.maximum, cut_bounds(rows, trace, lower_slope))


def cut_bounds(
    rows: Rows, trace: Sequence[Passed], lower_slope: LowerSlope, arrived: dict[int, Tensor] | None = None
) -> Iterator[Tensor]:
    """Go through the bounds that the rows reach on their way back, from the box they stand on to the first.

    `arrived` is given the coefficients of what each operation made, by its place in the trace.

    On the way a row has coefficients at one value, or behind a join at several: lead >= Σ a·z + constant over all of
    them. Every such cut through the network gives a lower bound of the same quantity, so the largest holds.
    """
    yield rows.lowest(trace[-1].after)
    constant, owner = rows.constant, rows.owner
    waiting, seen = {len(trace) - 1: rows.coefficients}, True
    boxes = {-1: trace[0].before} | {place: passed.after for place, passed in enumerate(trace)}
    for place, passed in reversed(list(enumerate(trace))):
        if place not in waiting:
            continue
        here = Rows(waiting.pop(place), constant, owner)
        if arrived is not None:
            arrived[place] = here.coefficients
        inputs = (place - 1,) if passed.inputs is None else passed.inputs
        moved = _moved(here, passed, lower_slope)
        if moved is None:
            # Boxes are all there is: the row is bounded over this one, and goes on with what it has elsewhere.
            if not waiting and seen:
                return
            constant, seen = here.lowest(passed.after), False
            continue
        coefficients, constant = moved
        for source, part in zip(inputs, coefficients, strict=True):
            if source in waiting:
                # They may cancel; what rounded either of them is then no share of their sum, and is paid for here.
                sums = gamma(FLOAT64_UNIT, 4 * part.shape[1:].numel() + 2 * SPARE_ROUNDINGS)
                sizes = waiting[source].abs() + part.abs()
                constant = constant - sums * _dot(sizes, boxes[source].reach[owner]) - SMALLEST_NORMAL
                waiting[source] = waiting[source] + part
            else:
                waiting[source] = part
        # Before an affine layer the bound is never worse than behind it, so boxes behind need no look.
        seen = isinstance(passed.step, Affine) or place == 0
        if seen:
            yield _lowest(waiting, boxes, constant, owner)
    if not seen:
        yield _lowest(waiting, boxes, constant, owner)


def _moved(here: Rows, passed: Passed, lower_slope: LowerSlope) -> tuple[list[Tensor], Tensor] | None:
    if isinstance(passed.step, Step):
        moved = passed.step.backward(here, passed, lower_slope)
        return None if moved is None else ([moved.coefficients], moved.constant)
    constant = here.constant
    if passed.rounding is not None:
        constant = constant - _dot(here.coefficients.abs(), passed.rounding[here.owner])
    return passed.step.split(here.coefficients, passed.parts), constant


def _lowest(waiting: dict[int, Tensor], boxes: dict[int, Box], constant: Tensor, owner: Tensor) -> Tensor:
    for place, coefficients in waiting.items():
        constant = Rows(coefficients, constant, owner).lowest(boxes[place])
    return constant
