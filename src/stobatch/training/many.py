"""Many models of one configuration, each with its own data and its own secrets: what audits train.

`OneByOne` runs any method's own steps and is the measure of everything faster; a method may offer a stack that trains
all models in the same passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from stobatch.config import RunConfig
from stobatch.models import Classifier
from stobatch.progress import Tick
from stobatch.training.engines import Gradients, InProcessEngine
from stobatch.training.loop import descend
from stobatch.training.trainable import Trainable


class ManyModels(ABC):
    """Models that are to be trained."""

    @abstractmethod
    def train(self, tick: Tick) -> None:
        """Train all of them to the last step."""

    @abstractmethod
    def logits(self, inputs: Tensor) -> Tensor:
        """What each trained model says: models x inputs x classes."""


class Watcher(Protocol):
    """Sees what a training releases at each step."""

    def see(self, step: int, trainable: Trainable, released: Gradients) -> None:
        """Before the parameters move."""


class OneByOne(ManyModels):
    """Any method's own trainables, one after the other."""

    def __init__(self, config: RunConfig, trainables: Iterator[Trainable], count: int) -> None:
        self.config, self.trainables, self.count = config, trainables, count
        self.networks: list[Classifier] = []

    def train(self, tick: Tick) -> None:
        for trainable in self.trainables:
            self.networks.append(train_one(trainable, self.config))
            tick(1 / self.count)

    @torch.no_grad()
    def logits(self, inputs: Tensor) -> Tensor:
        return torch.stack([network(inputs.to(network.device)).cpu() for network in self.networks])


def train_one(trainable: Trainable, config: RunConfig, watcher: Watcher | None = None) -> Classifier:
    """The steps of the training loop and nothing else: no files, no monitoring."""
    engine, optimisers = InProcessEngine(), trainable.optimisers(config)
    parameters = dict(trainable.network.named_parameters())
    for step in range(config.training.steps):
        released = trainable.release(step, engine).gradients
        if watcher is not None:
            watcher.see(step, trainable, released)
        descend(parameters, released, optimisers)
        trainable.after_update()
    trainable.use_average()
    return trainable.network
