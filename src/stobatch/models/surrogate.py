"""The function that the paper's authors attacked in place of the one they evaluated."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from stobatch.errors import ModelError
from stobatch.models.network import Network
from stobatch.models.normalisation import ReferenceNorm

_SWITCHED_OFF = (ReferenceNorm, nn.BatchNorm1d, nn.BatchNorm2d)


class NoiseFreeSurrogate(nn.Module):
    """A copy without χ1 and χ2, without normalisation and without the bound on the last hidden layer.

    This is the released code's attack head: its batch normalisation ran with statistics that were never updated, which
    switches it off. It shares the weights with the deployed function and little else.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        if not isinstance(network, Network):
            raise ModelError(
                f"a {type(network).__name__} has no noise-free copy to attack.",
                why="The published protocol is the released code's test of the paper's networks.",
                remedy="Set evaluation.protocols=adaptive.",
            )
        self.encoder, self.head = copy.deepcopy(network.encoder), copy.deepcopy(network.head)
        for path, module in list(self.head.named_modules(remove_duplicate=False)):
            if isinstance(module, _SWITCHED_OFF):
                parent, _, name = path.rpartition(".")
                setattr(self.head.get_submodule(parent), name, nn.Identity())

    def forward(self, inputs: Tensor) -> Tensor:
        last_hidden = self.head.body(self.head.norm(self.encoder(inputs)))
        scores: Tensor = self.head.output(last_hidden)
        return scores
