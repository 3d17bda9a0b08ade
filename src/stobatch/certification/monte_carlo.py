"""Monte Carlo over fresh noise (Appendix N), fast: the first layer is linear, so noise is pushed through it once.

conv(x + ν) = conv(x) + conv(ν): the input's part is computed once per input, the noise's part once per draw and shared
by all inputs of a tile. For each input the draws are independent; between inputs of one tile they are the same, so
errors of two certificates may coincide. Every certificate's own failure probability is unaffected.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from stobatch.certification.composition import product_score
from stobatch.models import Network
from stobatch.paper import implements
from stobatch.privacy.noise import laplace

_CPU_ROWS = 512
"""Rows of one pass on a CPU: enough to fill the cores, few enough to stay in the cache."""


@implements(
    "Appendix N",
    verdict="a sound sampling scheme, but certificates must use the fresh scale b/ψ, not b; and deployment then "
    "contains χ1 and χ2, so the privacy claim is void for the artefact.",
)
@dataclass(frozen=True)
class FreshNoise:
    """Laplace noise drawn anew for every invocation, ψ times smaller than the training noise it is added to."""

    input_scale: float
    hidden_scale: float

    @classmethod
    def shrunk(cls, input_noise_scale: float, hidden_noise_scale: float, shrinkage: float) -> FreshNoise:
        return cls(input_noise_scale / shrinkage, hidden_noise_scale / shrinkage)

    def draw(self, network: Network, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`count` draws for the input and `count` independent ones for the hidden layer."""
        encoder = network.encoder
        like = encoder.weight
        return (
            laplace((count, *encoder.input_shape), self.input_scale, generator).to(like),
            laplace((count, *encoder.hidden_shape), self.hidden_scale, generator).to(like),
        )


@dataclass(frozen=True)
class Tally:
    """What n draws said about each input: votes per class, and the sum of the product scores per class."""

    votes: Tensor
    scores: Tensor
    draws: int


def rows_in_memory(network: Network, memory_mb: int) -> int:
    """How many rows of hidden activations fit the budget; about six copies of the widest layer are alive at once."""
    per_row = 6 * 4 * prod(network.encoder.hidden_shape)
    rows = max(1, memory_mb * 2**20 // per_row)
    return min(rows, _CPU_ROWS) if network.encoder.weight.is_cpu else rows


@torch.no_grad()
def tally_products(
    network: Network, inputs: Tensor, noise: FreshNoise, draws: int, generator: torch.Generator, memory_mb: int
) -> Tally:
    """Vote with argmax f^h · f^x over `draws` pairs of passes, in tiles of inputs x draws.

    Each pass randomises one layer only: f^x the input (hidden noise fixed), f^h the hidden layer (input noise fixed).
    """
    base = network.noisy_hidden(inputs + network.input_noise)
    votes = torch.zeros(len(inputs), network.num_classes, dtype=torch.int64, device=base.device)
    scores = torch.zeros(len(inputs), network.num_classes, dtype=torch.float64, device=base.device)
    rows = rows_in_memory(network, memory_mb)
    images = min(len(inputs), rows)
    draws_at_once = max(1, rows // images)
    for first in range(0, draws, draws_at_once):
        count = min(draws_at_once, draws - first)
        at_input, at_hidden = noise.draw(network, count, generator)
        through = network.encoder(at_input)
        for start in range(0, len(inputs), images):
            part = slice(start, start + images)
            product = product_score(_scores(network, base[part], through), _scores(network, base[part], at_hidden))
            product = product.reshape(-1, count, network.num_classes)
            winners = product.argmax(2)
            votes[part] += torch.nn.functional.one_hot(winners, network.num_classes).sum(1)
            scores[part] += product.sum(1, dtype=torch.float64)
    return Tally(votes, scores, draws)


def _scores(network: Network, base: Tensor, shifts: Tensor) -> Tensor:
    """Class probabilities of every input under every shift of the hidden layer: (inputs x shifts, classes)."""
    hidden = (base.unsqueeze(1) + shifts.unsqueeze(0)).flatten(0, 1)
    scores: Tensor = network.head(hidden)
    return scores.softmax(1)
