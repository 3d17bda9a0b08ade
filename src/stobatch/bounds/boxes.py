"""Interval bounds through a stack of layers, differentiable: what certified training descends on.

These bounds are for training. They are computed in the network's own precision without regard to rounding; the
certificate (`bounds.certifier`) bounds the rounding too and never uses these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.bounds import graph
from stobatch.dp.layer_gradients import WeightForm, absolute, class_pairs, note
from stobatch.errors import ModelError
from stobatch.models.layered import Squash
from stobatch.models.replacements import FrozenAffine
from stobatch.types import PAPER_RANGE


@dataclass(frozen=True)
class Box:
    """All points within `radius` of `centre`, value by value."""

    centre: Tensor
    radius: Tensor

    @classmethod
    def between(cls, low: Tensor, high: Tensor) -> Box:
        return cls((low + high) / 2, (high - low) / 2)

    @classmethod
    def around(cls, inputs: Tensor, radius: float | Tensor) -> Box:
        """Return what an l-infinity attacker can reach without leaving the range of inputs."""
        low = (inputs - radius).clamp(PAPER_RANGE.low, PAPER_RANGE.high)
        return cls.between(low, (inputs + radius).clamp(PAPER_RANGE.low, PAPER_RANGE.high))

    @property
    def low(self) -> Tensor:
        return self.centre - self.radius

    @property
    def high(self) -> Tensor:
        return self.centre + self.radius


_MONOTONE = (Squash, nn.ReLU, nn.Tanh, nn.MaxPool2d)
_RESHAPING = (nn.Flatten, nn.Identity, nn.AvgPool2d, nn.AdaptiveAvgPool2d, graph.Sum, graph.Concatenation)
"""Sums, means and orders of values, with no sign but plus: they do to centres and to radii the same."""


def spread(layer: nn.Conv2d | nn.Linear, radius: Tensor) -> Tensor:
    """Return how far an affine layer's values can move: |W| times how far its inputs can."""
    weight = absolute(layer.weight)
    if isinstance(layer, nn.Linear):
        out = F.linear(radius, weight)
    else:
        out = F.conv2d(radius, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
    note(layer, radius, out, WeightForm.ABSOLUTE)
    return out


def through(layer: nn.Module, box: Box, *others: Box) -> Box:
    """Return the smallest box that holds the layer's values, value by value; joins are given several boxes."""
    if isinstance(layer, nn.Conv2d) and layer.padding_mode != "zeros":
        raise ModelError(
            f"there are no interval bounds for a convolution with padding_mode='{layer.padding_mode}'.",
            remedy="Pad with zeros.",
        )
    if isinstance(layer, nn.Conv2d | nn.Linear):
        return Box(layer(box.centre), spread(layer, box.radius))
    if isinstance(layer, _MONOTONE):
        return Box.between(layer(box.low), layer(box.high))
    if isinstance(layer, _RESHAPING):
        boxes = (box, *others)
        return Box(layer(*(each.centre for each in boxes)), layer(*(each.radius for each in boxes)))
    if isinstance(layer, FrozenAffine):
        scale = layer.scale.abs().view(-1, *(1,) * (box.radius.dim() - 2))
        return Box(layer(box.centre), box.radius * scale)
    raise ModelError(
        f"there are no interval bounds for a {type(layer).__name__} layer.",
        remedy="Use conv, linear, relu, tanh, avgpool, maxpool, squash, or train without the certified loss.",
    )


def worst_case_scores(layers: nn.Module, box: Box, labels: Tensor) -> Tensor:
    """For each class, the most by which its score can exceed the label's within the box; 0 for the label itself.

    The last layer is bounded together with the difference, which is tighter than bounding the scores: the weights of
    a class and of the label meet the same hidden values.
    """
    *hidden, (output, inputs, _) = _operations(layers)
    boxes = {graph.INPUT: box}
    for place, operation in enumerate(hidden):
        boxes[place] = through(operation.layer, *(boxes[source] for source in operation.inputs))
    assert isinstance(output, nn.Linear)
    (box,) = (boxes[source] for source in inputs)
    scores: Tensor = output(box.centre)
    of_label = scores.gather(1, labels[:, None])
    return scores - of_label + spread_from_label(output, box.radius, labels)


_FOLLOWED: WeakKeyDictionary[nn.Module, list[graph.Operation]] = WeakKeyDictionary()


def _operations(layers: nn.Module) -> list[graph.Operation]:
    """Return the network's operations; a forward of its own is followed once, since training asks at every step."""
    if graph.is_plain_stack(layers) or not list(layers.children()):
        return graph.operations_of(layers)
    if layers not in _FOLLOWED:
        _FOLLOWED[layers] = graph.operations_of(layers)
    return _FOLLOWED[layers]


def spread_from_label(output: nn.Linear, radius: Tensor, labels: Tensor) -> Tensor:
    """Return how far each class's score can move against the label's: |W_j - W_y| times how far the hidden values
    can.
    """
    num_classes = output.out_features
    first, second = class_pairs(num_classes, radius.device)
    pairs = F.linear(radius, absolute(output.weight[first] - output.weight[second]))
    note(output, radius, pairs, WeightForm.DIFFERENCES, labels)
    # Where in the list of pairs (j, k) stands; the diagonal points at an extra column of zeros.
    place = torch.full((num_classes, num_classes), len(first), device=radius.device)
    order = torch.arange(len(first), device=radius.device)
    place[first, second] = order
    place[second, first] = order
    return F.pad(pairs, (0, 1)).gather(1, place[labels])
