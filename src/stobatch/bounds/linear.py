"""Bounds through a network one layer at a time: boxes forwards, linear lower bounds backwards (CROWN).

What is bounded is the deployed function, a pass in float32, and not the real function that it approximates. A layer
of the deployed pass returns Wx + b + ρ for some rounding errors ρ, and in any order of its sums
|ρ| <= γ (|W||x| + |b|) with γ = nu/(1 - nu), n = fan-in + 2, u = 2⁻²⁴ (Higham, 2002, chapter 3). Boxes grow by that
much at every layer, and a linear bound with coefficients a loses |a|·|ρ| on its way back through one.

The bounds are computed in float64, whose own errors obey the same law with u = 2⁻⁵³ and n the number of terms in any
sum over the layer. `Affine.allowance` adds up both. The proof is in docs/guarantees/bounds.md.

**Assumptions.** Sums of float32 products are accumulated in float32 or wider, in any order, with or without fused
multiply-add; subnormal numbers may be kept or flushed to zero; tanh is within 8 units in the last place. Excluded, and
refused as far as `bounds.arithmetic` can detect them: TF32, half precision, and algorithms that are not sums of
products (Winograd, FFT).
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
"""A sum of magnitudes beyond this might overflow in float32."""

SPARE_ROUNDINGS = 1024
"""Float64 roundings that are allowed for beyond those of the sums: products, conversions, additions of layers."""


def gamma(unit: float, roundings: int) -> float:
    """Return γ = nu/(1 - nu): the relative error of a sum of products in which each term is rounded n times at most."""
    return roundings * unit / (1 - roundings * unit) if roundings * unit < 1 else float("inf")


@dataclass(frozen=True)
class Box:
    """Bounds low <= value <= high on a layer of the deployed pass, for each example, in float64.

    Both ends have the shape examples x layer. Unknown values are NaN, and so is every bound derived from them.
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
    def magnitude(self) -> Tensor:
        """Return the largest |value| of the box."""
        return torch.maximum(self.low.abs(), self.high.abs())

    def select(self, examples: Tensor | slice) -> Box:
        """Return the boxes of these examples."""
        return Box(self.low[examples], self.high[examples])

    def intersect(self, other: Box) -> Box:
        """Return the intersection of two boxes; values that are unknown in either are NaN."""
        return Box(torch.maximum(self.low, other.low), torch.minimum(self.high, other.high))

    def restrict_signs(self, signs: Tensor) -> Box:
        """Return the part of the box with values >= 0 where the sign is 1, and <= 0 where it is -1."""
        low, high = torch.where(signs > 0, 0.0, -torch.inf), torch.where(signs < 0, 0.0, torch.inf)
        return Box(torch.maximum(self.low, low), torch.minimum(self.high, high))


@dataclass(frozen=True)
class LinearBounds:
    """Linear lower bounds on some quantities: quantity p >= coefficients[p] · layer + constant[p].

    Row p is about the example `owner[p]`, and holds for every pass that starts inside that example's input box.
    `coefficients` have the shape rows x layer, `constant` and `owner` one value per row.
    """

    coefficients: Tensor
    constant: Tensor
    owner: Tensor

    def concretise(self, box: Box) -> Tensor:
        """Return the minimum of each linear bound over a box of the layer, less the rounding of these sums."""
        # The minimum of c·x over a box of centre m and radius r is c·m - |c|·r. The computed sums are off by at most
        # γ|c|·|m| and γ|c|·r, and |m| + r is the magnitude: widening the radius by γ·magnitude covers both. n counts
        # every term four times, for the roundings of m, r and the wider radius.
        allowance = gamma(FLOAT64_UNIT, 4 * box.low[0].numel() + SPARE_ROUNDINGS)
        radius = box.radius + allowance * box.magnitude
        at_centre = _dot(self.coefficients, box.centre[self.owner])
        return self.constant + at_centre - _dot(self.coefficients.abs(), radius[self.owner]) - SMALLEST_NORMAL


def _dot(rows: Tensor, others: Tensor) -> Tensor:
    products: Tensor = torch.linalg.vecdot(rows.flatten(1), others.flatten(1))
    return products


