"""The sound method: DP-SGD on per-example losses, and certificates that are theorems.

Everything that an example is made into (noisy views, an adversarial point, the bounds of its box) is one gradient, and
that gradient is clipped; Gaussian noise goes on the sum of a Poisson sample, and the sum is divided by a constant.
The privacy noise is in training alone. What certifies, bounds or votes, is separate from it (docs/guarantees.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from stobatch.certification import (
    BoundsVerifier,
    GaussianNoise,
    HiddenGaussian,
    SmoothingNoise,
    Verifier,
    VoteSettings,
    VotesVerifier,
)
from stobatch.config import RunConfig
from stobatch.data import DatasetInfo, Examples
from stobatch.data.partition import poisson_sample
from stobatch.errors import ModelError, SettingError
from stobatch.methods.base import Method
from stobatch.methods.sound_settings import SoundConfig
from stobatch.models import Classifier, Layered, Network, build_layered, require_per_example, rows_in_memory
from stobatch.objectives.private import (
    Coins,
    normal_coins,
)
from stobatch.privacy.canaries import LENGTH, GradientCanaries, Planted
from stobatch.privacy.dpsgd_plan import DpSgdPlan
from stobatch.privacy.per_example import Batch, Losses, clipped_sum_by_example, clipper_for
from stobatch.privacy.plan import Plan
from stobatch.seeds import Seeds
from stobatch.training import Trainable
from stobatch.training.averaging import AveragedSGD
from stobatch.training.engines import Gradients, TrainerTask
from stobatch.training.ledger import Ledger
from stobatch.types import Norm

_CPU_CHUNK = 512
"""Examples of one pass on a CPU; larger chunks fall out of the cache."""


class SoundTrainable(Trainable):
    """A step of DP-SGD: a Poisson sample, one clipped contribution per example, noise, a public denominator."""

    monitored = "epsilon_spent"

    def __init__(
        self,
        config: SoundConfig,
        plan: DpSgdPlan,
        network: Classifier,
        train: Examples,
        seeds: Seeds,
        *,
        memory_mb: int,
    ) -> None:
        self.config, self.plan, self.network, self.seeds = config, plan, network, seeds
        self.clip_norm, self.noise_stddev = plan.clip_norm, plan.noise_stddev
        self.canaries: GradientCanaries | None = None
        self.inputs, self.labels = train.inputs.to(network.device), train.labels.to(network.device)
        self.chunk = rows_in_memory(network, memory_mb // 8, most=_CPU_CHUNK)
        self.objective = config.objective(self.chunk)
        network.calibrate()
        probe, losses = self._probe()
        self.clip = clipper_for(network, losses, probe)
        if self.clip is clipped_sum_by_example:
            formed = sum(p.numel() * p.element_size() for p in network.parameters())
            self.chunk = max(1, min(self.chunk, memory_mb * 2**20 // 4 // formed))

    def _probe(self) -> tuple[Batch, Losses]:
        """Public points that have nothing to do with the data, to try the fast clipping on."""
        generator = torch.Generator().manual_seed(1)
        inputs = torch.rand(4, *self.network.input_shape, generator=generator) * 2 - 1
        labels = torch.arange(4) % self.network.num_classes
        device = self.network.device
        coins = normal_coins(generator, device)
        return self.objective.prepare(self.network, inputs.to(device), labels.to(device), 1.0, coins)

    def optimisers(self, config: RunConfig) -> list[torch.optim.Optimizer]:
        self.average = AveragedSGD(
            self.network.parameters(),
            lr=config.training.learning_rate,
            momentum=self.config.momentum,
            decay=self.config.average_decay,
        )
        return [self.average]

    def tasks(self, step: int) -> list[TrainerTask]:
        return [TrainerTask(trainer=0, benign_batch=0, adversarial_batch=0)]

    @property
    def unit(self) -> float:
        return 1 / self.plan.expected_batch_size

    def plant(self, planted: Planted) -> None:
        """Canaries that are in become records after the data; the sampling rate and the noise stay as planned."""
        if planted.inputs is not None and planted.labels is not None:
            self.inputs = torch.cat([self.inputs, planted.inputs[planted.included].to(self.inputs)])
            self.labels = torch.cat([self.labels, planted.labels[planted.included].to(self.labels)])
        if planted.gradients is not None:
            self.canaries = planted.gradients
            self.canaries_in = planted.included.nonzero().flatten()
            self.canary_sums = torch.zeros(len(planted.included), dtype=torch.float64)

    def carried(self) -> dict[str, Tensor]:
        return {} if self.canaries is None else {"canary_sums": self.canary_sums}

    def _summed(self, inputs: Tensor, labels: Tensor, rows: Tensor, step: int, coins: Coins) -> Gradients:
        """Σ clipped contributions of these rows, a chunk at a time."""
        total = {name: torch.zeros_like(p) for name, p in self.network.named_parameters() if p.requires_grad}
        for part in torch.split(rows, self.chunk):
            batch, losses = self.objective.prepare(
                self.network, inputs[part], labels[part], step / self.plan.steps, coins
            )
            for name, value in self.clip(self.network, losses, batch, self.clip_norm).gradients.items():
                total[name] += value
        return total

    def contributions(self, inputs: Tensor, labels: Tensor, step: int) -> Gradients:
        """As the release counts them, with view noise of its own."""
        coins = normal_coins(self.seeds.generator("step", step, "other views"), self.network.device)
        rows = torch.arange(len(labels), device=self.network.device)
        summed = self._summed(inputs.to(self.inputs), labels.to(self.labels), rows, step, coins)
        return {name: value.mul_(self.unit / self.plan.clip_norm) for name, value in summed.items()}

    def _noise(self, step: int) -> np.random.Generator:
        """The generator of a step's noise; no two steps share one."""
        return self.seeds.wide_generator("step", step, "noise")

    def gradients(self, task: TrainerTask, step: int) -> Gradients:
        """(Σ clipped contributions + noise) / (C · expected batch size): at most 1 long where there is no noise."""
        num_examples = len(self.inputs)
        num_planted = 0 if self.canaries is None else len(self.canaries_in)
        stream = self.seeds.wide_generator("step", step, "sample")
        sample = poisson_sample(num_examples + num_planted, self.plan.sampling_rate, stream)
        own = sample[sample < num_examples].to(self.inputs.device)
        coins = normal_coins(self.seeds.generator("step", step, "views"), self.network.device)
        total = self._summed(self.inputs, self.labels, own, step, coins)
        if self.canaries is not None:
            which = self.canaries_in[sample[sample >= num_examples] - num_examples]
            self.canaries.add(total, which, step, min(LENGTH * self.plan.clip_norm, self.clip_norm))
        generator, scale = self._noise(step), self.unit / self.plan.clip_norm
        for value in total.values():
            noise = torch.from_numpy(generator.standard_normal(tuple(value.shape))) * self.noise_stddev
            value.add_(noise.to(value)).mul_(scale)
        if self.canaries is not None:
            self.canary_sums += self.canaries.read(total, step)
        return total

    def after_update(self) -> None:
        """Reference statistics follow the parameters, as they will in deployment.

        Parameters that have run away give every example an endless gradient, which is left out: say so instead.
        """
        self.network.calibrate()
        probe = torch.zeros(1, *self.network.input_shape, device=self.network.device)
        with torch.no_grad():
            if not bool(self.network(probe).isfinite().all()):
                raise ModelError(
                    "the network's scores are not numbers any more.",
                    why="The parameters have diverged.",
                    remedy="Lower training.learning_rate, and start a new run.",
                )

    def save_private(self, run: Path, config_hash: str) -> None:
        """The privacy noise lives in the steps alone; the model carries none."""

    def begin(self, run: Path, first: int, last: int) -> None:
        Ledger.of(run).begun(last - first).save(run)

    def saved(self, run: Path, first: int, last: int) -> None:
        Ledger.of(run).made(last - first).save(run)

    def adopt(self) -> None:
        self.average.adopt_average()

    def finish(self, run: Path) -> dict[str, Any]:
        self.adopt()
        return {"accounted_steps": Ledger.of(run).accounted}

    def monitor(self, step: int) -> float:
        return self.plan.spent(step)


