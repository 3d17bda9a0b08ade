"""A plain stack of layers, written as a line of text: the networks of the sound method.

Small and shallow on purpose. Every weight costs privacy noise, and every layer loosens interval bounds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stobatch.errors import ModelError
from stobatch.models.classifier import Classifier
from stobatch.models.residual import CentredConv2d, ResidualBlock, RoughGroupNorm
from stobatch.models.scattering import MOST_SCALES, REDUCTION, Scattering


class _Clamp(torch.autograd.Function):
    """clamp(·, -1, 1) that lets every gradient pass, as if nothing were clamped."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        return values.clamp(-1, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Squash(nn.Module):
    """clamp(slope·(x - threshold), -1, 1), a map for each threshold: values far from all thresholds stop moving.

    On pictures of strokes most pixels are near an end of the range. With slope s and threshold 0 a pixel at ±1 is fixed
    against every perturbation up to 1 - 1/s, so an attacker cannot use it.

    Its gradient is that of slope·x, also where it is clamped: a true gradient would be zero there and hide from an
    attacker which way a larger step should go. That makes attacks stronger and changes no output and no parameter's
    gradient.
    """

    def __init__(self, slope: float, *thresholds: float) -> None:
        super().__init__()
        self.slope, self.thresholds = slope, thresholds or (0.0,)

    def forward(self, inputs: Tensor) -> Tensor:
        maps: list[Tensor] = [_Clamp.apply(self.slope * (inputs - at)) for at in self.thresholds]  # type: ignore[no-untyped-call]
        return torch.cat(maps, 1) if len(maps) > 1 else maps[0]

    def extra_repr(self) -> str:
        return f"slope={self.slope:g}, thresholds={self.thresholds}"