LowerSlope = Callable[[Box, Tensor], Tensor]
"""Returns the slopes of the lower lines of unstable ReLUs, from their box and the slopes of their chords."""

LOWER_SLOPES: dict[str, LowerSlope] = {
    "smaller area": lambda box, chord: (box.high > -box.low).double(),
    "chord": lambda box, chord: chord,
    "zero": lambda box, chord: torch.zeros_like(chord),
    "one": lambda box, chord: torch.ones_like(chord),
}
"""Every slope in [0, 1] is sound, hence so is the largest of several bounds."""


class Rule(ABC):
    """How bounds propagate through one layer."""

    @abstractmethod
    def forward(self, before: Box) -> LayerBounds:
        """Return the box after the layer."""

    def backward(self, rows: LinearBounds, passed: LayerBounds, lower_slope: LowerSlope) -> LinearBounds | None:
        """Return the lower bounds in terms of the values before the layer; None if the layer has boxes only."""
        return None


class Join(ABC):
    """How bounds propagate through an operation on several values."""

    @abstractmethod
    def join(self, parts: Sequence[Box]) -> tuple[Box, Tensor | None]:
        """Return the box after the operation, and a bound on its rounding errors."""

    @abstractmethod
    def split(self, coefficients: Tensor, parts: Sequence[Box]) -> list[Tensor]:
        """Return the coefficients of each operand, from those of the result."""


@dataclass(frozen=True)
class LayerBounds:
    """What the forward pass of boxes stores for one layer, for backward passes."""

    rule: Rule | Join
    before: Box
    after: Box
    rounding: Tensor | None = None
    """Bounds |ρ| on the rounding errors of the deployed layer, given the values before it."""
    inputs: tuple[int, ...] | None = None
    """Positions in the trace of the values that it reads, -1 for the network's input; None for the layer before."""
    parts: tuple[Box, ...] = ()
    """All boxes that a join reads; `before` is the first."""
    slope: Tensor | None = None
    """Slopes of the lower lines of unstable ReLUs, where they were optimised; else `lower_slope` gives them."""
    multiplier: Tensor | None = None
    """Lagrange multipliers β of the sign assumptions on a ReLU's inputs."""


class Affine(Rule):
    """Wx + b, where W is a matrix, a convolution, a mean or a scaling."""

    weight: Tensor
    bias: Tensor | None
    fan_in: int

    @abstractmethod
    def product(self, weight: Tensor, values: Tensor) -> Tensor:
        """Return Wx, for the layer's own W or for |W|."""

    @abstractmethod
    def transposed(self, coefficients: Tensor, shape: torch.Size) -> Tensor:
        """Return aᵀW, for inputs of this shape."""

    def allowance(self, num_in: int, num_out: int) -> float:
        """Return the rounding as a share of |W||x| + |b|: of the deployed pass, and of these bounds both ways."""
        own_rounding = gamma(FLOAT64_UNIT, 4 * (num_in + num_out) + SPARE_ROUNDINGS)
        return gamma(FLOAT32_UNIT, self.fan_in + 2) + own_rounding

    def underflow(self, magnitude: Tensor) -> Tensor:
        """Return a bound on what flushing to zero can change, for each example: two operands or results per term."""
        largest = 1 + magnitude.flatten(1).amax(1)
        return SMALLEST_NORMAL * 2 * (self.fan_in + 2) * (1 + self.weight.abs().max()) * largest

    def forward(self, before: Box) -> LayerBounds:
        # W maps a box of centre m and radius r into one of centre Wm + b and radius |W|r. The deployed pass adds ρ, at
        # most a share of |W||x| + |b|; |x| is at most the box's magnitude, so one array bounds ρ for every x in it.
        centre, sums = self.product(self.weight, before.centre), self.product(self.weight.abs(), before.magnitude)
        if self.bias is not None:
            centre, sums = centre + self.bias, sums + self.bias.abs()
        rounding = self.allowance(before.low[0].numel(), centre[0].numel()) * sums
        rounding = rounding + self.underflow(before.magnitude).view(-1, *(1,) * (centre.dim() - 1))
        # Where a sum might overflow the error model does not hold: NaN certifies nothing.
        rounding = torch.where(sums < LARGEST_SUM, rounding, torch.nan)
        radius = self.product(self.weight.abs(), before.radius) + rounding
        return LayerBounds(self, before, Box(centre - radius, centre + radius), rounding)

    def backward(self, rows: LinearBounds, passed: LayerBounds, lower_slope: LowerSlope) -> LinearBounds:
        # With y = Wx + b + ρ: c·y + k >= (cᵀW)·x + (k + c·b - |c|·|ρ|).
        assert passed.rounding is not None
        constant = rows.constant - _dot(rows.coefficients.abs(), passed.rounding[rows.owner])
        if self.bias is not None:
            constant = constant + _dot(rows.coefficients, self.bias.expand_as(rows.coefficients))
        return LinearBounds(self.transposed(rows.coefficients, passed.before.low.shape[1:]), constant, rows.owner)


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
    """A 2D convolution with zero padding."""

    def __init__(self, layer: nn.Conv2d) -> None:
        self.weight = layer.weight.detach().double()
        self.bias = None if layer.bias is None else layer.bias.detach().double()[:, None, None]
        self.fan_in = self.weight[0].numel()
        assert not isinstance(layer.padding, str)
        self.stride, self.padding = _pair(layer.stride), _pair(layer.padding)

    def product(self, weight: Tensor, values: Tensor) -> Tensor:
        return F.conv2d(values, weight, stride=self.stride, padding=self.padding)

    def transposed(self, coefficients: Tensor, shape: torch.Size) -> Tensor:
        return _transposed_convolution(coefficients, self.weight, shape, self.stride, self.padding)