class Sound(Method):
    """Differential privacy and certificates that hold."""

    config_class = SoundConfig
    trainable: ClassVar[type[SoundTrainable]] = SoundTrainable

    def plan(self, config: RunConfig, info: DatasetInfo, network: Classifier | None) -> DpSgdPlan:
        method = config.method
        assert isinstance(method, SoundConfig)
        if config.training.optimiser != "sgd":
            raise SettingError(
                f"training.optimiser={config.training.optimiser} is not for the sound method.",
                remedy="Set training.optimiser=sgd; momentum and averaging are settings of the method.",
            )
        if not any((method.natural_weight, method.certified_weight, method.adversarial_weight, method.views_weight)):
            raise SettingError("no loss has a weight.", remedy="Set method.natural_weight=1, for instance.")
        if method.views_weight and not method.smoothing_stddev:
            raise SettingError(
                "noisy views have no noise.", remedy="Set method.smoothing_stddev, or method.views_weight=0."
            )
        if network is None and config.model.is_layer_list:
            # A list that cannot be built is found here, before any data is read.
            build_layered(config.model.architecture, info.input_shape, info.num_classes, torch.Generator())
        return DpSgdPlan(
            num_examples=info.num_train,
            expected_batch_size=method.expected_batch_size,
            steps=config.training.steps,
            clip_norm=method.clip_norm,
            target_epsilon=method.epsilon,
            delta=method.delta,
            tuned_on_private_data=method.tuned_on_private_data,
            records_per_person=info.copies,
        )

    def prepare(
        self, config: RunConfig, plan: Plan, network: Classifier, train: Examples, seeds: Seeds
    ) -> SoundTrainable:
        method = config.method
        assert isinstance(method, SoundConfig)
        assert isinstance(plan, DpSgdPlan)
        _ = plan.noise_stddev  # an ε out of reach is found before anything is written
        require_per_example(network)
        if len(train) != plan.num_examples:
            raise SettingError(
                f"the plan is for {plan.num_examples} training examples, the data have {len(train)}.",
                why="The sampling rate and the noise follow from the number.",
                remedy="Describe the data by what they are: DatasetInfo.num_train.",
            )
        if method.certified_weight and not isinstance(network, Layered):
            raise ModelError(
                "the certified loss needs a plain stack of layers.",
                remedy="Set model.architecture to a list of layers, or method.certified_weight=0.",
            )
        if method.reconstruction_weight and not isinstance(network, Network):
            raise ModelError(
                "the reconstruction objective needs one of the paper's networks, with an encoder.",
                remedy="Set model.architecture=mnist_cnn, or method.reconstruction_weight=0.",
            )
        return self.trainable(method, plan, network, train, seeds, memory_mb=config.machine.memory_mb)

    def restore(self, network: Classifier, run: Path, config_hash: str) -> None:
        """The weights are all there is."""

    def verifiers(self, config: RunConfig, plan: Plan, network: Classifier) -> tuple[Verifier, ...]:
        method, wanted = config.method, config.certification.certificate
        assert isinstance(method, SoundConfig)
        norm = Norm(config.evaluation.norm)
        radii = tuple(sorted({*config.evaluation.radii, config.certification.attack_radius}))
        found: list[Verifier] = []
        if wanted in ("best", "bounds") and isinstance(network, Layered):
            found += _bounds(network, norm, radii, config.machine.memory_mb, insist=wanted == "bounds")
        if wanted in ("best", "votes") and method.noise is not None:
            found.append(_votes(config, method.noise, network, norm, radii))
        if not found:
            raise ModelError(
                f"this model has no certificate of the kind '{wanted}'.",
                why="Votes need a model trained with method.smoothing_stddev; bounds need a list of layers without "
                "normalisation.",
                remedy="Train with `--recipe sound.mnist`, or set certification.certificate=best.",
            )
        return tuple(found)


