"""Experiments on public points that a network handed over has to pass before any data is read.

They find what would void a guarantee or surprise its owner: outputs that depend on the batch, state that is written, a
function that changes between training and evaluation, and inputs that are declared and ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stobatch.dp.clipping import perturbed_weights
from stobatch.dp.mixing import FEW_ROWS, SAME_SCORES, require_no_mixing_layers
from stobatch.errors import ModelError
from stobatch.models.classifier import Classifier
from stobatch.models.handed_over import HandedOver, public_points
from stobatch.models.replacements import refuse_dropout
from stobatch.models.validators import require_per_example, unchanged

MOST_IGNORED = 0.25
"""Of the rows, or the columns, of a picture: the last ones, that a stride leaves out, are nothing to complain of."""

_LOOKS = 8
"""Public points at which an input may show that it matters."""


def require_function(network: HandedOver, rows: int) -> None:
    """Raise unless the network is one function of each example, the same in any batch up to `rows` and in any mode.

    Experiments can miss what happens at other points only; what they find is a fact.
    """
    require_no_mixing_layers(network.module, remedy="Replace it: stobatch.models.fix(module).")
    _refuse_dropout(network)
    for training in (True, False):
        with _in_mode(network, training=training):
            for count in _sizes(rows):
                require_per_example(network, count)
    with torch.no_grad(), unchanged(network):
        _require_same_in_modes(network)
        _require_same_in_batches(network, rows)
        _require_whole_input(network)


def _sizes(rows: int) -> list[int]:
    """Powers of four, and `rows` itself: what happens above some size happens at one of them."""
    sizes = [FEW_ROWS]
    while sizes[-1] * 4 < rows:
        sizes.append(sizes[-1] * 4)
    return [*sizes, rows] if rows > FEW_ROWS else sizes


def _refuse_dropout(network: Classifier) -> None:
    for name, layer in network.named_modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            refuse_dropout(name.removeprefix("module."), layer, "stobatch.models.fix(module, dropout='remove')")


@contextmanager
def _in_mode(network: nn.Module, *, training: bool) -> Iterator[None]:
    before = {module: module.training for module in network.modules()}
    network.train(training)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def _differ(one: Tensor, other: Tensor) -> bool:
    one, other = one.nan_to_num(), other.nan_to_num()
    return one.shape != other.shape or not bool((one - other).abs().max() <= SAME_SCORES * 10 * one.abs().max())


def _require_same_in_modes(network: Classifier) -> None:
    points, scores = public_points(network, 2 * FEW_ROWS), []
    for training in (True, False):
        with _in_mode(network, training=training):
            scores.append(network(points.clone()))
    if _differ(*scores):
        raise ModelError(
            "your network gives other scores in evaluation than in training.",
            why="What is trained would not be the function that is deployed, and certificates are of that one.",
            remedy="Let its forward not look at `training`; stobatch.models.fix(module) replaces the usual layers.",
        )


def _require_same_in_batches(network: Classifier, rows: int) -> None:
    for count in _sizes(rows):
        points = public_points(network, count)
        few = points[:FEW_ROWS]
        if _differ(torch.cat([network(one.clone()) for one in torch.split(few, 1)]), network(points)[: len(few)]):
            raise ModelError(
                f"your network gives an example other scores in a batch of {count} than alone.",
                why="Every guarantee is about one example, whatever stands beside it.",
                remedy="Let its forward not look at the size of the batch.",
            )


def _require_whole_input(network: Classifier) -> None:
    """Change one part of the input after the other, and see whether any score moves."""
    axes = ("channel", "row", "column") if len(network.input_shape) == 3 else ("value",)
    with perturbed_weights(network):
        for axis, name in enumerate(axes):
            ignored = _ignored(network, axis)
            share = len(ignored) / network.input_shape[axis]
            if ignored and (name in ("channel", "value") or share > MOST_IGNORED):
                raise ModelError(
                    f"your network ignores part of its input: {name} {ignored[0]} changes no score"
                    + (f", nor do {len(ignored) - 1} others." if len(ignored) > 1 else "."),
                    why=f"The data are {network.input_shape}. What is ignored costs nothing here, but somebody meant "
                    "it to be looked at.",
                    remedy="Give data without it, or let the network read it.",
                )


def _ignored(network: Classifier, axis: int) -> list[int]:
    points, others = public_points(network, _LOOKS), public_points(network, _LOOKS, seed=2)
    expected = network(points.clone())
    least = 1e-6 * expected.abs().max()
    found = []
    for part in range(network.input_shape[axis]):
        changed = points.clone()
        changed.select(axis + 1, part).copy_(others.select(axis + 1, part))
        if bool((network(changed) - expected).abs().max() <= least):
            found.append(part)
    return found