@final
class AveragePool(Affine):
    """The mean of every window: one constant kernel, channel by channel."""

    bias = None

    def __init__(self, size: tuple[int, int], stride: tuple[int, int], device: torch.device) -> None:
        self.stride, self.fan_in = stride, size[0] * size[1]
        self.weight = torch.full((1, 1, *size), 1 / self.fan_in, dtype=torch.float64, device=device)

    def product(self, weight: Tensor, values: Tensor) -> Tensor:
        maps = F.conv2d(values.flatten(0, 1).unsqueeze(1), weight, stride=self.stride)
        return maps.view(*values.shape[:2], *maps.shape[2:])

    def transposed(self, coefficients: Tensor, shape: torch.Size) -> Tensor:
        maps = coefficients.flatten(0, 1).unsqueeze(1)
        return _transposed_convolution(maps, self.weight, shape, self.stride, (0, 0)).view(len(coefficients), *shape)


@final
class AdaptivePool(Rule):
    """The mean of windows whose size follows from the input's."""

    def __init__(self, window: Callable[[Sequence[int]], tuple[int, int]], device: torch.device) -> None:
        self.window, self.device = window, device

    def forward(self, before: Box) -> LayerBounds:
        window = self.window(before.low.shape[2:])
        return AveragePool(window, window, self.device).forward(before)


@final
class ChannelScaling(Affine):
    """scale·x + shift for each channel: two roundings, of which the error model (fan-in + 2) allows three."""

    fan_in = 1

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        self.weight, self.shift = scale.detach().double(), shift.detach().double()

    @property
    def bias(self) -> Tensor:  # type: ignore[override]
        return self.shift

    def forward(self, before: Box) -> LayerBounds:
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
        # |fl(x + y) - (x + y)| <= u|x + y| <= u(|x| + |y|). The float64 share covers, as an affine layer's does, the
        # sums here and the roundings of coefficients that multiply these values on the way back.
        sums = one.magnitude + other.magnitude
        share = gamma(FLOAT32_UNIT, 2) + gamma(FLOAT64_UNIT, 4 * sums[0].numel() + SPARE_ROUNDINGS)
        rounding = torch.where(sums < LARGEST_SUM, share * sums + 4 * SMALLEST_NORMAL, torch.nan)
        return Box(one.low + other.low - rounding, one.high + other.high + rounding), rounding

    def split(self, coefficients: Tensor, parts: Sequence[Box]) -> list[Tensor]:
        return [coefficients, coefficients]


