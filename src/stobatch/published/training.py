"""The published mechanism: DP auto-encoder, DP adversarial learning, stochastic batches (Algorithms 1 and 4).

It reproduces what the paper describes and claims only what the paper claims; `PublishedPlan.guarantee` carries the
reasons why that claim does not hold.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.attacks import Ball, craft, ensemble_slices, paper_ensemble
from stobatch.config import RunConfig
from stobatch.data import DatasetInfo, Examples, TrainingExamples
from stobatch.data.partition import fixed_disjoint_batches
from stobatch.dp.noise import laplace
from stobatch.dp.plan import Plan
from stobatch.methods import Method, Release, Tuples, encoder_of, require_per_example_at_size, split_network
from stobatch.models import Classifier, Network, budget_mb, require_per_example, rows_in_memory
from stobatch.models.affine import DenseEncoder
from stobatch.models.convolution_gradients import with_fast_gradients
from stobatch.models.folded import fold
from stobatch.models.validators import keeps_nothing
from stobatch.paper import implements
from stobatch.published.losses import (
    example_weights,
    label_noise_term,
    label_penalty,
    reconstruction_gradient,
    taylor_loss,
)
from stobatch.published.noise import PrivateNoise
from stobatch.published.plan import PublishedPlan
from stobatch.published.settings import PublishedConfig, schedule_of
from stobatch.published.stack import PublishedStack
from stobatch.published.verified_inference import VerifiedInference
from stobatch.seeds import Seeds
from stobatch.training import Trainable, encoder_and_head
from stobatch.training.engines import Gradients, TrainerTask
from stobatch.training.engines.base import PIECES, DeviceRank, split_rows
from stobatch.training.trainable import Reader
from stobatch.types import PAPER_RANGE, Norm, Radius
from stobatch.verifier import Verifier

_HIDDEN = 32
"""Neurons of the dense encoder whose step is looked at."""


def _further(found: Tensor, first: Tensor, second: Tensor) -> float:
    """Return how much nearer to the second than to the first."""
    return float((found - first).norm() - (found - second).norm())


@final
@dataclass(frozen=True)
class PerturbedInputs(Release):
    """x̄ = x + χ1/m, from which Algorithm 1 trains and crafts."""

    plan: PublishedPlan
    name = "perturbed inputs"
    source = "Lemma 3"
    attack = "the difference of two perturbed inputs, in which the noise cancels"

    def score(self, own: Tuples, pair: tuple[Tuples, Tuples], seeds: Seeds) -> float:
        noise = laplace(tuple(own.inputs.shape[1:]), self.plan.input_noise_scale, seeds.generator("noise", "input"))
        released = own.inputs + noise
        first, second = (tuples.inputs[-1] - tuples.inputs[0] for tuples in pair)
        return _further(released[-1] - released[0], first, second)


@final
@dataclass(frozen=True)
class LabelCoefficients(Release):
    """Σ h y_k + χ3 for each class k, for hidden values h that the proof calls public already."""

    plan: PublishedPlan
    name = "label coefficients"
    source = "Theorem 3"
    attack = "the difference of two classes' coefficients, in which the shared noise cancels"

    def score(self, own: Tuples, pair: tuple[Tuples, Tuples], seeds: Seeds) -> float:
        size, classes = self.plan.last_hidden_size, self.plan.num_classes
        hidden = torch.rand(len(own.labels), size, generator=torch.Generator().manual_seed(0)) * 2 - 1

        def coefficients(labels: Tensor) -> Tensor:
            return F.one_hot(labels, classes).float().t() @ hidden / self.plan.batch_size

        released = coefficients(own.labels)
        if self.plan.hides_labels:
            released = released + laplace((size,), self.plan.label_noise_scale, seeds.generator("noise", "label"))
        one, other = (int(tuples.labels[-1]) for tuples in pair)
        first, second = (coefficients(tuples.labels) for tuples in pair)
        return _further(released[other] - released[one], first[other] - first[one], second[other] - second[one])


@final
@dataclass(frozen=True)
class EncoderStep(Release):
    """∇R̄ of one batch at public first weights, for a dense encoder: the setting in which the paper proves Theorem 1.

    It equals -Cθ1 + uwᵀ, with C the scatter matrix of the raw batch and all the noise in u and w. So for the data that
    were used, and for no others, adding Cθ1 leaves a matrix of rank one.
    """

    plan: PublishedPlan
    name = "a step on θ1"
    source = "Theorem 1"
    attack = "a rank test: all noise lies in a matrix of rank one"

    def score(self, own: Tuples, pair: tuple[Tuples, Tuples], seeds: Seeds) -> float:
        shape = tuple(own.inputs.shape[1:])
        encoder = DenseEncoder(shape, _HIDDEN).double()
        encoder.weight.data = torch.randn(
            encoder.weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        encoder.limit_columns(self.plan.encoder_norm_bound)
        plan = replace(
            self.plan, inputs_per_neuron=prod(shape), neurons_per_map=_HIDDEN, batch_size=len(own.inputs),
            num_examples=len(own.inputs),
        )  # fmt: skip
        shift = laplace(shape, plan.input_noise_scale, seeds.generator("noise", "input")).double()
        hidden_shift = laplace((_HIDDEN,), plan.hidden_noise_scale, seeds.generator("noise", "hidden")).double()
        with torch.no_grad():
            noisy = own.inputs.double() + shift
            gradient = reconstruction_gradient(encoder, noisy, encoder(noisy) + hidden_shift)
            first, second = (self._second_singular(gradient, encoder, tuples) for tuples in pair)
        return first - second

    @staticmethod
    def _second_singular(gradient: Tensor, encoder: DenseEncoder, tuples: Tuples) -> float:
        flat = tuples.inputs.double().flatten(1)
        centred = flat - flat.mean(0)
        return float(torch.linalg.svdvals(gradient + encoder.weight @ (centred.t() @ centred))[1])


Pass = Callable[[Tensor], Tensor]


def fuse(function: Pass, *, backend: str | Callable[..., object] = "inductor") -> Pass:
    """Return the function compiled at its first call; where PyTorch cannot compile it, as it is."""
    # The compiler takes seconds to import.
    from torch._dynamo.exc import TorchDynamoException

    compiled: Pass | None = torch.compile(function, backend=backend)

    def call(values: Tensor) -> Tensor:
        nonlocal compiled
        if compiled is not None:
            try:
                return compiled(values)
            except TorchDynamoException as error:
                reason = " ".join(str(error).split())[:200]
                warnings.warn(f"passes are not fused, which costs time and nothing else: {reason}", stacklevel=2)
                compiled = None
        return function(values)

    return call


@contextmanager
def frozen(network: nn.Module) -> Iterator[None]:
    """Let no parameter want a gradient in the block: a compiled pass computes all that are wanted, asked for or not."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


