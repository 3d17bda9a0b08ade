"""Hand a model to foolbox, ART or torchattacks: the function that is deployed, in the units each library expects.

A radius in the wrong units is a quietly wrong accuracy. foolbox and ART are told that inputs lie in [-1, 1] and take
radii over [-1, 1], as this library does; torchattacks knows only [0, 1], where the same radius is half as large.

**Guarantee.** Every adapter works on a frozen copy in evaluation mode: the fixed noise and the reference statistics are
in it, its logits are those of the model handed over, none of its parameters asks for a gradient, and nothing that a
library does to it (moving, training, changing modes) reaches the model handed over.
"""

from __future__ import annotations

import copy
import importlib
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from stobatch.errors import SettingError
from stobatch.loading import TrainedModel
from stobatch.models import Network
from stobatch.types import PAPER_RANGE, UNIT_RANGE


def as_foolbox(model: TrainedModel | nn.Module) -> Any:
    """Return a `foolbox.PyTorchModel` with bounds (-1, 1), for tensors on the model's own device.

    `epsilons` are radii over [-1, 1]: hand over `radius.to(PAPER_RANGE).size`.
    """
    foolbox = _import_package("foolbox", extra="foolbox")
    frozen = _freeze(model)
    return foolbox.PyTorchModel(frozen, bounds=(PAPER_RANGE.low, PAPER_RANGE.high), device=_device(frozen))


def as_art(model: TrainedModel | nn.Module, *, input_shape: tuple[int, ...] | None = None) -> Any:
    """Return an ART `PyTorchClassifier` with the cross-entropy loss and clip values (-1, 1), for NumPy arrays.

    `eps` and `eps_step` are sizes over [-1, 1]: hand over `radius.to(PAPER_RANGE).size`. A stobatch network knows the
    shape of its inputs; any other module needs `input_shape`, the shape of one input.
    """
    classification = _import_package("art.estimators.classification", extra="art")
    frozen = _freeze(model)
    if input_shape is None:
        if not isinstance(frozen, Network):
            raise SettingError(
                f"ART must be told the shape of one input, which a {type(frozen).__name__} does not know.",
                remedy="Give it, as in as_art(model, input_shape=(1, 28, 28)).",
            )
        input_shape = frozen.input_shape
    device = _device(frozen)
    with torch.no_grad():
        num_classes = frozen(torch.zeros(1, *input_shape, device=device)).shape[1]
    # ART puts a model on the current GPU, whichever it came on.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return classification.PyTorchClassifier(
            frozen,
            loss=nn.CrossEntropyLoss(),
            input_shape=input_shape,
            nb_classes=num_classes,
            clip_values=(PAPER_RANGE.low, PAPER_RANGE.high),
            device_type="gpu" if device.type == "cuda" else "cpu",
        )


def as_torchattacks(model: TrainedModel | nn.Module) -> nn.Module:
    """Return a module from inputs in [0, 1] to logits, the only kind that torchattacks can attack.

    Images go in as `(inputs + 1) / 2` and come back as `2 * images - 1`. A radius has to be converted too, in any norm:
    `eps` is `radius.to(UNIT_RANGE).size`, half of what it is over [-1, 1], and so is `alpha`.
    """
    _import_package("torchattacks", extra="torchattacks")
    return _FromUnitRange(_freeze(model))


class _FromUnitRange(nn.Module):
    """A network over [-1, 1], entered from [0, 1]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        scale = PAPER_RANGE.width / UNIT_RANGE.width
        logits: Tensor = self.network((images - UNIT_RANGE.low) * scale + PAPER_RANGE.low)
        return logits


def _freeze(model: TrainedModel | nn.Module) -> nn.Module:
    network = model.network if isinstance(model, TrainedModel) else model
    return copy.deepcopy(network).eval().requires_grad_(False)


def _device(module: nn.Module) -> torch.device:
    return next(chain(module.parameters(), module.buffers()), torch.empty(0)).device


def _import_package(name: str, *, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise SettingError(
            f"{extra} cannot be imported: {error}.", remedy=f'Install it: pip install "stobatch[{extra}]".'
        ) from None