@final
class Concatenation(Join):
    """Concatenation along channels, which is exact."""

    def join(self, parts: Sequence[Box]) -> tuple[Box, None]:
        return Box(torch.cat([part.low for part in parts], 1), torch.cat([part.high for part in parts], 1)), None

    def split(self, coefficients: Tensor, parts: Sequence[Box]) -> list[Tensor]:
        return list(torch.split(coefficients, [part.low.shape[1] for part in parts], 1))


def _pair(setting: tuple[int, ...]) -> tuple[int, int]:
    return setting[0], setting[1]


def _transposed_convolution(
    coefficients: Tensor, weight: Tensor, shape: torch.Size, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """Return the transposed convolution, padded with the rows and columns that no kernel covers."""
    covered = [(coefficients.shape[i] - 1) * stride[i] - 2 * padding[i] + weight.shape[i] for i in (-2, -1)]
    missing = [shape[-2] - covered[0], shape[-1] - covered[1]]
    return F.conv_transpose2d(coefficients, weight, stride=stride, padding=padding, output_padding=missing)


@final
class ReLU(Rule):
    """ReLU: exact on boxes; linear where its input's sign is known, and between two lines where it is unstable."""

    def forward(self, before: Box) -> LayerBounds:
        return LayerBounds(self, before, Box(before.low.clamp(min=0), before.high.clamp(min=0)))

    @staticmethod
    def upper_line(box: Box) -> tuple[Tensor, Tensor]:
        """Return slope and intercept of a line above ReLU over the box; ReLU itself where the sign is known."""
        unstable, slope_of_stable = (box.low < 0) & (box.high > 0), (box.low >= 0).double()
        chord = torch.where(unstable, box.high / (box.high - box.low), slope_of_stable)
        # The chord from (l, 0) to (u, u) has slope s = u/(u - l), here rounded. The line sx + t is above ReLU at both
        # ends iff t >= -sl and t >= (1 - s)u, and then everywhere between, since ReLU is convex. The factor covers the
        # rounding of t.
        intercept = torch.maximum(-chord * box.low, (1 - chord) * box.high) * (1 + 2.0**-50) + SMALLEST_NORMAL
        return chord, torch.where(unstable, intercept, 0.0)

    def backward(self, rows: LinearBounds, passed: LayerBounds, lower_slope: LowerSlope) -> LinearBounds:
        box = passed.before
        # For l < 0 < u and any α in [0, 1]: αx <= ReLU(x) <= sx + t. A lower bound on Σ c·ReLU(x) takes the lower line
        # where c > 0 and the upper one where c < 0.
        upper, intercept = self.upper_line(box)
        slope = lower_slope(box, upper) if passed.slope is None else passed.slope.clamp(0, 1)
        lower = torch.where((box.low < 0) & (box.high > 0), slope, upper)
        positive, negative = rows.coefficients.clamp(min=0), rows.coefficients.clamp(max=0)
        coefficients = positive * lower[rows.owner] + negative * upper[rows.owner]
        if passed.multiplier is not None:
            # βx >= 0 for β >= 0 where the whole box is >= 0, and for β <= 0 where it is <= 0: there subtracting βx
            # keeps a lower bound (Lagrange multipliers of the sign assumptions). All other multipliers count as 0.
            above_zero, below_zero = passed.multiplier.clamp(min=0), passed.multiplier.clamp(max=0)
            multiplier = torch.where(box.low >= 0, above_zero, torch.where(box.high <= 0, below_zero, 0.0))
            coefficients = coefficients - multiplier[rows.owner]
        return LinearBounds(coefficients, rows.constant + _dot(negative, intercept[rows.owner]), rows.owner)


@final
@dataclass(frozen=True)
class Clamp(Rule):
    """clamp(slope·(x - threshold), -1, 1), channels for each threshold: monotone, so it maps boxes to boxes.

    Slope, threshold, difference and product are rounded once each; a threshold's own rounding error is absolute.
    """

    slope: float
    thresholds: tuple[float, ...] = (0.0,)

    def forward(self, before: Box) -> LayerBounds:
        ends = [[self._end(end, threshold, sign) for threshold in self.thresholds] for end, sign in _ends(before)]
        low, high = (torch.cat(channels, 1).clamp(-1, 1) for channels in ends)
        return LayerBounds(self, before, Box(low, high))

    def _end(self, end: Tensor, threshold: float, sign: int) -> Tensor:
        shifted = _round_outwards(end - threshold, gamma(FLOAT32_UNIT, 2), sign)
        shifted = shifted + sign * 2 * FLOAT32_UNIT * abs(threshold)
        return _round_outwards(self.slope * shifted, gamma(FLOAT32_UNIT, 3), sign)


@final
class Tanh(Rule):
    """tanh, assumed to be within 8 units in the last place: 16 u, and 2 u for the rounding here."""

    def forward(self, before: Box) -> LayerBounds:
        low, high = (_round_outwards(torch.tanh(end), 18 * FLOAT32_UNIT, sign) for end, sign in _ends(before))
        return LayerBounds(self, before, Box(low, high))


def _ends(box: Box) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
    """Return both ends, each with the sign of the direction out of the box."""
    return (box.low, -1), (box.high, 1)


def _round_outwards(values: Tensor, relative_error: float, sign: int) -> Tensor:
    return values + sign * (relative_error * values.abs() + 2 * SMALLEST_NORMAL)


@final
@dataclass(frozen=True)
class MaxPool(Rule):
    """The maximum of every window: monotone and exact on boxes.

    Linear bounds, with j the value of the largest lower end: the maximum is at least x_j; it is x_j where no other
    upper end exceeds that lower end; else it is at most the largest upper end.
    """

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)

    def forward(self, before: Box) -> LayerBounds:
        low, high = (F.max_pool2d(end, self.size, self.stride, self.padding) for end in (before.low, before.high))
        return LayerBounds(self, before, Box(low, high))

    def backward(self, rows: LinearBounds, passed: LayerBounds, lower_slope: LowerSlope) -> LinearBounds:
        box, upper = passed.before, passed.after.high
        # j of every window, as an index into its channel; the padding of -inf is never chosen.
        lower, index = F.max_pool2d(box.low, self.size, self.stride, self.padding, return_indices=True)
        is_maximum = self._upper_of_others(box.high, index) <= lower
        positive, negative = rows.coefficients.clamp(min=0), rows.coefficients.clamp(max=0)
        followed = positive + torch.where(is_maximum[rows.owner], negative, 0.0)
        capped = torch.where(is_maximum[rows.owner], 0.0, negative)
        coefficients = torch.zeros(len(positive), *box.low.shape[1:], dtype=positive.dtype, device=positive.device)
        coefficients.flatten(2).scatter_add_(2, index[rows.owner].flatten(2), followed.flatten(2))
        # A window with an unknown value makes the bound NaN, which certifies nothing.
        cap = torch.where(lower.isnan() | upper.isnan(), torch.nan, upper)
        # Coefficients of overlapping windows may cancel, and capped values have none: the allowances of earlier layers
        # do not cover the rounding of these sums, so it is subtracted here.
        share = gamma(FLOAT64_UNIT, 4 * box.low[0].numel() + SPARE_ROUNDINGS)
        rounding = _dot(rows.coefficients.abs(), passed.after.magnitude[rows.owner]) * share + SMALLEST_NORMAL
        return LinearBounds(coefficients, rows.constant + _dot(capped, cap[rows.owner]) - rounding, rows.owner)

    def _upper_of_others(self, high: Tensor, index: Tensor) -> Tensor:
        """Return the largest upper end in every window, without the value at `index`."""
        height, width = high.shape[2:]
        indices = torch.arange(height * width, device=high.device, dtype=high.dtype).view(1, 1, height, width)
        vertical, horizontal = self.padding
        padding = (horizontal, horizontal, vertical, vertical)

        def windows(values: Tensor, fill: float) -> Tensor:
            padded = F.pad(values, padding, value=fill)
            unfolded = padded.unfold(2, self.size[0], self.stride[0]).unfold(3, self.size[1], self.stride[1])
            return unfolded.flatten(4)

        is_index = windows(indices, -1.0) == index.unsqueeze(-1)
        return windows(high, -torch.inf).masked_fill(is_index, -torch.inf).amax(-1)


