"""A network as propagation rules, boxes from the input to the scores, and tighter boxes inside deep networks.

A layer's box follows from the box before it, which loses the dependence between its values. Propagated back to the
input as a linear bound, a hidden value keeps what cancels on the way (CROWN, Zhang et al., 2018): `hidden_boxes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stobatch.bounds import graph, linear
from stobatch.bounds.linear import (
    LOWER_SLOPES,
    AdaptivePool,
    AveragePool,
    Box,
    ChannelScaling,
    Clamp,
    Convolution,
    Dense,
    Flatten,
    Join,
    LayerBounds,
    LinearBounds,
    MaxPool,
    ReLU,
    Rule,
    Tanh,
    lower_bounds,
)
from stobatch.errors import ModelError
from stobatch.models.layered import Squash
from stobatch.models.replacements import FrozenAffine
from stobatch.verifier import require_unaltered


class Node(NamedTuple):
    """An operation's rule, and the positions of the values that it reads."""

    rule: Rule | Join
    inputs: tuple[int, ...]


_TAKES_IMAGES = (Convolution, AveragePool, AdaptivePool, MaxPool)


def propagate(
    nodes: Sequence[Node],
    box: Box,
    signs: Mapping[int, Tensor] | None = None,
    known: Mapping[int, Box] | None = None,
) -> Iterator[LayerBounds]:
    """Yield the bounds of each operation, from a box of inputs to the scores.

    `signs` gives, by position of a ReLU, assumptions on its inputs: at least 0 (1), at most 0 (-1) or none (0).
    `known` gives, by position of an operation, further boxes that its results lie in (`hidden_boxes`).
    """
    boxes = {graph.INPUT: box}
    for position, (rule, inputs) in enumerate(nodes):
        box, *others = parts = [boxes[source] for source in inputs]
        if isinstance(rule, Dense) and box.low.dim() != 2:
            shape = "x".join(map(str, box.low.shape[1:]))
            raise ModelError(f"a linear layer is given {shape} values.", remedy="Put nn.Flatten() before it.")
        if isinstance(rule, _TAKES_IMAGES) and box.low.dim() != 4:
            shape = "x".join(map(str, box.low.shape[1:]))
            raise ModelError(
                f"a layer of images is given {shape} values.",
                why="It would take the axis of examples for channels, and mix examples.",
                remedy="Give inputs of channels x height x width.",
            )
        if isinstance(rule, Join):
            _require_same_shape(rule, parts)
            passed = LayerBounds(rule, box, *rule.join(parts), inputs, tuple(parts))
        else:
            assert not others
            if signs is not None and position in signs:
                box = box.restrict_signs(signs[position])
            passed = replace(rule.forward(box), inputs=inputs)
        if known is not None and position in known:
            passed = replace(passed, after=passed.after.intersect(known[position]))
        yield passed
        boxes[position] = passed.after


def _require_same_shape(rule: Join, parts: list[Box]) -> None:
    shapes = {tuple(part.low.shape) for part in parts}
    if isinstance(rule, linear.Sum) and len(shapes) > 1:
        raise ModelError(
            f"a sum of values of shapes {sorted(shape[1:] for shape in shapes)} has no bounds.",
            remedy="Bring them to one shape before.",
        )


_COPIES = 20
"""Tensors of the size of a layer that are alive at once for each row of a backward pass, roughly."""


@torch.no_grad()
def hidden_boxes(nodes: Sequence[Node], ball: Box, memory_mb: int) -> dict[int, Box]:
    """Return boxes of the inputs of ReLUs behind other ReLUs, by position of the operation that computes them.

    From the first such ReLU to the last: each box is used for the layers behind it.

    **Guarantee.** Every deployed pass that starts in the ball has these values in their boxes: z_j >= 1·z_j + 0 and
    -z_j >= -1·z_j + 0 are linear bounds, and `lower_bounds` keeps them valid, rounding included (docs/guarantees/
    bounds.md, "Hidden boxes").
    """
    known: dict[int, Box] = {}
    for rule, inputs in nodes:
        if not isinstance(rule, ReLU) or inputs[0] in known:
            continue
        (source,) = inputs
        before = nodes[: source + 1]
        # Inputs of the first ReLUs gain nothing: intervals through one affine layer are exact, up to rounding.
        if any(isinstance(node.rule, ReLU) for node in before):
            known[source] = _tighten_last(list(propagate(before, ball, known=known)), memory_mb)
    return known


