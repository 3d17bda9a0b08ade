"""A step without any privacy: a random batch, and the mean gradient of its losses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.config import RunConfig
from stobatch.data import DatasetInfo, TrainingExamples
from stobatch.errors import SettingError
from stobatch.models import Classifier, rows_in_memory
from stobatch.objectives.private import Coins, coins_by_blocks
from stobatch.seeds import Seeds
from stobatch.training import Trainable
from stobatch.training.engines import Gradients, TrainerTask
from stobatch.training.loop import OPTIMISERS
from stobatch.training.pieces import PIECES, Share, cut
from stobatch.training.reading import Reader

_CPU_CHUNK = 833
"""Examples of one pass on a CPU; larger chunks fall out of the cache."""


def require_batches(info: DatasetInfo, batch_size: int, batches: int) -> None:
    """Raise unless so many batches of distinct examples fit the data."""
    if batches * batch_size > info.num_train:
        counted = {1: "a batch", 2: "two batches"}[batches]
        raise SettingError(
            f"{counted} of {batch_size} do not fit {info.num_train} examples.", remedy="Lower method.batch_size."
        )


class OpenTrainable(Trainable):
    """Stochastic gradient descent on cross-entropy."""

    monitored = "weight_norm"
    claims_privacy = False

    def __init__(
        self,
        network: Classifier,
        train: TrainingExamples,
        seeds: Seeds,
        *,
        batch_size: int,
        memory_mb: int,
        pieces: int = PIECES,
    ) -> None:
        self.network, self.seeds, self.batch_size, self.pieces = network, seeds, batch_size, pieces
        self.num_examples, self.reader = len(train), Reader(train, network.device, network.dtype)
        self.chunk = rows_in_memory(network, memory_mb, most=_CPU_CHUNK)
        self.after_update()

    def optimisers(self, config: RunConfig) -> list[torch.optim.Optimizer]:
        rule = OPTIMISERS[config.training.optimiser]
        return [rule(self.network.parameters(), lr=config.training.learning_rate)]  # type: ignore[call-arg]

    def monitor(self, step: int) -> float:
        return float(torch.cat([p.detach().flatten() for p in self.network.parameters()]).norm())

    def tasks(self, step: int) -> list[TrainerTask]:
        return [TrainerTask(trainer=0, benign_batch=0, adversarial_batch=0)]

    def after_update(self) -> None:
        self.network.calibrate()

    def save_private(self, run: Path, config_hash: str) -> None:
        """Nothing is private here."""

    def ready(self, share: Share) -> None:
        """Batches are drawn from all of the data, so every device may read every shard."""
        self.reader.examples.require()

    def order(self, step: int) -> Tensor:
        """The examples in the random order of a step; its batches stand at the beginning."""
        return torch.randperm(self.num_examples, generator=self.seeds.generator("step", step, "trainer", 0))

    def parts(self, task: TrainerTask, step: int, share: Share) -> Iterator[Gradients]:
        batch = self.order(step)[: self.batch_size]
        for number, piece in enumerate(cut(len(batch), self.chunk, self.network.device, share, self.pieces)):
            if share.takes(number):
                stream = partial(self.seeds.generator, "step", step, "noise")
                coins = coins_by_blocks(stream, piece, self.network.device)
                inputs, labels = self.reader.fetch(batch[piece])
                yield self.weighted(self.scores(inputs, coins), labels, 1 / self.batch_size)

    def scores(self, inputs: Tensor, coins: Coins) -> Tensor:
        """Of some examples as training sees them; the coins are theirs alone."""
        found: Tensor = self.network(inputs)
        return found

    def weighted(self, scores: Tensor, labels: Tensor, weight: float) -> Gradients:
        """The gradient of the cross-entropy of some examples, each with this weight."""
        loss, parameters = weight * F.cross_entropy(scores, labels, reduction="sum"), self.parameters
        return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