@final
class Flatten(Rule):
    """Flatten all axes but the first."""

    def forward(self, before: Box) -> LayerBounds:
        return LayerBounds(self, before, Box(before.low.flatten(1), before.high.flatten(1)))

    def backward(self, rows: LinearBounds, passed: LayerBounds, lower_slope: LowerSlope) -> LinearBounds:
        shape = passed.before.low.shape[1:]
        return LinearBounds(rows.coefficients.view(-1, *shape), rows.constant, rows.owner)


def lower_bounds(rows: LinearBounds, trace: Sequence[LayerBounds], lower_slope: LowerSlope) -> Tensor:
    """Return the largest of the lower bounds of each row that `backward_bounds` yields."""
    return reduce(torch.maximum, backward_bounds(rows, trace, lower_slope))


def backward_bounds(
    rows: LinearBounds,
    trace: Sequence[LayerBounds],
    lower_slope: LowerSlope,
    coefficients_at: dict[int, Tensor] | None = None,
) -> Iterator[Tensor]:
    """Propagate linear bounds on the trace's last value back to its input; yield valid lower bounds on the way.

    `coefficients_at` receives the coefficients of each operation's result, by its position in the trace.

    Invariant: quantity >= Σ_v a_v·z_v + constant, where v ranges over one value, or behind a join over several. Each
    value of the sum may be bounded over its own box, so every stage gives a lower bound of the same quantity, and the
    largest holds.
    """
    yield rows.concretise(trace[-1].after)
    constant, owner = rows.constant, rows.owner
    # Coefficients a_v by position of v; `concretised`: the sum as it stands was bounded and yielded.
    pending, concretised = {len(trace) - 1: rows.coefficients}, True
    boxes = {-1: trace[0].before} | {position: passed.after for position, passed in enumerate(trace)}
    for position, passed in reversed(list(enumerate(trace))):
        if position not in pending:
            continue
        result = LinearBounds(pending.pop(position), constant, owner)
        if coefficients_at is not None:
            coefficients_at[position] = result.coefficients
        operands = _propagate_back(result, passed, lower_slope)
        if operands is None:
            # The layer has boxes only: bound this value over its box, and go on with the others.
            if not pending and concretised:
                return
            constant, concretised = result.concretise(passed.after), False
            continue
        parts, constant = operands
        inputs = (position - 1,) if passed.inputs is None else passed.inputs
        for source, part in zip(inputs, parts, strict=True):
            if source in pending:
                # Two readers of one value: their coefficients may cancel, and then no share of the sum covers what was
                # rounded in either. A share of (|a'| + |a''|)|z| is subtracted here instead.
                share = gamma(FLOAT64_UNIT, 4 * part.shape[1:].numel() + 2 * SPARE_ROUNDINGS)
                magnitude = pending[source].abs() + part.abs()
                constant = constant - share * _dot(magnitude, boxes[source].magnitude[owner]) - SMALLEST_NORMAL
                pending[source] = pending[source] + part
            else:
                pending[source] = part
        # Before an affine layer the bound is at least as good as behind it (its box came from the box before), so only
        # values before affine layers and the input are bounded.
        concretised = isinstance(passed.rule, Affine) or position == 0
        if concretised:
            yield _concretise_all(pending, boxes, constant, owner)
    if not concretised:
        yield _concretise_all(pending, boxes, constant, owner)


def _propagate_back(
    result: LinearBounds, passed: LayerBounds, lower_slope: LowerSlope
) -> tuple[list[Tensor], Tensor] | None:
    """Return the coefficients of each operand and the constant; None if the layer has boxes only."""
    if isinstance(passed.rule, Rule):
        before = passed.rule.backward(result, passed, lower_slope)
        return None if before is None else ([before.coefficients], before.constant)
    constant = result.constant
    if passed.rounding is not None:
        constant = constant - _dot(result.coefficients.abs(), passed.rounding[result.owner])
    return passed.rule.split(result.coefficients, passed.parts), constant


def _concretise_all(pending: dict[int, Tensor], boxes: dict[int, Box], constant: Tensor, owner: Tensor) -> Tensor:
    for position, coefficients in pending.items():
        constant = LinearBounds(coefficients, constant, owner).concretise(boxes[position])
    return constant
