"""Refuse networks in which one example can reach another's output, and mend what can be mended.

Every guarantee of this library is about one example: a sensitivity, a clipped gradient, a certified radius. A layer
that mixes examples voids them all at once, so it is looked for by type and by experiment.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from stobatch.errors import ModelError
from stobatch.models.classifier import Classifier

_MIXING = (nn.modules.batchnorm._BatchNorm,)


def mixing_layers(module: nn.Module) -> list[str]:
    """Names of layers whose outputs depend on the whole batch."""
    return [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, _MIXING)
        and (not isinstance(layer, nn.modules.instancenorm._InstanceNorm) or layer.track_running_stats)
    ]


def replace_batch_norm(module: nn.Module) -> nn.Module:
    """A copy with every batch normalisation replaced by a GroupNorm over the same channels."""
    return _replaced(copy.deepcopy(module), {})


def _replaced(module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
    if module not in done:
        done[module] = _group_norm(module) if mixing_layers(module) == [""] else module
        for name, child in list(module._modules.items()):
            if child is not None:
                setattr(module, name, _replaced(child, done))
    return done[module]


def _group_norm(layer: nn.Module) -> nn.GroupNorm:
    channels = layer.num_features
    assert isinstance(channels, int)
    # A group of one value normalises to zero, so vectors get one group of all.
    on_vectors = isinstance(layer, nn.BatchNorm1d)
    groups = 1 if on_vectors else next(g for g in (8, 4, 2, 1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)


def require_per_example(network: Classifier) -> None:
    """Raise unless every output depends on its own input alone."""
    for name in mixing_layers(network):
        layer = type(network.get_submodule(name)).__name__
        raise ModelError(
            f"layer '{name}' is {layer}: each output depends on the whole batch, so no per-example bound exists.",
            remedy="Set model.normalisation to reference or group, or use stobatch.models.replace_batch_norm(module).",
        )
    generator = torch.Generator().manual_seed(1)
    # Small inputs, so that a replacement at the edge of the range becomes the batch's extreme.
    probe = (torch.rand(4, *network.input_shape, generator=generator) - 0.5).to(network.device, network.dtype) / 10
    with torch.no_grad():
        expected = network(probe)[1:]
        for replacement in (
            -probe[0],
            torch.ones_like(probe[0]),
            -torch.ones_like(probe[0]),
            torch.zeros_like(probe[0]),
        ):
            other = probe.clone()
            other[0] = replacement
            if not torch.equal(network(other)[1:], expected):
                raise ModelError(
                    "changing one example of a batch changes another example's output.",
                    why="Some layer mixes examples or draws random numbers, so no per-example bound exists.",
                    remedy="Remove that layer (dropout, batch statistics, mixing) or make it work on single examples.",
                )
