"""Differentiable interval bounds (IBP) for certified training.

They are computed in the network's own precision and ignore rounding. The certificate (`bounds.certifier`) includes
rounding, and never uses these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.bounds import graph
from stobatch.dp.layer_gradients import WeightForm, absolute, class_pairs, record_use
from stobatch.errors import ModelError
from stobatch.models.layered import Squash
from stobatch.models.replacements import FrozenAffine
from stobatch.types import PAPER_RANGE


@dataclass(frozen=True)
class TrainingBox:
    """All points within `radius` of `centre`, value by value; both have the shape examples x layer.

    Certificates use `linear.Box`, whose ends include rounding.
    """

    centre: Tensor
    radius: Tensor

    @classmethod
    def between(cls, low: Tensor, high: Tensor) -> TrainingBox:
        return cls((low + high) / 2, (high - low) / 2)

    @classmethod
    def around(cls, inputs: Tensor, radius: float | Tensor) -> TrainingBox:
        """Return the intersection of l-infinity balls around the inputs with the input range."""
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
"""Linear layers with weights >= 0: they map centres and radii in the same way."""


def affine_radius(layer: nn.Conv2d | nn.Linear, radius: Tensor) -> Tensor:
    """Return |W|·radius, the radius of an affine layer's output box."""
    weight = absolute(layer.weight)
    if isinstance(layer, nn.Linear):
        out = F.linear(radius, weight)
    else:
        out = F.conv2d(radius, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
    record_use(layer, radius, out, WeightForm.ABSOLUTE)
    return out


def propagate(layer: nn.Module, box: TrainingBox, *others: TrainingBox) -> TrainingBox:
    """Return the smallest box that contains the layer's outputs; sums and concatenations take several boxes."""
    if isinstance(layer, nn.Conv2d) and layer.padding_mode != "zeros":
        raise ModelError(
            f"there are no interval bounds for a convolution with padding_mode='{layer.padding_mode}'.",
            remedy="Pad with zeros.",
        )
    if isinstance(layer, nn.Conv2d | nn.Linear):
        return TrainingBox(layer(box.centre), affine_radius(layer, box.radius))
    if isinstance(layer, _MONOTONE):
        return TrainingBox.between(layer(box.low), layer(box.high))
    if isinstance(layer, _RESHAPING):
        boxes = (box, *others)
        return TrainingBox(layer(*(each.centre for each in boxes)), layer(*(each.radius for each in boxes)))
    if isinstance(layer, FrozenAffine):
        scale = layer.scale.abs().view(-1, *(1,) * (box.radius.dim() - 2))
        return TrainingBox(layer(box.centre), box.radius * scale)
    raise ModelError(
        f"there are no interval bounds for a {type(layer).__name__} layer.",
        remedy="Use conv, linear, relu, tanh, avgpool, maxpool, squash, or train without the certified loss.",
    )


def worst_case_scores(layers: nn.Module, box: TrainingBox, labels: Tensor) -> Tensor:
    """Return the largest score_k - score_label within the box, examples x classes k; 0 for the label itself.

    The last layer is bounded together with the difference, which is tighter than bounding the scores: both classes
    share the hidden values.
    """
    *hidden, (output, inputs, _) = _operations(layers)
    boxes = {graph.INPUT: box}
    for position, operation in enumerate(hidden):
        boxes[position] = propagate(operation.layer, *(boxes[source] for source in operation.inputs))
    assert isinstance(output, nn.Linear)
    (box,) = (boxes[source] for source in inputs)
    scores: Tensor = output(box.centre)
    label_score = scores.gather(1, labels[:, None])
    return scores - label_score + difference_radius(output, box.radius, labels)


_TRACED: WeakKeyDictionary[nn.Module, list[graph.Operation]] = WeakKeyDictionary()


def _operations(layers: nn.Module) -> list[graph.Operation]:
    """Return the network's operations; a forward of its own is traced once, not at every training step."""
    if graph.is_plain_stack(layers) or not list(layers.children()):
        return graph.operations_of(layers)
    if layers not in _TRACED:
        _TRACED[layers] = graph.operations_of(layers)
    return _TRACED[layers]


def difference_radius(output: nn.Linear, radius: Tensor, labels: Tensor) -> Tensor:
    """Return |W_k - W_y|·radius, the radius of score_k - score_y, examples x classes k.

    All K(K - 1)/2 pairs of classes are one matrix product, so that per-example clipping sees one layer use.
    """
    num_classes = output.out_features
    first, second = class_pairs(num_classes, radius.device)
    pairs = F.linear(radius, absolute(output.weight[first] - output.weight[second]))
    record_use(output, radius, pairs, WeightForm.DIFFERENCES, labels)
    # column[j, k] is the pair's column; the diagonal points at an extra column of zeros.
    column = torch.full((num_classes, num_classes), len(first), device=radius.device)
    order = torch.arange(len(first), device=radius.device)
    column[first, second] = order
    column[second, first] = order
    return F.pad(pairs, (0, 1)).gather(1, column[labels])
