"""The function that the paper's authors attacked in place of the one they evaluated."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

from stobatch.errors import ModelError
from stobatch.models.classifier import Classifier
from stobatch.models.network import Network
from stobatch.models.normalisation import ReferenceNorm

_SWITCHED_OFF = (ReferenceNorm, nn.BatchNorm1d, nn.BatchNorm2d)

M = TypeVar("M", bound=nn.Module)


class NoiseFreeSurrogate(nn.Module):
    """A copy without χ1 and χ2, without batch or reference normalisation, without the bound on the last hidden layer.

    This is the released code's attack head: its batch normalisation ran with statistics that were never updated, which
    switches it off. It shares the weights with the deployed function and little else. A network of another kind has no
    χ1, no χ2 and no such bound: there the copy is the network itself, but for the same normalisations.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        if not isinstance(network, Classifier):
            raise ModelError(
                f"a {type(network).__name__} has no noise-free copy to attack.",
                why="The published protocol copies the library's classifiers.",
                remedy="Set evaluation.protocols=adaptive.",
            )
        self.layers = nn.Sequential(*_without_noise(network))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layers(inputs)
        return scores


def _without_noise(network: Classifier) -> tuple[nn.Module, ...]:
    if not isinstance(network, Network):
        return (_without_norms(network),)
    head = _without_norms(network.head)
    return copy.deepcopy(network.encoder), head.norm, head.body, head.output


def _without_norms(module: M) -> M:
    """A copy in which normalisations by a batch or by reference images do nothing."""
    copied = copy.deepcopy(module)
    for path, part in list(copied.named_modules(remove_duplicate=False)):
        if isinstance(part, _SWITCHED_OFF):
            parent, _, name = path.rpartition(".")
            setattr(copied.get_submodule(parent), name, nn.Identity())
    return copied