_CPU_CHUNK = 833
"""Examples of one pass on a CPU; larger chunks fall out of the cache."""
_CPU_CRAFT_CHUNK = 300
"""The same for crafting, whose chunk is shared by all threads and changes no sum."""


@implements(
    "Algorithm 1",
    verdict="implemented as printed; its privacy claim is false (Theorem 4), and every tuple serves as benign in one "
    "step and as adversarial in the step before.",
)
class PublishedTrainable(Trainable):
    """What a trainer does in a step of Algorithm 1, and of Algorithm 4: craft, then both gradients.

    Lines 1 to 3 happen on construction: noise is fixed, inputs are perturbed, batches are cut.
    """

    network: Network
    monitored = "encoder_norm"

    def __init__(
        self,
        config: PublishedConfig,
        network: Network,
        train: TrainingExamples,
        noise: PrivateNoise,
        seeds: Seeds,
        *,
        memory_mb: int = 512,
        pieces: int = PIECES,
        fused: bool = False,
    ) -> None:
        device = network.encoder.weight.device
        self.config, self.network, self.noise, self.seeds, self.pieces = config, network, noise, seeds, pieces
        network.set_noise(noise.input_noise, noise.hidden_noise)
        self.label_noise = noise.label_noise.to(device, network.dtype)
        batches = fixed_disjoint_batches(len(train), config.batch_size, seeds.generator("batches"))
        self.schedule = schedule_of(config, len(batches), seeds)
        self.reader = Reader(train, device, network.dtype)
        self.batches = self.reader.beside(batches)
        self.ensemble = paper_ensemble(config.attack_ensemble, config.train_attack_steps)
        on_cpu = device.type == "cpu"
        # Half of a CPU's budget is for what stays between passes: gradients, moments, what the C library keeps.
        self.chunk = rows_in_memory(network, memory_mb // 2 if on_cpu else memory_mb, most=_CPU_CHUNK)
        self.craft_chunk = min(self.chunk, _CPU_CRAFT_CHUNK) if on_cpu else self.chunk
        self.head = fuse(with_fast_gradients(network.head)) if fused else network.head
        self.after_update()

    def optimisers(self, config: RunConfig) -> list[torch.optim.Optimizer]:
        # As in the released code on every data set: the summed gradient of R̄ is far too long for plain descent.
        return encoder_and_head(self.network, config, encoder_rule="adam")

    def monitor(self, step: int) -> float:
        return self.network.encoder.max_column_norm()

    def tasks(self, step: int) -> list[TrainerTask]:
        return self.schedule.tasks(step)

    def after_update(self) -> None:
        """Enforce the bound on θ1 that the plan's γ rests on, and refresh the reference statistics."""
        self.network.encoder.limit_columns(self.config.encoder_norm_bound)
        self.network.calibrate()

    def save_private(self, run: Path, config_hash: str) -> None:
        self.noise.save(run, config_hash)

    def noisy(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Line 2: perturbed inputs, which is all that training reads, and labels."""
        inputs, labels = self.reader.fetch(rows)
        return inputs + self.network.input_noise, labels

    def craft(self, noisy_inputs: Tensor, generator: torch.Generator, piece: slice | None = None) -> Tensor:
        """DP adversarial examples: from perturbed inputs, with predicted labels, within a random μ_t.

        The inputs may be a piece of a batch; the generator is that of the whole batch.
        """
        # rand() is in [0, 1), the paper's μ_t in (0, 1].
        size = (1 - float(torch.rand((), generator=generator))) * self.config.train_attack_max_radius
        radius = Radius(size, Norm.LINF, PAPER_RANGE)
        ball = Ball.around(noisy_inputs, radius, shift=self.network.input_noise)
        whole = self.config.batch_size if piece else None
        scores = fold(self.network, noisy_inputs=True) or self._scores
        with frozen(self.network):
            return craft(
                *(scores, ball, self.ensemble, generator),
                chunk=self.craft_chunk,
                piece=piece,
                batch_size=whole,
                concurrent=keeps_nothing(self.network),
                later=self.later,
            )

    def _scores(self, noisy_inputs: Tensor) -> Tensor:
        return self.head(self.network.noisy_hidden(noisy_inputs))

    def check_data(self, share: DeviceRank) -> None:
        """Batches are drawn from all of the data, so every device may read every shard."""
        self.reader.examples.require()

    def parts(self, task: TrainerTask, step: int, share: DeviceRank) -> Iterator[Gradients]:
        """Benign pieces first: a GPU works on them while attacks draw their starts on the CPU.

        Adversarial ones cost most, so they are dealt to the devices in the opposite order.
        """
        benign, source = self.batches[task.benign_batch], self.batches[task.adversarial_batch]
        weights = example_weights(len(benign), len(source), self.config.adversarial_weight)
        if not self.config.hides_labels:
            weights = weights / self.network.num_classes
        pieces = split_rows(self.config.batch_size, self.chunk, self.network.device, share, self.pieces)
        for number, piece in enumerate(pieces):
            if share.takes(len(pieces) - 1 - number):
                yield self._gradients(*self.noisy(benign[piece]), float(weights[0]))
        for number, piece in enumerate(pieces):
            if share.takes(number):
                generator = self.seeds.generator("step", step, "trainer", task.trainer)
                noisy_inputs, labels = self.noisy(source[piece])
                adversarial = self.craft(noisy_inputs, generator, piece)
                yield self._gradients(adversarial, labels, float(weights[-1]))
        if share.first:
            weight = self.network.head.output.weight
            # Every example carries χ3/m and the weights sum to 1, so the whole batch carries it once.
            hides = self.config.hides_labels
            term = -label_noise_term(weight, self.label_noise) if hides else label_penalty(weight, self.label_noise)
            (gradient,) = torch.autograd.grad(term, weight)
            yield {"head.output.weight": gradient}

    def _gradients(self, noisy_inputs: Tensor, labels: Tensor, weight: float) -> Gradients:
        """∇θ1 R̄ (closed form, no labels) and ∇θ2 L̄ (autograd through the head only) of examples of one weight."""
        network = self.network
        with torch.no_grad():
            hidden = network.noisy_hidden(noisy_inputs)
            encoder = reconstruction_gradient(network.encoder, noisy_inputs, hidden.to(noisy_inputs))
        head = {name: p for name, p in network.named_parameters() if name.startswith("head.")}
        loss = weight * taylor_loss(self.head(hidden), labels, self.config.taylor).sum()
        return {
            "encoder.weight": encoder,
            **dict(zip(head, torch.autograd.grad(loss, list(head.values())), strict=True)),
        }


_NAME = "the published mechanism"
_split = partial(split_network, method=_NAME)


class Published(Method):
    """The paper's method."""

    config_class = PublishedConfig
    certificates = ("votes",)

    def plan(self, config: RunConfig, info: DatasetInfo, network: Classifier | None) -> PublishedPlan:
        method = config.method
        assert isinstance(method, PublishedConfig)
        encoder = encoder_of(config, info, network, _NAME)
        ensemble_slices(method.batch_size, len(method.attack_ensemble))
        plan = PublishedPlan(
            num_examples=info.num_train,
            batch_size=method.batch_size,
            inputs_per_neuron=encoder.inputs_per_neuron,
            neurons_per_map=encoder.neurons_per_map,
            last_hidden_size=config.model.last_hidden_size,
            num_classes=info.num_classes,
            encoder_norm_bound=method.encoder_norm_bound,
            total_epsilon=method.epsilon,
            label_epsilon_base=method.label_epsilon,
            split=method.budget_split,
            records_per_person=info.copies,
            hides_labels=method.hides_labels,
        )
        schedule_of(method, plan.num_batches, Seeds.reproducible(0))
        _ = plan.epsilons
        return plan

    def prepare(
        self, config: RunConfig, plan: Plan, network: Classifier, train: TrainingExamples, seeds: Seeds
    ) -> PublishedTrainable:
        assert isinstance(config.method, PublishedConfig)
        assert isinstance(plan, PublishedPlan)
        require_per_example(network := _split(network))
        noise = self.draw_noise(config.method, plan, network, seeds)
        machine = config.machine
        fused = machine.precision == "bfloat16" and network.device.type == "cuda"
        sizes = {"memory_mb": budget_mb(machine), "pieces": machine.pieces}
        trainable = PublishedTrainable(config.method, network, train, noise, seeds, fused=fused, **sizes)
        require_per_example_at_size(config, network, min(trainable.chunk, config.method.batch_size))
        return trainable

    @staticmethod
    def draw_noise(config: PublishedConfig, plan: PublishedPlan, network: Network, seeds: Seeds) -> PrivateNoise:
        """χ1/m, 2χ2/m and χ3/m in the sizes of the network and the scales of the plan."""
        size = (network.last_hidden_size,)
        return PrivateNoise.draw(
            seeds,
            input_shape=network.encoder.input_shape,
            input_scale=plan.input_noise_scale,
            hidden_shape=network.encoder.hidden_shape,
            hidden_scale=plan.hidden_noise_scale,
            label_shape=size if config.label_noise == "shared" else (network.num_classes, *size),
            label_scale=plan.label_noise_scale,
        )

    def releases(self, plan: Plan) -> tuple[Release, ...]:
        assert isinstance(plan, PublishedPlan)
        return (PerturbedInputs(plan), LabelCoefficients(plan), EncoderStep(plan))

    def stack(
        self,
        config: RunConfig,
        plan: Plan,
        networks: Sequence[Classifier],
        pool: Examples,
        members: Tensor,
        seeds: Sequence[Seeds],
    ) -> PublishedStack | None:
        method = config.method
        assert isinstance(method, PublishedConfig)
        assert isinstance(plan, PublishedPlan)
        split = [_split(network) for network in networks]
        if method.attack_ensemble != ("ifgsm",) or not method.hides_labels:
            return None
        if any(network.device.type != "cpu" for network in split):
            return None
        noises = [self.draw_noise(method, plan, network, each) for network, each in zip(split, seeds, strict=True)]
        return PublishedStack(config, method, split, noises, pool, members, seeds)

    def restore(self, network: Classifier, run: Path, config_hash: str) -> None:
        noise = PrivateNoise.load(run, config_hash)
        _split(network).set_noise(noise.input_noise, noise.hidden_noise)

    def verifiers(self, config: RunConfig, plan: Plan, network: Classifier) -> tuple[Verifier, ...]:
        assert isinstance(plan, PublishedPlan)
        verifier = VerifiedInference(
            _split(network),
            config.certification,
            input_noise_scale=plan.input_noise_scale,
            hidden_noise_scale=plan.hidden_noise_scale,
            memory_mb=budget_mb(config.machine),
        )
        return (verifier,)
