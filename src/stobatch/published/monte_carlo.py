"""Monte Carlo over fresh noise (Appendix N), fast: the first layer is linear, so noise is pushed through it once.

conv(x + ν) = conv(x) + conv(ν): the input's part is computed once per input, the noise's part once per draw and
shared by all inputs of a tile. For each input the draws are independent; between inputs of one tile they are the
same, so errors of two certificates may coincide. Every certificate's own failure probability is unaffected.
`SoftVotes` is the same as a differentiable function, for attackers.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from math import ceil, log

import torch
from torch import Tensor

from stobatch.dp.noise import laplace
from stobatch.models import Network, ReferenceNorm, rows_in_memory
from stobatch.models.validators import keeps_nothing
from stobatch.paper import implements
from stobatch.published.radius import product_score
from stobatch.threads import count_workers, share_cores
from stobatch.votes.noise import SHARPNESS, Streams, split_generator

CPU_ROWS = 400
"""Rows of one pass on a CPU: enough to fill the cores, few enough to stay in the cache."""
_TILES_AHEAD = 16
"""Tiles whose noise is drawn before the first of them passes, at most."""


@implements(
    "Appendix N",
    verdict="a sound sampling scheme, but certificates must use the fresh scale b/ψ, not b; and deployment then "
    "contains χ1 and χ2, so the privacy claim is void for the artefact.",
)
@dataclass(frozen=True)
class FreshNoise:
    """Laplace noise drawn afresh in every invocation, ψ times smaller than the training noise it is added to."""

    input_scale: float
    hidden_scale: float

    @classmethod
    def shrunk(cls, input_noise_scale: float, hidden_noise_scale: float, shrinkage: float) -> FreshNoise:
        return cls(input_noise_scale / shrinkage, hidden_noise_scale / shrinkage)

    def draw(self, network: Network, count: int, streams: Streams) -> tuple[Tensor, Tensor]:
        """Draw `count` times for the input, and independently `count` times for the hidden layer."""
        encoder = network.encoder
        like = encoder.weight
        return (
            laplace((count, *encoder.input_shape), self.input_scale, streams[0]).to(like),
            laplace((count, *encoder.hidden_shape), self.hidden_scale, streams[1]).to(like),
        )


@dataclass(frozen=True)
class Tally:
    """What n draws said about each input: votes per class, and the sum of the product scores per class."""

    votes: Tensor
    scores: Tensor
    draws: int


@torch.no_grad()
def tally_products(
    network: Network, inputs: Tensor, noise: FreshNoise, draws: int, generator: torch.Generator, memory_mb: int
) -> Tally:
    """Count votes of argmax f^h · f^x over `draws` pairs of passes, in tiles of inputs x draws.

    Each pass randomises one layer only: f^x the input (hidden noise fixed), f^h the hidden layer (input noise fixed).
    The draws depend on the generator alone, not on the memory budget or on how many inputs there are.
    """
    streams, rows = split_generator(generator), rows_in_memory(network, memory_mb, most=CPU_ROWS)
    # Tiles of equal size: a small last tile would cost almost as much as a full one.
    images = ceil(len(inputs) / ceil(len(inputs) / rows))
    draws_at_once = max(1, rows // images)
    # Threads share the images of a tile, not its draws, so that sums over draws keep their order and bits.
    workers = min(images, count_workers(inputs.device, images * draws_at_once)) if keeps_nothing(network) else 1
    tiles = [slice(start, min(start + images, len(inputs))) for start in range(0, len(inputs), images)]
    # Threads wait for each other once in a block of draws, whose noise has at most a quarter of a tile's hidden values.
    ahead = 1 if workers == 1 else max(1, min(_TILES_AHEAD, rows // 4 // draws_at_once))
    block = ahead * draws_at_once
    with share_cores(workers) as run_all:
        scorer = ShiftScorer(network, inputs)
        shares = [_Share(copy(scorer), _parts(tiles, worker, workers)) for worker in range(workers)]
        for first in range(0, draws, block):
            last = min(first + block, draws)
            counts = [min(draws_at_once, last - start) for start in range(first, last, draws_at_once)]
            drawn = [noise.draw(network, count, streams) for count in counts]
            shifts = [(network.encoder(at_input), at_hidden) for at_input, at_hidden in drawn]
            run_all(partial(_Share.add, shifts=shifts), shares)
    votes = torch.zeros(len(inputs), network.num_classes, dtype=torch.int64, device=inputs.device)
    scores = torch.zeros(len(inputs), network.num_classes, dtype=torch.float64, device=inputs.device)
    for share in shares:
        for part, own_votes, own_scores in zip(share.parts, share.votes, share.scores, strict=True):
            votes[part], scores[part] = own_votes, own_scores
    return Tally(votes, scores, draws)


def _parts(tiles: list[slice], worker: int, workers: int) -> list[slice]:
    """Return the images of each tile that one of several threads has to itself."""
    cuts = ((tile.start, tile.stop - tile.start) for tile in tiles)
    parts = [slice(start + size * worker // workers, start + size * (worker + 1) // workers) for start, size in cuts]
    return [part for part in parts if part.start < part.stop]


class _Share:
    """Votes and scores of some of the images, counted by one thread in room of its own."""

    def __init__(self, scorer: ShiftScorer, parts: list[slice]) -> None:
        self.scorer, self.parts = scorer, parts
        self.votes: list[Tensor] = []
        self.scores: list[Tensor] = []

    def add(self, shifts: list[tuple[Tensor, Tensor]]) -> None:
        """Count what the images get under shifts by noise at the input, and by noise at the hidden layer."""
        for index, part in enumerate(self.parts):
            for through, at_hidden in shifts:
                product = product_score(self.scorer.scores(part, through), self.scorer.scores(part, at_hidden))
                votes = torch.nn.functional.one_hot(product.argmax(2), product.shape[2]).sum(0)
                scores = product.sum(0, dtype=torch.float64)
                if index == len(self.votes):
                    self.votes.append(votes)
                    self.scores.append(scores)
                else:
                    self.votes[index] = self.votes[index] + votes
                    self.scores[index] = self.scores[index] + scores


class ShiftScorer:
    """Class probabilities of fixed inputs under many shifts of the hidden layer.

    Where the first normalisation is affine, inputs and shifts are normalised before they are added, so that a pass
    over inputs x shifts costs one addition and the rest of the head.
    """

    def __init__(self, network: Network, inputs: Tensor) -> None:
        self.head = network.head
        self.base = network.noisy_hidden(inputs + network.input_noise)
        self.images = self.base.ndim == 4
        self.affine = isinstance(self.head.norm, ReferenceNorm)
        if self.affine:
            self.base = self.head.norm(self.base)
        self.base = self._channels_last(self.base)
        self._room: Tensor | None = None

    def scores(self, part: slice, shifts: Tensor) -> Tensor:
        """Return the probabilities (shifts, inputs, classes) of the inputs in `part`."""
        return self.logits(part, shifts).softmax(2)

    def logits(self, part: slice, shifts: Tensor) -> Tensor:
        """Return the same before they become probabilities."""
        base = self.base[part]
        if isinstance(self.head.norm, ReferenceNorm):
            shifts = self.head.norm.of_shift(shifts)
        hidden = self._sum(base, shifts)
        logits: Tensor = self.head.scores_of_normalised(hidden) if self.affine else self.head(hidden)
        return logits.reshape(len(shifts), len(base), -1)

    def _sum(self, base: Tensor, shifts: Tensor) -> Tensor:
        """Return every input plus every shift, as one batch, in room that is used again: fresh pages cost as much."""
        shape = (len(shifts), *base.shape)
        if self._room is None or self._room.shape != shape:
            self._room = base.new_empty(shape)
        torch.add(base.unsqueeze(0), self._channels_last(shifts).unsqueeze(1), out=self._room)
        total = self._room.flatten(0, 1)
        return total.permute(0, 3, 1, 2) if self.images else total

    def _channels_last(self, values: Tensor) -> Tensor:
        """Return images with their channels innermost, in memory too: convolutions are fastest so."""
        return values.permute(0, 2, 3, 1).contiguous() if self.images else values


PASSES_PER_DRAW = 2
"""One pass with fresh noise at the input, one with fresh noise at the hidden layer."""


@dataclass(frozen=True)
class SoftVotes:
    """Fresh draws of the product f^h · f^x as a differentiable function of the inputs.

    Both noises are shifts of the hidden layer, because the first layer is linear; so the gradient passes the encoder
    once, for any number of draws.
    """

    network: Network
    noise: FreshNoise

    def averaged_score(self, draws: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """Return the log of the mean product score, which the certificate is about."""
        products = self._products(draws, generator)
        return lambda points: products(points).logsumexp(0) - log(draws)

    def vote(self, draws: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """Return the log of the mean softened vote, in which each draw's winner gets nearly all of its weight."""
        products = self._products(draws, generator)
        return lambda points: (SHARPNESS * products(points)).log_softmax(2).logsumexp(0) - log(draws)

    def _products(self, draws: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """Return points to (draws, points, classes): the logarithms of the product scores."""
        network = self.network
        at_input, at_hidden = self.noise.draw(network, draws, split_generator(generator))
        with torch.no_grad():
            shifts = torch.cat([network.encoder(at_input), at_hidden])

        def log_products(points: Tensor) -> Tensor:
            hidden = network.noisy_hidden(points + network.input_noise)
            shifted = (hidden.unsqueeze(0) + shifts.unsqueeze(1)).flatten(0, 1)
            logs: Tensor = network.head(shifted).log_softmax(1).reshape(PASSES_PER_DRAW, draws, len(points), -1)
            return logs.sum(0)

        return log_products
