"""Plain training: no privacy, no robustness; the ceiling of accuracy, and the step of every method without privacy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.config import MethodConfig, RunConfig
from stobatch.data import DatasetInfo, TrainingExamples
from stobatch.dp.plan import OpenPlan, Plan
from stobatch.errors import SettingError
from stobatch.methods import UncertifiedMethod
from stobatch.models import Classifier, budget_mb, rows_in_memory
from stobatch.optimisers import OPTIMISERS
from stobatch.seeds import Seeds
from stobatch.settings import setting
from stobatch.sound.losses import NormalSampler, sampler_by_blocks
from stobatch.training import Trainable
from stobatch.training.engines import Gradients, TrainerTask
from stobatch.training.engines.base import PIECES, DeviceRank, split_rows
from stobatch.training.trainable import Reader


class PlainConfig(MethodConfig, name="plain"):
    """Cross-entropy on random batches."""

    batch_size: int = setting(256, at_least=1, doc="Examples of a step")


class Plain(UncertifiedMethod):
    """Ordinary training, of any network."""

    config_class = PlainConfig
    trains_parts = True
    title = "plain training"

    def plan(self, config: RunConfig, info: DatasetInfo, network: Classifier | None) -> OpenPlan:
        method = config.method
        assert isinstance(method, PlainConfig)
        require_batches(info, method.batch_size, batches=1)
        return OpenPlan(info.num_train, method.batch_size, self.title)

    def prepare(
        self, config: RunConfig, plan: Plan, network: Classifier, train: TrainingExamples, seeds: Seeds
    ) -> OpenTrainable:
        assert isinstance(config.method, PlainConfig)
        return OpenTrainable(
            network, train, seeds, batch_size=config.method.batch_size, memory_mb=budget_mb(config.machine),
            pieces=config.machine.pieces,
        )  # fmt: skip


_CPU_CHUNK = 833
"""Examples of one pass on a CPU; larger chunks fall out of the cache."""


def require_batches(info: DatasetInfo, batch_size: int, batches: int) -> None:
    """Raise unless all batches of distinct examples fit the data."""
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
        """Save nothing: nothing is private here."""

    def check_data(self, share: DeviceRank) -> None:
        """Accept any data: batches are drawn from all of them, so every device may read every shard."""
        self.reader.examples.require()

    def order(self, step: int) -> Tensor:
        """Return the examples in the random order of a step; its batches stand at the beginning."""
        return torch.randperm(self.num_examples, generator=self.seeds.generator("step", step, "trainer", 0))

    def parts(self, task: TrainerTask, step: int, share: DeviceRank) -> Iterator[Gradients]:
        batch = self.order(step)[: self.batch_size]
        for number, piece in enumerate(split_rows(len(batch), self.chunk, self.network.device, share, self.pieces)):
            if share.takes(number):
                stream = partial(self.seeds.generator, "step", step, "noise")
                sampler = sampler_by_blocks(stream, piece, self.network.device)
                inputs, labels = self.reader.fetch(batch[piece])
                yield self.weighted(self.scores(inputs, sampler), labels, 1 / self.batch_size)

    def scores(self, inputs: Tensor, sampler: NormalSampler) -> Tensor:
        """Return the logits of some examples as training sees them; the generator is theirs alone."""
        logits: Tensor = self.network(inputs)
        return logits

    def weighted(self, scores: Tensor, labels: Tensor, weight: float) -> Gradients:
        """Return the gradient of the cross-entropy of some examples, each with this weight."""
        loss, parameters = weight * F.cross_entropy(scores, labels, reduction="sum"), self.parameters
        return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
