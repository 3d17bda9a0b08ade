"""Which parameters of a network are trained; the others, and all buffers, stay as they are.

What is not trained gets no gradient, takes no room in clipping, and no noise. It is saved with the rest, and a training
that finds it moved refuses to save (`validators.SavedState`).
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import torch
from torch import nn

from stobatch.config import ModelConfig
from stobatch.dp.plan import TrainedPart
from stobatch.errors import ModelError, SettingError
from stobatch.models.handed_over import HandedOver
from stobatch.models.low_rank import Adapted, adapt, adapter_size

_LAST = re.compile(r"last-([1-9]\d{0,3})")


def own_module(network: nn.Module) -> nn.Module:
    """Return the module whose names are those of the weights in a run: of one handed over, the module itself."""
    return network.module if isinstance(network, HandedOver) else network


def choose_parts(network: nn.Module, config: ModelConfig, generator: torch.Generator) -> None:
    """Freeze what the settings do not name, and give it adapters where they ask for them; in place.

    Without settings, a network that was handed over is trained where its own parameters require gradients.
    """
    network = own_module(network)
    if config.train_only is not None or config.adapter_rank:
        names = _named(network, config.train_only or "head")
        for name, p in network.named_parameters():
            p.requires_grad_(name in names)
    if config.adapter_rank:
        _add_adapters(network, config.adapter_rank, generator)
    if not any(p.requires_grad for p in network.parameters()):
        raise ModelError(
            "no parameter of the network is trained.",
            why="All of them have requires_grad=False.",
            remedy="Let one of them have requires_grad=True, or set model.train_only=head.",
        )


def describe_parts(network: nn.Module) -> TrainedPart | None:
    """Return what is trained of a network as it is now; None where it is all of it."""
    network = own_module(network)
    own = dict(network.named_parameters())
    trained = {name: p for name, p in own.items() if p.requires_grad}
    if len(trained) == len(own):
        return None
    beside = {id(p) for layer in network.modules() if isinstance(layer, Adapted) for p in (layer.up, layer.down)}
    return TrainedPart(
        tuple(trained),
        sum(p.numel() for p in trained.values()),
        sum(p.numel() for p in own.values() if id(p) not in beside),
    )


def layers_with_parameters(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers that hold parameters of their own, in the order in which modules name them."""
    return [
        (name, layer)
        for name, layer in network.named_modules()
        if next(layer.parameters(recurse=False), None) is not None
    ]


def last_layer(network: nn.Module) -> frozenset[str]:
    """Return the names of the last layer's parameters: those that belong to classes."""
    return _parameters_of(layers_with_parameters(own_module(network))[-1:])


def _parameters_of(layers: list[tuple[str, nn.Module]]) -> frozenset[str]:
    return frozenset(
        f"{prefix}.{name}".removeprefix(".")
        for prefix, layer in layers
        for name, _ in layer.named_parameters(recurse=False)
    )


def _named(network: nn.Module, wanted: str) -> frozenset[str]:
    """Return the parameters that `model.train_only` names."""
    layers = layers_with_parameters(network)
    if wanted == "head":
        return last_layer(network)
    if match := _LAST.fullmatch(wanted):
        if int(match[1]) > len(layers):
            raise SettingError(
                f"model.train_only={wanted} asks for more layers than the {len(layers)} that have parameters.",
                remedy=f"Use last-{len(layers)} at most, or leave it unset to train all of them.",
            )
        return _parameters_of(layers[-int(match[1]) :])
    names = [name for name, _ in network.named_parameters()]
    found: set[str] = set()
    for pattern in (part.strip() for part in wanted.split(",")):
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise SettingError(
                f"model.train_only={wanted}: no parameter has a name like '{pattern}'.",
                why=f"The network has {shown}.",
                remedy="Use head, last-2, or patterns such as layers.4.*.",
            )
        found |= matched
    return frozenset(found)


def _add_adapters(network: nn.Module, rank: int, generator: torch.Generator) -> None:
    fitting = [
        layer
        for _, layer in layers_with_parameters(network)
        if adapter_size(layer, rank) is not None and not layer.get_parameter("weight").requires_grad
    ]
    if not fitting:
        raise SettingError(
            f"model.adapter_rank={rank} fits no layer that is not trained.",
            why="An adapter stands beside a linear layer or a plain convolution, and has fewer values than its weight.",
            remedy="Lower model.adapter_rank, or leave it out and set model.train_only alone.",
        )
    for layer in fitting:
        adapt(layer, rank, generator)
