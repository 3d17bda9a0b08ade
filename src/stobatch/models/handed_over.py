"""A torch module of somebody's own as a classifier: sizes by a public probe, weights by its own names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stobatch.errors import ModelError
from stobatch.models.classifier import Classifier

PROBES = 2
"""Examples of the first pass: two, so that a score per class can be told from a score per batch."""


class HandedOver(Classifier):
    """Any module from a batch of inputs in [-1, 1] to one score per class. `module` is it, and all that is computed.

    Its state has the module's own names: what a run saves fits the module, and what the module saved fits here.
    """

    def __init__(self, module: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.module, self.input_shape, self._num_classes = module, input_shape, num_classes

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.module(inputs)
        return scores

    @property
    def num_classes(self) -> int:
        return self._num_classes

    @property
    def name(self) -> str:
        """The class of the module, for messages."""
        return type(self.module).__name__

    def state_dict(self, *args: Any, prefix: str = "", **options: Any) -> dict[str, Any]:  # type: ignore[override]
        found: dict[str, Any] = super().state_dict(*args, prefix=prefix, **options)
        own = f"{prefix}module."
        for key in [key for key in found if key.startswith(own)]:
            found[prefix + key.removeprefix(own)] = found.pop(key)
        return found

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        extra = set(self._buffers)
        inside = {(key if key in extra else f"module.{key}"): value for key, value in state_dict.items()}
        return super().load_state_dict(inside, strict, assign)


def hand_over(module: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> Classifier:
    """Return the module as a classifier of such inputs, itself if it is one; raises unless a public probe passes."""
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"your network is a {type(module).__name__}, not a torch module.", remedy="Hand over an nn.Module."
        )
    if isinstance(module, Classifier):
        return module
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise ModelError(
            f"your {type(module).__name__} has parameters whose shapes are still open.",
            remedy="Call it once on a batch of inputs, and hand it over then.",
        )
    if not any(parameter.is_floating_point() for parameter in module.parameters()):
        raise ModelError(f"your {type(module).__name__} has no parameters.", remedy="Hand over what can be trained.")
    network = HandedOver(module, tuple(input_shape), num_classes)
    _require_scores(network)
    return network


@torch.no_grad()
def _require_scores(network: HandedOver) -> None:
    try:
        scores = network(public_points(network, PROBES))
    except Exception as error:  # a forward of somebody's own raises anything
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise ModelError(
            f"your {network.name} does not take inputs of shape {network.input_shape}: {reason}.",
            why="It was given a public probe of two such inputs, in one batch.",
            remedy="Change its layers, or give data of the shape that they are made for.",
        ) from None
    wanted = (PROBES, network.num_classes)
    if not isinstance(scores, Tensor) or tuple(scores.shape) != wanted or not scores.is_floating_point():
        found = tuple(scores.shape) if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise ModelError(
            f"your {network.name} makes {found} of two inputs, not scores of shape {wanted}.",
            why=f"The data have {network.num_classes} classes, and every example needs a score for each.",
            remedy="End it with one unit per class, and return the scores alone.",
        )
    if not bool(scores.isfinite().all()):
        raise ModelError(f"your {network.name} gives scores that are not numbers.", remedy="Initialise its weights.")


def public_points(network: Classifier, count: int, seed: int = 1) -> Tensor:
    """Return points of [-1, 1] that have nothing to do with any data, where the network is."""
    points = torch.rand(count, *network.input_shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return points.to(network.device, network.dtype)
