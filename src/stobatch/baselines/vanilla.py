"""Vanilla adversarial training (Algorithm 2): no privacy, no certificate, a ceiling for the other methods."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from stobatch.attacks import Ball, craft, ensemble_slices, paper_ensemble
from stobatch.baselines.plain import OpenTrainable, require_batches
from stobatch.config import MethodConfig, RunConfig
from stobatch.data import DatasetInfo, TrainingExamples
from stobatch.dp.plan import OpenPlan, Plan
from stobatch.methods import UncertifiedMethod, split_network
from stobatch.models import Classifier, Network, budget_mb
from stobatch.paper import implements
from stobatch.published.losses import example_weights
from stobatch.seeds import Seeds
from stobatch.settings import setting
from stobatch.training import encoder_and_head
from stobatch.training.engines import Gradients, TrainerTask
from stobatch.training.engines.base import PIECES, DeviceRank, split_rows
from stobatch.types import PAPER_RANGE, Norm, Radius


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
class VanillaTrainable(OpenTrainable):
    """Each step: a random batch, another random batch made adversarial, one descent on all parameters."""

    network: Network
    monitored = "encoder_norm"

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
        self.config = config
        self.ensemble = paper_ensemble(config.attack_ensemble, config.train_attack_steps)
        super().__init__(network, train, seeds, batch_size=config.batch_size, memory_mb=memory_mb, pieces=pieces)

    def optimisers(self, config: RunConfig) -> list[torch.optim.Optimizer]:
        return encoder_and_head(self.network, config)

    def monitor(self, step: int) -> float:
        return self.network.encoder.max_column_norm()

    def parts(self, task: TrainerTask, step: int, share: DeviceRank) -> Iterator[Gradients]:
        size, order = self.batch_size, self.order(step)
        radius = Radius(self.config.train_attack_radius, Norm.LINF, PAPER_RANGE)
        weights = example_weights(size, size, self.config.adversarial_weight)
        pieces = split_rows(size, self.chunk, self.network.device, share, self.pieces)
        for number, piece in enumerate(pieces):
            if share.takes(number):
                inputs, labels = self.reader.fetch(order[size : 2 * size][piece])
                adversarial = craft(
                    self.network, Ball.around(inputs, radius), self.ensemble, self._after_order(step),
                    chunk=self.chunk, piece=piece, batch_size=size,
                )  # fmt: skip
                yield self.weighted(self.network(adversarial), labels, float(weights[-1]))
        for number, piece in enumerate(pieces):
            if share.takes(len(pieces) - 1 - number):
                inputs, labels = self.reader.fetch(order[:size][piece])
                yield self.weighted(self.network(inputs), labels, float(weights[0]))

    def _after_order(self, step: int) -> torch.Generator:
        """Return the step's generator once the order is drawn: attacks of all pieces start from the same draws."""
        generator = self.seeds.generator("step", step, "trainer", 0)
        torch.randperm(self.num_examples, generator=generator)
        return generator


class VanillaAdversarial(UncertifiedMethod):
    """The non-private baseline."""

    config_class = VanillaConfig
    trains_parts = True
    title = "vanilla adversarial training"
    why_uncertified = "Verified inference needs noise in the network, and this method has none."

    def plan(self, config: RunConfig, info: DatasetInfo, network: Classifier | None) -> OpenPlan:
        method = config.method
        assert isinstance(method, VanillaConfig)
        ensemble_slices(method.batch_size, len(method.attack_ensemble))
        require_batches(info, method.batch_size, batches=2)
        return OpenPlan(info.num_train, method.batch_size, self.title)

    def prepare(
        self, config: RunConfig, plan: Plan, network: Classifier, train: TrainingExamples, seeds: Seeds
    ) -> VanillaTrainable:
        assert isinstance(config.method, VanillaConfig)
        network = split_network(network, self.title)
        memory_mb, pieces = budget_mb(config.machine), config.machine.pieces
        return VanillaTrainable(config.method, network, train, seeds, memory_mb=memory_mb, pieces=pieces)
