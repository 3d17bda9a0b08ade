"""A network as maps of bounds, and boxes pushed through them from the input to the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stobatch.bounds import graph, linear
from stobatch.bounds.linear import (
    AdaptivePool,
    AveragePool,
    Box,
    ChannelScaling,
    Clamp,
    Convolution,
    Dense,
    Flatten,
    HyperbolicTangent,
    Join,
    LargestPool,
    Passed,
    Rectifier,
    Rows,
    Step,
)
from stobatch.errors import ModelError
from stobatch.models.layered import Squash
from stobatch.models.replacements import FrozenAffine
from stobatch.verifier import require_unaltered


class Node(NamedTuple):
    """An operation as a map of bounds, and where its values come from."""

    step: Step | Join
    inputs: tuple[int, ...]


_OF_MAPS = (Convolution, AveragePool, AdaptivePool, LargestPool)


def passes(
    steps: Sequence[Node],
    box: Box,
    signs: Mapping[int, Tensor] | None = None,
    known: Mapping[int, Box] | None = None,
) -> Iterator[Passed]:
    """Go through what each operation makes of the boxes before it.

    `signs` holds, by place of a ReLU, what its values are assumed to be: at least 0 (1), at most 0 (-1), or free (0).
    `known` holds, by place of an operation, boxes that its results lie in for another reason (`bounds.hidden_boxes`).
    """
    boxes = {graph.INPUT: box}
    for place, (step, inputs) in enumerate(steps):
        box, *others = parts = [boxes[source] for source in inputs]
        if isinstance(step, Dense) and box.low.dim() != 2:
            shape = "x".join(map(str, box.low.shape[1:]))
            raise ModelError(f"a linear layer is given {shape} values.", remedy="Put nn.Flatten() before it.")
        if isinstance(step, _OF_MAPS) and box.low.dim() != 4:
            shape = "x".join(map(str, box.low.shape[1:]))
            raise ModelError(
                f"a layer of pictures is given {shape} values.",
                why="Of three axes it takes the first for channels, and examples would reach each other.",
                remedy="Give inputs of channels x height x width.",
            )
        if isinstance(step, Join):
            _require_same_shape(step, parts)
            passed = Passed(step, box, *step.join(parts), inputs, tuple(parts))
        else:
            assert not others
            if signs is not None and place in signs:
                box = box.half(signs[place])
            passed = replace(step.forward(box), inputs=inputs)
        if known is not None and place in known:
            passed = replace(passed, after=passed.after.within(known[place]))
        yield passed
        boxes[place] = passed.after


def _require_same_shape(step: Join, parts: list[Box]) -> None:
    shapes = {tuple(part.low.shape) for part in parts}
    if isinstance(step, linear.Sum) and len(shapes) > 1:
        raise ModelError(
            f"a sum of values of shapes {sorted(shape[1:] for shape in shapes)} has no bounds.",
            remedy="Bring them to one shape before.",
        )


def other_classes(predictions: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return each example as often as there are other classes than the predicted one, and those."""
    others = torch.arange(classes - 1, device=predictions.device).expand(len(predictions), -1)
    owner = torch.arange(len(predictions), device=predictions.device).repeat_interleave(classes - 1)
    return owner, (others + (others >= predictions[:, None])).flatten()


def leads(head: Passed, owner: Tensor, named: Tensor, others: Tensor) -> Rows:
    """Return the named class's score less the other one's, row by row, in terms of the last hidden layer."""
    assert isinstance(head.step, Dense)
    assert head.rounding is not None
    weight, bias = head.step.weight, head.step.bias
    constant = -head.rounding[owner, named] - head.rounding[owner, others]
    if bias is not None:
        constant = constant + (bias[named] - bias[others])
    return Rows(weight[named] - weight[others], constant, owner)


_MAKERS: dict[type[nn.Module], Callable[..., Step | Join]] = {
    Squash: lambda layer, device: Clamp(layer.slope, layer.thresholds),
    nn.Linear: lambda layer, device: Dense(layer),
    nn.Conv2d: lambda layer, device: Convolution(layer),
    nn.AvgPool2d: lambda layer, device: AveragePool(_pair(layer.kernel_size), _pair(layer.stride), device),
    nn.AdaptiveAvgPool2d: lambda layer, device: AdaptivePool(partial(graph.window_of, layer), device),
    nn.MaxPool2d: lambda layer, device: LargestPool(
        _pair(layer.kernel_size), _pair(layer.stride), _pair(layer.padding)
    ),
    FrozenAffine: lambda layer, device: ChannelScaling(layer.scale, layer.shift),
    nn.Flatten: lambda layer, device: Flatten(),
    nn.ReLU: lambda layer, device: Rectifier(),
    nn.Tanh: lambda layer, device: HyperbolicTangent(),
    graph.Sum: lambda layer, device: linear.Sum(),
    graph.Concatenation: lambda layer, device: linear.Concatenation(),
}
"""Of these classes themselves: a subclass may compute anything."""

_REQUIRED: dict[type[nn.Module], dict[str, object]] = {
    nn.Conv2d: {"groups": 1, "dilation": (1, 1), "padding_mode": "zeros"},
    nn.AvgPool2d: {"padding": (0, 0), "ceil_mode": False, "divisor_override": None},
    nn.MaxPool2d: {"ceil_mode": False, "dilation": (1, 1), "return_indices": False},
    nn.Flatten: {"start_dim": 1, "end_dim": -1},
}


def steps_of(layers: nn.Module) -> list[Node]:
    """Return the operations as maps of bounds, or why there are none."""
    require_unaltered("the stack of layers" if graph.is_plain_stack(layers) else "the network", layers)
    operations = graph.operations_of(layers)
    last = operations[-1].layer if operations else None
    if type(last) is not nn.Linear or last.out_features < 2:
        raise ModelError(
            "the last layer has to be linear, with two classes or more.", remedy="End the network with nn.Linear."
        )
    for operation in operations:
        _refuse_unknown(operation.name, operation.layer)
    for name, layer in layers.named_modules():
        require_unaltered(f"layer '{name}'", layer)
    steps: list[Node] = []
    places = {graph.INPUT: graph.INPUT}
    for place, operation in enumerate(operations):
        inputs = tuple(places[source] for source in operation.inputs)
        if isinstance(operation.layer, nn.Identity):
            places[place] = inputs[0]
        else:
            places[place] = len(steps)
            steps.append(Node(_MAKERS[type(operation.layer)](operation.layer, last.weight.device), inputs))
    return steps


def _refuse_unknown(name: str, layer: nn.Module) -> None:
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
    held = dict(layer.named_parameters()) | dict(layer.named_buffers())
    for parameter, value in held.items():
        plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
        if not plain or value.dtype != torch.float32 or not bool(value.isfinite().all()):
            raise ModelError(
                f"the {parameter} of layer '{name}' is {value.dtype} in a {type(value).__name__}, or not finite.",
                why="The certificate is about passes in float32.",
                remedy="Call .float(), or train the network again.",
            )


def _pair(setting: int | tuple[int, int]) -> tuple[int, int]:
    return setting if isinstance(setting, tuple) else (setting, setting)