class Layered(Classifier):
    """Layers one after the other, from inputs in [-1, 1] to class scores."""

    def __init__(self, layers: Sequence[nn.Module], input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.input_shape = input_shape
        if not isinstance(self.layers[-1], nn.Linear):
            raise ModelError("the last layer has to be linear.", remedy="End the list of layers with `linear`.")

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layers(inputs)
        return scores

    @property
    def num_classes(self) -> int:
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        return last.out_features


Shape = tuple[int, ...]


MOST_NUMBERS = 2**28
"""Weights of a layer with its values for one input: a gigabyte. A size that asks for more is a typing error."""


def _whole(number: float, least: int = 1) -> int:
    if not (float(number).is_integer() and least <= number <= MOST_NUMBERS):
        raise ValueError(number)
    return int(number)


def require_size(numbers: int, multiplications: int = 0) -> None:
    """Raise before this is asked of the machine, which may have the memory and then stand still."""
    if numbers > MOST_NUMBERS or multiplications > 16 * MOST_NUMBERS:
        raise ModelError(
            f"a layer would have {numbers:,} weights and values, and take {multiplications:,} multiplications.",
            why=f"The most is {MOST_NUMBERS:,}, and 16 times that for one input; every weight costs privacy noise.",
            remedy="Lower its sizes, or raise its stride.",
        )


def _squash(shape: Shape, slope: float, *thresholds: float) -> nn.Module:
    if not (0 < slope < math.inf and all(map(math.isfinite, thresholds))):
        raise ValueError(slope)
    require_size(math.prod(shape) * max(1, len(thresholds)))
    return Squash(slope, *thresholds)


def _conv(
    kind: type[nn.Conv2d], shape: Shape, maps: float, size: float, stride: float = 1, padding: float = 0
) -> nn.Module:
    channels, *sides = shape
    whole = _whole(maps), _whole(size), _whole(stride), _whole(padding, 0)
    padded = [side + 2 * whole[3] for side in sides]
    outputs = whole[0] * math.prod(max(0, side - whole[1]) // whole[2] + 1 for side in padded)
    window = channels * whole[1] ** 2
    require_size(whole[0] * window + channels * math.prod(padded) + outputs, outputs * window)
    return kind(channels, *whole)


def _residual(shape: Shape, maps: float, groups: float, stride: float = 1) -> nn.Module:
    channels, height, width = shape
    count, step = _whole(maps), _whole(stride)
    require_size(9 * count * (channels + count), 9 * height * width * count * (channels + count))
    return ResidualBlock(
        (channels, height, width),
        *(count, step, lambda of: RoughGroupNorm(_whole(groups), of[0]), CentredConv2d),
    )


def _pool(kind: Callable[[int, int], nn.Module], shape: Shape, size: float, stride: float | None = None) -> nn.Module:
    return kind(_whole(size), _whole(size if stride is None else stride))


def _group_norm(shape: Shape, groups: float) -> nn.Module:
    return nn.GroupNorm(_whole(groups), shape[0])


def _linear(shape: Shape, size: float) -> nn.Module:
    require_size((shape[0] + 1) * _whole(size))
    return nn.Linear(shape[0], _whole(size))


def _scatter(shape: Shape, angles: float, *numbers: float, even: bool) -> nn.Module:
    first, second = numbers[:2] or (1.0, 1.0)
    low, high, *flat = numbers[2:] or (0.0, 0.0)
    (level,) = flat or (0.0,)
    if not (all(0 < gain < math.inf for gain in (first, second)) and all(map(math.isfinite, (low, high, level)))):
        raise ValueError(numbers)
    count = _whole(angles)
    require_size(math.prod(shape) * (1 + count) ** 2, 16 * math.prod(shape) * (1 + count) ** 2)
    return Scattering(shape, count, (1.0, first, first, second), (level, low, low, high), even=even)


def _wavelets(shape: Shape, angles: float, *numbers: float, even: bool) -> nn.Module:
    flat, level, *gains = numbers or (0.0, 0.0, 1.0, 1.0)
    groups = 1 if shape[0] == 1 else 3 if len(gains) == 3 * MOST_SCALES else 2
    scales, left = divmod(len(gains), groups)
    positive = all(0 <= gain < math.inf for gain in gains) and all(map(math.isfinite, (flat, level)))
    if left or not (1 <= scales <= MOST_SCALES and positive):
        raise ValueError(numbers)
    count, pixels = _whole(angles), math.prod(shape[1:])
    require_size(2 * count * max(pixels, pixels**2 // REDUCTION**2), 32 * count * scales * math.prod(shape))
    own = [tuple(gains[scales * group : scales * (group + 1)]) for group in range(groups)]
    return Scattering(
        shape,
        count,
        (1.0, *own[0]),
        (flat, *[level] * scales),
        differences=(1.0, *own[1]) if groups > 1 else None,
        mixtures=(0.0, *own[2]) if groups > 2 else None,  # their order 0 is that of the others once more
        orders=1,
        even=even,
    )


_MAKERS: dict[str, Callable[..., nn.Module]] = {
    "squash": _squash,
    "conv": partial(_conv, nn.Conv2d),
    "centred": partial(_conv, CentredConv2d),
    "residual": _residual,
    "relu": lambda shape: nn.ReLU(),
    "tanh": lambda shape: nn.Tanh(),
    "avgpool": partial(_pool, nn.AvgPool2d),
    "maxpool": partial(_pool, nn.MaxPool2d),
    "groupnorm": _group_norm,
    "linear": _linear,
    "scatter": partial(_scatter, even=False),
    "scatter_even": partial(_scatter, even=True),
    "wavelets": partial(_wavelets, even=False),
    "wavelets_even": partial(_wavelets, even=True),
}

GRAMMAR = (
    "squash SLOPE THRESHOLD..., conv MAPS SIZE/STRIDE+PADDING, centred MAPS SIZE/STRIDE+PADDING, relu, tanh, "
    "avgpool SIZE/STRIDE, maxpool SIZE/STRIDE, groupnorm GROUPS, residual MAPS GROUPS/STRIDE, linear N, "
    "scatter ANGLES GAIN GAIN LEVEL LEVEL LEVEL, scatter_even ANGLES GAIN GAIN LEVEL LEVEL LEVEL "
    "(gains of orders 1 and 2, levels of orders 1, 2 and 0), "
    "wavelets ANGLES LEVEL LEVEL GAIN..., wavelets_even ANGLES LEVEL LEVEL GAIN... "
    "(levels of orders 0 and 1, gains of up to four scales, then those for differences of colours, and after four of "
    "each four for mixtures of the mean with a difference); "
    "*GAIN after a layer scales its first weights"
)


_WINDOW = re.compile(r"(?P<size>[^/+]+)(?:/(?P<stride>[^/+]+))?(?:\+(?P<padding>[^/+]+))?")


def build_layered(
    description: str,
    input_shape: Shape,
    num_classes: int,
    generator: torch.Generator,
    *,
    first_weights: str = "fan_in",
) -> Layered:
    """Return a network from its description, with freshly drawn weights.

    >>> net = build_layered("squash 4, conv 8 7/3, relu, linear", (1, 28, 28), 10, torch.Generator())
    >>> [type(layer).__name__ for layer in net.layers]
    ['Squash', 'Conv2d', 'ReLU', 'Flatten', 'Linear']
    """
    words = [word.strip() for word in description.split(",")]
    layers: list[nn.Module] = []
    gains: dict[nn.Module, float] = {}
    example = torch.zeros(1, *input_shape)
    for position, given in enumerate(words):
        word, _, gain = (part.strip() for part in given.partition("*"))
        if word == "linear" and position == len(words) - 1:
            word = f"linear {num_classes}"
        if word.startswith("linear") and example.ndim > 2:
            layers.append(nn.Flatten())
            example = example.flatten(1)
        layers.append(_layer(word, tuple(example.shape[1:])))
        if gain:
            gains[layers[-1]] = _gain(gain, given)
        try:
            example = layers[-1](example).detach()
        except (IndexError, RuntimeError, ValueError):
            raise ModelError(
                f"layer '{word}' does not take values of shape {tuple(example.shape[1:])}.",
                remedy="Lower sizes and strides, or pool less.",
            ) from None
    network = Layered(layers, input_shape)
    if network.num_classes != num_classes:
        raise ModelError(f"'{description}' does not end with {num_classes} scores.", remedy="End it with `linear`.")
    initialise_layered(network, generator, gains, first_weights)
    return network


def _gain(gain: str, word: str) -> float:
    try:
        found = float(gain)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise ModelError(f"'{word}' has no gain that is a number.", remedy="Write `linear *0.3`, for instance.")
    return found


def _layer(word: str, shape: Shape) -> nn.Module:
    name, *numbers = word.split() or [""]
    try:
        options: dict[str, float] = {}
        if numbers and (window := _WINDOW.fullmatch(numbers[-1])):
            numbers[-1] = window["size"]
            options = {key: float(window[key]) for key in ("stride", "padding") if window[key]}
        return _MAKERS[name](shape, *(float(number) for number in numbers), **options)
    except (LookupError, TypeError, ValueError):
        raise ModelError(
            f"'{word}' is not a layer for values of shape {shape}.", remedy=f"Layers are: {GRAMMAR}."
        ) from None


def initialise_layered(
    network: Layered, generator: torch.Generator, gains: dict[nn.Module, float], first_weights: str
) -> None:
    """Weights of variance gain²/fan-in, or 2π·gain²/fan-in² (`box`), from the given generator only, and zero biases.

    Boxes of width 1 into n weights of deviation s come out n·s·√(2/π) wide, and half of that behind ReLU where values
    are as often negative as not. So s = √(2π)/n keeps widths as they are (Shi et al., 2021). No data enters.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear", generator=generator)
            of_box = math.sqrt(2 * math.pi / layer.weight[0].numel())
            with torch.no_grad():
                layer.weight.mul_(gains.get(layer, 1.0) * (of_box if first_weights == "box" else 1.0))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
