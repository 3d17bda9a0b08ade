"""Layers that no guarantee allows, replaced by ones that it does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn

from stobatch.dp.mixing import mixing_layers
from stobatch.errors import ModelError
from stobatch.models.network import group_norm


class FrozenAffine(nn.Module):
    """scale·x + shift, channel by channel: what a batch normalisation with fixed statistics computes. Nothing trains.

    **Guarantee.** It mixes no examples, reads no data, and rounds twice: bounds follow it (docs/guarantees/bounds.md).
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("shift", shift.detach().clone())

    @classmethod
    def of(cls, layer: nn.modules.batchnorm._BatchNorm) -> FrozenAffine:
        """Return what the layer computes in evaluation: with its running statistics, its weight and its bias."""
        mean, variance = layer.running_mean, layer.running_var
        if mean is None or variance is None:
            raise ModelError(
                f"a {type(layer).__name__} without running statistics cannot be frozen.",
                why="It takes those of the batch, also in evaluation.",
                remedy="Use stobatch.models.fix(module, batch_norm='group').",
            )
        scale = (variance.double() + layer.eps).rsqrt()
        shift = torch.zeros_like(scale)
        if layer.affine:
            scale, shift = scale * layer.weight.detach().double(), layer.bias.detach().double()
        return cls(scale.to(mean), (shift - mean.double() * scale).to(mean))

    def forward(self, values: Tensor) -> Tensor:
        channels = (-1, *(1,) * (values.dim() - 2))
        return values * self.scale.view(channels) + self.shift.view(channels)

    def extra_repr(self) -> str:
        return f"{len(self.scale)}"


def fix(
    module: nn.Module,
    *,
    batch_norm: Literal["group", "frozen"] = "group",
    dropout: Literal["refuse", "remove"] = "refuse",
) -> nn.Module:
    """Return a copy in which layers that no guarantee allows are replaced.

    Batch normalisation, which mixes examples, becomes a GroupNorm over the same channels; or with `frozen` the affine
    map that it is in evaluation, where its statistics and weights are public: learnt from public data, or fresh.
    Dropout is refused with the reason, or removed. Layers that overwrite their input get `inplace=False`, so that one
    backward pass is enough to clip.

    >>> fixed = fix(nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)))
    >>> [type(layer).__name__ for layer in fixed], fixed[2].inplace
    (['Conv2d', 'GroupNorm', 'ReLU'], False)
    """

    def replacement(name: str, layer: nn.Module) -> nn.Module:
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            if dropout == "refuse":
                refuse_dropout(name, layer, "fix(module, dropout='remove')")
            return nn.Identity()
        if mixing_layers(layer) == [""]:
            assert isinstance(layer, nn.modules.batchnorm._BatchNorm)
            return FrozenAffine.of(layer) if batch_norm == "frozen" else _group_norm(layer)
        if getattr(layer, "inplace", False) is True:
            layer.inplace = False  # type: ignore[assignment]
        return layer

    return _replaced("", copy.deepcopy(module), {}, replacement)


def refuse_dropout(name: str, layer: nn.Module, remedy: str) -> NoReturn:
    """Raise, with the reason."""
    raise ModelError(
        f"layer '{name}' is {type(layer).__name__}.",
        why="It draws numbers that no seed of the run covers, so no step could be repeated bit by bit, and what is "
        "trained is not the function that is deployed and certified. Clipping and noise regularise already.",
        remedy=f"Take it out: {remedy}.",
    )


def replace_batch_norm(module: nn.Module) -> nn.Module:
    """Return a copy with every batch normalisation replaced by a GroupNorm over the same channels."""
    return _replaced(
        "", copy.deepcopy(module), {}, lambda _, layer: _group_norm(layer) if mixing_layers(layer) == [""] else layer
    )


def _replaced(
    name: str,
    module: nn.Module,
    done: dict[nn.Module, nn.Module],
    replacement: Callable[[str, nn.Module], nn.Module],
) -> nn.Module:
    if module not in done:
        done[module] = replacement(name, module)
        for key, child in list(module._modules.items()):
            if child is not None:
                setattr(module, key, _replaced(f"{name}.{key}".removeprefix("."), child, done, replacement))
    return done[module]


def _group_norm(layer: nn.Module) -> nn.GroupNorm:
    channels = layer.num_features
    assert isinstance(channels, int)
    return group_norm(channels, on_maps=not isinstance(layer, nn.BatchNorm1d))