def _bounds(network: Layered, norm: Norm, radii: tuple[float, ...], memory_mb: int, *, insist: bool) -> list[Verifier]:
    try:
        return [BoundsVerifier(network, network.layers, norm, radii, memory_mb)]
    except ModelError:
        if insist:
            raise
        return []


def _votes(
    config: RunConfig, noise: SmoothingNoise, network: Classifier, norm: Norm, radii: tuple[float, ...]
) -> Verifier:
    settings = config.certification
    behind: torch.nn.Module = network
    if settings.hidden_stddev:
        first = network.layers[0] if isinstance(network, Layered) else None
        if not isinstance(first, torch.nn.Conv2d | torch.nn.Linear) or not isinstance(noise, GaussianNoise):
            raise ModelError(
                "noise in the first hidden layer needs layers that start with conv or linear, and Gaussian noise.",
                remedy="Set certification.hidden_stddev=0.",
            )
        assert isinstance(network, Layered)
        behind = network.layers[1:]
        noise = HiddenGaussian.behind(
            first, network.input_shape, at_input=noise.stddev, at_hidden=settings.hidden_stddev
        )
    votes = VoteSettings(
        failure_probability=settings.failure_probability,
        selection_draws=settings.selection_draws,
        draws=settings.noise_draws,
        rows_at_once=rows_in_memory(network, config.machine.memory_mb, most=2_000),
    )
    return VotesVerifier(network, behind, noise, norm, radii, votes, stop_early=settings.stop_early)
