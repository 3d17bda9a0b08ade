"""Normalisation as a stated choice: by public reference images, by groups of channels, or none.

The paper is silent; the released code normalises with the statistics of whatever batch it is fed, which makes every
output depend on the whole batch. `ReferenceNorm` does the same job with a fixed set of public random images instead
of the batch, so that an output depends on its own input and the parameters alone (docs/decisions/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

NUM_ANCHORS = 64
_VARIANCE_FLOOR = 1e-6


class ReferenceNorm(nn.Module):
    """Subtract, unit by unit, the mean over public reference images and divide by their overall spread.

    **Guarantee.** Between two calibrations this is a fixed affine map: it mixes no examples and reads no data. The
    statistics are functions of the parameters, the private noise and public images. They reveal that noise, so they
    are no part of `state_dict()` and are taken anew whenever a network is loaded.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, unit_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.calibrating, self.overwrites = False, False
        self.register_buffer("mean", torch.zeros(unit_shape), persistent=False)
        self.register_buffer("spread", torch.ones(()), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        if self.calibrating:
            self.mean = torch.empty_like(values[:1]).copy_(values.mean(0, keepdim=True))[0]
            self.spread = (values - self.mean).square().mean().add(_VARIANCE_FLOOR).sqrt()
        return (values.sub_(self.mean) if self.overwrites else values - self.mean).div_(self.spread)

    def of_shift(self, shift: Tensor) -> Tensor:
        """What a shift of the values becomes: the map is affine between calibrations."""
        return shift / self.spread


def anchors(input_shape: tuple[int, ...]) -> Tensor:
    """Public reference images: uniform noise from a fixed generator, the same for everyone."""
    return torch.rand(NUM_ANCHORS, *input_shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


@contextmanager
def calibrating(network: nn.Module) -> Iterator[bool]:
    """Let every `ReferenceNorm` take its statistics from what passes through it in the block."""
    layers = [module for module in network.modules() if isinstance(module, ReferenceNorm)]
    for layer in layers:
        layer.calibrating = True
    try:
        with torch.no_grad():
            yield bool(layers)
    finally:
        for layer in layers:
            layer.calibrating = False


def _groups(channels: int) -> int:
    return next(groups for groups in (8, 4, 2, 1) if channels % groups == 0)


def _batch_norm(shape: tuple[int, ...]) -> nn.Module:
    return nn.BatchNorm2d(shape[0]) if len(shape) == 3 else nn.BatchNorm1d(shape[0])


NORMALISATIONS: dict[str, Callable[[tuple[int, ...]], nn.Module]] = {
    "reference": ReferenceNorm,
    "group": lambda shape: nn.GroupNorm(_groups(shape[0]) if len(shape) == 3 else 1, shape[0]),
    "none": lambda shape: nn.Identity(),
    "batch": _batch_norm,
}
"""Makes a normalisation layer for units of the given shape."""
