"""Vanilla adversarial training (Algorithm 2): no privacy, no certificate, a ceiling for the other methods."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.attacks import Ball, craft, ensemble_slices, paper_ensemble
from stobatch.certification import Verifier
from stobatch.config import MethodConfig, RunConfig
from stobatch.data import DatasetInfo, TrainingExamples
from stobatch.errors import DataError, ModelError
from stobatch.methods.base import Method
from stobatch.models import Classifier, Network, rows_in_memory
from stobatch.objectives import example_weights
from stobatch.paper import implements
from stobatch.privacy.plan import OpenPlan, Plan
from stobatch.seeds import Seeds
from stobatch.settings import setting
from stobatch.training import Trainable, encoder_and_head
from stobatch.training.engines import Gradients, TrainerTask
from stobatch.training.pieces import PIECES, Share, cut
from stobatch.training.reading import Reader
from stobatch.types import PAPER_RANGE, Norm, Radius


@dataclass(frozen=True)
class VanillaConfig(MethodConfig, name="vanilla_adversarial"):
    """Adversarial training as in Appendix C."""

    batch_size: int = setting(2499, at_least=1, doc="Benign examples of a step, and as many adversarial ones")
    adversarial_weight: float = setting(1.0, at_least=0, doc="The weight ξ of the adversarial loss")
    attack_ensemble: tuple[str, ...] = setting(
        ("ifgsm", "mim", "madry"), choices=("ifgsm", "mim", "madry"), doc="The attacks that craft training examples"
    )
    train_attack_steps: int = setting(10, at_least=1, doc="Steps of each training attack, T_μ")
    train_attack_radius: float = setting(0.6, above=0, at_most=2, doc="Size of the training attacks, linf over [-1, 1]")


@implements("Algorithm 2", verdict="standard adversarial training; it claims no privacy and has none.")
class VanillaTrainable(Trainable):
    """Each step: a random batch, another random batch made adversarial, one descent on all parameters."""

    def __init__(
        self,
        config: VanillaConfig,
        network: Network,
        train: TrainingExamples,
        seeds: Seeds,
        *,
        memory_mb: int,
        pieces: int = PIECES,
    ) -> None:
        device = network.encoder.weight.device
        self.config, self.network, self.seeds, self.pieces = config, network, seeds, pieces
        self.num_examples, self.reader = len(train), Reader(train, device, network.dtype)
        self.ensemble = paper_ensemble(config.attack_ensemble, config.train_attack_steps)
        self.chunk = rows_in_memory(network, memory_mb, most=833)
        self.after_update()

    network: Network
    monitored = "encoder_norm"

    def optimisers(self, config: RunConfig) -> list[torch.optim.Optimizer]:
        return encoder_and_head(self.network, config)

    def monitor(self, step: int) -> float:
        return self.network.encoder.max_column_norm()

    def tasks(self, step: int) -> list[TrainerTask]:
        return [TrainerTask(trainer=0, benign_batch=0, adversarial_batch=1)]

    def after_update(self) -> None:
        self.network.calibrate()

    def save_private(self, run: Path, config_hash: str) -> None:
        """Nothing is private here."""

    def ready(self, share: Share) -> None:
        """Batches are drawn from all of the data, so every device may read every shard."""
        self.reader.examples.require()

    def parts(self, task: TrainerTask, step: int, share: Share) -> Iterator[Gradients]:
        size, path = self.config.batch_size, ("step", step, "trainer", task.trainer)
        order = torch.randperm(self.num_examples, generator=self.seeds.generator(*path))
        radius = Radius(self.config.train_attack_radius, Norm.LINF, PAPER_RANGE)
        weights = example_weights(size, size, self.config.adversarial_weight)
        pieces = cut(size, self.chunk, self.network.device, share, self.pieces)
        for number, piece in enumerate(pieces):
            if share.takes(number):
                inputs, labels = self.reader.fetch(order[size : 2 * size][piece])
                adversarial = craft(
                    self.network, Ball.around(inputs, radius), self.ensemble, self._after_order(path),
                    chunk=self.chunk, piece=piece, batch_size=size,
                )  # fmt: skip
                yield self._gradients(adversarial, labels, float(weights[-1]))
        for number, piece in enumerate(pieces):
            if share.takes(len(pieces) - 1 - number):
                yield self._gradients(*self.reader.fetch(order[:size][piece]), float(weights[0]))

    def _after_order(self, path: tuple[str | int, ...]) -> torch.Generator:
        """The step's generator once the order is drawn: attacks of all pieces start from the same draws."""
        generator = self.seeds.generator(*path)
        torch.randperm(self.num_examples, generator=generator)
        return generator

    def _gradients(self, inputs: Tensor, labels: Tensor, weight: float) -> Gradients:
        loss = weight * F.cross_entropy(self.network(inputs), labels, reduction="sum")
        parameters = self.parameters
        return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


class VanillaAdversarialTraining(Method):
    """The non-private baseline."""

    config_class = VanillaConfig
    certifies = False

    def plan(self, config: RunConfig, info: DatasetInfo, network: Classifier | None) -> OpenPlan:
        method = config.method
        assert isinstance(method, VanillaConfig)
        ensemble_slices(method.batch_size, len(method.attack_ensemble))
        if 2 * method.batch_size > info.num_train:
            raise DataError(
                f"two batches of {method.batch_size} do not fit {info.num_train} examples.",
                remedy="Lower method.batch_size.",
            )
        return OpenPlan(info.num_train, method.batch_size, "vanilla adversarial training")

    def prepare(
        self, config: RunConfig, plan: Plan, network: Classifier, train: TrainingExamples, seeds: Seeds
    ) -> VanillaTrainable:
        assert isinstance(config.method, VanillaConfig)
        if not isinstance(network, Network):
            raise ModelError("this baseline trains the paper's networks.", remedy="Set model.architecture=mnist_cnn.")
        memory_mb, pieces = config.machine.memory_mb, config.machine.pieces
        return VanillaTrainable(config.method, network, train, seeds, memory_mb=memory_mb, pieces=pieces)

    def restore(self, network: Classifier, run: Path, config_hash: str) -> None:
        """The weights are all there is."""

    def verifiers(self, config: RunConfig, plan: Plan, network: Classifier) -> tuple[Verifier, ...]:
        raise ModelError(
            "vanilla adversarial training has no certificate.",
            why="Verified inference needs noise in the network, and this method has none.",
            remedy="Evaluate it with `stobatch evaluate`, or train a method with certificates.",
        )