def _tighten_last(trace: Sequence[LayerBounds], memory_mb: int) -> Box:
    """Return the last box of a trace, tightened where a ReLU behind it is unstable; stable ones are exact already."""
    box = trace[-1].after
    low, high = box.low.flatten(1).clone(), box.high.flatten(1).clone()
    examples, values = ((low < 0) & (high > 0)).nonzero(as_tuple=True)
    largest = max(part.low[0].numel() for passed in trace for part in (passed.before, passed.after))
    rows_at_once = max(1, memory_mb * 2**20 // (8 * _COPIES * largest))
    for owner, value in zip(torch.split(examples, rows_at_once), torch.split(values, rows_at_once), strict=True):
        unit = torch.zeros(len(owner), low.shape[1], dtype=low.dtype, device=low.device)
        unit[torch.arange(len(owner), device=low.device), value] = 1
        low[owner, value] = _larger(low[owner, value], _lower_bounds_of(unit, owner, box, trace))
        high[owner, value] = -_larger(-high[owner, value], _lower_bounds_of(-unit, owner, box, trace))
    return Box(low.view_as(box.low), high.view_as(box.high))


def _lower_bounds_of(coefficients: Tensor, owner: Tensor, box: Box, trace: Sequence[LayerBounds]) -> Tensor:
    """Return lower bounds on these linear combinations of the last values of a trace."""
    rows = LinearBounds(coefficients.view(-1, *box.low.shape[1:]), coefficients.new_zeros(len(owner)), owner)
    return lower_bounds(rows, trace, LOWER_SLOPES["smaller area"])


def _larger(bound: Tensor, other: Tensor) -> Tensor:
    """Return the larger of two lower bounds; the first where the second is NaN."""
    return torch.where(other > bound, other, bound)


def margin_pairs(predictions: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return one row for each example and each class other than its prediction: the examples, and the classes."""
    others = torch.arange(classes - 1, device=predictions.device).expand(len(predictions), -1)
    owner = torch.arange(len(predictions), device=predictions.device).repeat_interleave(classes - 1)
    return owner, (others + (others >= predictions[:, None])).flatten()


def margin_rows(head: LayerBounds, owner: Tensor, predicted: Tensor, others: Tensor) -> LinearBounds:
    """Return the margins score(predicted) - score(other), row by row, in terms of the last hidden layer.

    Both scores share the hidden values, so bounding their difference is tighter than bounding each.
    """
    assert isinstance(head.rule, Dense)
    assert head.rounding is not None
    weight, bias = head.rule.weight, head.rule.bias
    constant = -head.rounding[owner, predicted] - head.rounding[owner, others]
    if bias is not None:
        constant = constant + (bias[predicted] - bias[others])
    return LinearBounds(weight[predicted] - weight[others], constant, owner)


_MAKERS: dict[type[nn.Module], Callable[..., Rule | Join]] = {
    Squash: lambda layer, device: Clamp(layer.slope, layer.thresholds),
    nn.Linear: lambda layer, device: Dense(layer),
    nn.Conv2d: lambda layer, device: Convolution(layer),
    nn.AvgPool2d: lambda layer, device: AveragePool(_pair(layer.kernel_size), _pair(layer.stride), device),
    nn.AdaptiveAvgPool2d: lambda layer, device: AdaptivePool(partial(graph.window_of, layer), device),
    nn.MaxPool2d: lambda layer, device: MaxPool(_pair(layer.kernel_size), _pair(layer.stride), _pair(layer.padding)),
    FrozenAffine: lambda layer, device: ChannelScaling(layer.scale, layer.shift),
    nn.Flatten: lambda layer, device: Flatten(),
    nn.ReLU: lambda layer, device: ReLU(),
    nn.Tanh: lambda layer, device: Tanh(),
    graph.Sum: lambda layer, device: linear.Sum(),
    graph.Concatenation: lambda layer, device: linear.Concatenation(),
}
"""Rules by exact class: a subclass may compute anything."""

_REQUIRED: dict[type[nn.Module], dict[str, object]] = {
    nn.Conv2d: {"groups": 1, "dilation": (1, 1), "padding_mode": "zeros"},
    nn.AvgPool2d: {"padding": (0, 0), "ceil_mode": False, "divisor_override": None},
    nn.MaxPool2d: {"ceil_mode": False, "dilation": (1, 1), "return_indices": False},
    nn.Flatten: {"start_dim": 1, "end_dim": -1},
}


def nodes_of(layers: nn.Module) -> list[Node]:
    """Return the rule of each operation; raise where an operation has none."""
    require_unaltered("the stack of layers" if graph.is_plain_stack(layers) else "the network", layers)
    operations = graph.operations_of(layers)
    last = operations[-1].layer if operations else None
    if type(last) is not nn.Linear or last.out_features < 2:
        raise ModelError(
            "the last layer has to be linear, with two classes or more.", remedy="End the network with nn.Linear."
        )
    for operation in operations:
        _require_known(operation.name, operation.layer)
    for name, layer in layers.named_modules():
        require_unaltered(f"layer '{name}'", layer)
    nodes: list[Node] = []
    # Identities are left out, so positions among the nodes differ from those among the operations.
    positions = {graph.INPUT: graph.INPUT}
    for index, operation in enumerate(operations):
        inputs = tuple(positions[source] for source in operation.inputs)
        if isinstance(operation.layer, nn.Identity):
            positions[index] = inputs[0]
        else:
            positions[index] = len(nodes)
            nodes.append(Node(_MAKERS[type(operation.layer)](operation.layer, last.weight.device), inputs))
    return nodes


def _require_known(name: str, layer: nn.Module) -> None:
    kind = type(layer)
    if kind is not nn.Identity and kind not in _MAKERS:
        known = ", ".join(
            known.__name__ for known in _MAKERS if known.__module__.startswith("torch.") or known is Squash
        )
        raise ModelError(f"layer '{name}' is {kind.__name__}: no bounds are known for it.", remedy=f"Use only {known}.")
    for setting, required in _REQUIRED.get(kind, {}).items():
        given = getattr(layer, setting)
        if given != required and not (isinstance(required, tuple) and (given, given) == required):
            raise ModelError(
                f"layer '{name}' is {kind.__name__} with {setting}={given}: no bounds are known for it.",
                remedy=f"Use {setting}={required}.",
            )
    if isinstance(layer, nn.Conv2d) and isinstance(layer.padding, str):
        raise ModelError(f"layer '{name}' has padding='{layer.padding}'.", remedy="Give the padding as a number.")
    if isinstance(layer, Squash) and not (0 < layer.slope < 1e30 and max(map(abs, layer.thresholds)) <= 2):
        raise ModelError(
            f"layer '{name}' has the slope {layer.slope:g} and thresholds {layer.thresholds}.",
            remedy="Give a positive slope and thresholds inside the range of inputs.",
        )
    tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
    for parameter, value in tensors.items():
        plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
        if not plain or value.dtype != torch.float32 or not bool(value.isfinite().all()):
            raise ModelError(
                f"the {parameter} of layer '{name}' is {value.dtype} in a {type(value).__name__}, or not finite.",
                why="The certificate is about passes in float32.",
                remedy="Call .float(), or train the network again.",
            )


def _pair(setting: int | tuple[int, int]) -> tuple[int, int]:
    return setting if isinstance(setting, tuple) else (setting, setting)
