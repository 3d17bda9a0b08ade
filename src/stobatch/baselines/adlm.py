"""AdLM, the adaptive Laplace mechanism (Phan, Wu, Hu and Dou, 2017): less noise for inputs that matter more.

Relevances of inputs say how a budget is spread over them; the noise on input j has the scale Δ_h0/(ε_j |L|). The loss
is a polynomial with noise on its coefficients, as in the functional mechanism.

It is as published and in the released code, but for the relevances. The publication counts ε1 for them, and nothing for
the network, trained without privacy, that they come from. Here both are steps of DP-SGD with a proof
(`InputRelevance`). What remains is a claim, and `AdLmPlan.guarantee` says what speaks against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from stobatch.baselines.adlm_plan import AdLmConfig, AdLmPlan
from stobatch.baselines.dpsgd import DpSgdConfig
from stobatch.baselines.plain import OpenTrainable, require_batches
from stobatch.baselines.securesgd import RelevanceTrainable
from stobatch.config import RunConfig, TrainersConfig
from stobatch.data import DatasetInfo, TrainingExamples
from stobatch.dp.noise import Grid, laplace
from stobatch.dp.plan import Plan
from stobatch.errors import ModelError, SettingError
from stobatch.methods import Release, Tuples, UncertifiedMethod, encoder_of, require_per_example_at_size, split_network
from stobatch.models import Classifier, Network, budget_mb, require_per_example
from stobatch.published.losses import label_noise_term, taylor_loss
from stobatch.seeds import Seeds
from stobatch.sound.losses import NormalSampler
from stobatch.training.engines import Averaged, Engine, Gradients, Stop, TrainerTask, never
from stobatch.training.engines.base import DeviceRank, split_rows
from stobatch.training.ledger import Ledger, Stretch


def budget_of(network: Network) -> Tensor:
    """Return β, the share of the input budget that each input value has; the mean is 1."""
    assert isinstance(network.input_budget, Tensor)
    return network.input_budget


class InputRelevance(RelevanceTrainable):
    """DP-SGD on cross-entropy, and in its last step the relevance of every input value to the label's score.

    **Guarantee**: that of its plan, for everything it releases: parameters and relevances alike.
    """

    network: Network

    def __init__(self, *arguments: Any, even_share: float, **named: Any) -> None:
        self.even_share = even_share
        super().__init__(*arguments, **named)

    @property
    def relevance_step(self) -> int:
        return self.plan.steps - 1

    @property
    def relevance_shape(self) -> tuple[int, ...]:
        return self.network.input_shape

    def relevances(self, inputs: Tensor, labels: Tensor, sampler: NormalSampler) -> Tensor:
        """Return |x_j ∂z_y/∂x_j| of each example, with z_y the score of its label.

        In a ReLU network without biases that is what layer-wise relevance propagation (LRP-0) hands down to an input,
        exactly; biases and normalisation keep some of the relevance there. Sizes are taken example by example, so that
        values that speak for one class and against another are relevant.
        """
        with torch.enable_grad():
            leaf = inputs.detach().requires_grad_()
            scores = self.network(leaf).gather(1, labels.unsqueeze(1))
            (slope,) = torch.autograd.grad(scores.sum(), leaf)
        return (slope * inputs).abs()

    def take(self, relevance: Tensor) -> None:
        """Set β_j = d R_j / Σ R, mixed with an even share so that none is 0; a mean of sizes below 0 is noise."""
        positive = relevance.clamp(min=0).double()
        shares = self.even_share + (1 - self.even_share) * positive / positive.mean().clamp(min=1e-30)
        budget_of(self.network).copy_(shares / shares.mean())

    def after_update(self) -> None:
        try:
            super().after_update()
        except ModelError as error:
            raise ModelError(
                error.what,
                why="The estimation of relevances has diverged.",
                remedy="Lower method.relevance_learning_rate, and start a new run.",
            ) from None


class AdLmTrainable(OpenTrainable):
    """The estimation of relevances, a new beginning, and descent on the noisy Taylor objective.

    What the second part knows of the first is β, a buffer of the network. The weights begin again as they were; the
    first part descends without memory and leaves the descent rule of the second untouched.
    """

    network: Network
    monitored = "encoder_norm"
    claims_privacy = True
    released_state = frozenset({"input_budget"})

    def __init__(
        self,
        config: AdLmConfig,
        plan: AdLmPlan,
        network: Network,
        train: TrainingExamples,
        seeds: Seeds,
        *,
        memory_mb: int,
        pieces: int,
    ) -> None:
        super().__init__(network, train, seeds, batch_size=config.batch_size, memory_mb=memory_mb, pieces=pieces)
        self.config, self.plan = config, plan
        # Before any checkpoint is read: a fresh network is the same one whenever a run is started.
        self.first_weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        planned = plan.relevance
        settings = DpSgdConfig(
            epsilon=planned.target_epsilon,
            delta=planned.delta,
            batch_size=planned.expected_batch_size,
            clip_norm=planned.clip_norm,
        )
        one_owner = TrainersConfig()
        self.estimation = InputRelevance(
            *(settings, planned, network, train, seeds),
            even_share=config.even_share, memory_mb=memory_mb, trainers=one_owner, pieces=pieces,
        )  # fmt: skip
        # One copy of the data on the device serves both.
        self.estimation.reader = self.reader

    def _is_estimation(self, step: int) -> bool:
        return step <= self.estimation.relevance_step

    def monitor(self, step: int) -> float:
        return self.network.encoder.max_column_norm()

    def check_data(self, share: DeviceRank) -> None:
        self.estimation.check_data(share)
        super().check_data(share)

    def targets(self, step: int) -> Mapping[str, Tensor]:
        return self.estimation.targets(step) if self._is_estimation(step) else super().targets(step)

    def grid(self, step: int) -> Grid | None:
        return self.estimation.grid(step) if self._is_estimation(step) else None

    def release(self, step: int, engine: Engine, stop: Stop = never) -> Averaged:
        self.estimation.attempt = self.attempt
        if not self._is_estimation(step):
            return super().release(step, engine, stop)
        averaged, parameters = self.estimation.release(step, engine, stop), self.parameters
        with torch.no_grad():
            for name in averaged.gradients.keys() & parameters.keys():
                parameters[name].sub_(averaged.gradients[name], alpha=self.config.relevance_learning_rate)
            self.estimation.after_update()
            if step == self.estimation.relevance_step:
                for name, weight in self.first_weights.items():
                    parameters[name].copy_(weight)
        # Nothing is left to descend on: a rule that remembers gradients is to remember none of these.
        return Averaged({}, averaged.stopping)

    def parts(self, task: TrainerTask, step: int, share: DeviceRank) -> Iterator[Gradients]:
        """Yield AdLM's mean gradient of the Taylor losses of a batch under one draw of input noise, and χ3 once."""
        if self._is_estimation(step):
            yield from self.estimation.parts(task, step, share)
            return
        batch, noise = self.order(step)[: self.batch_size], self.input_noise(step)
        for number, piece in enumerate(split_rows(len(batch), self.chunk, self.network.device, share, self.pieces)):
            if share.takes(number):
                inputs, labels = self.reader.fetch(batch[piece])
                yield self._gradients(self.noisy(inputs, noise), labels)
        if share.first:
            weight = self.network.head.output.weight
            (gradient,) = torch.autograd.grad(-label_noise_term(weight, self.loss_noise(step)), weight)
            yield {"head.output.weight": gradient}

    def input_noise(self, step: int) -> Tensor:
        """Return Lap(Δ_h0 / ε_j) / |L| with ε_j = β_j ε2: one draw for the batch of a step."""
        drawn = laplace(self.network.input_shape, self.plan.input_noise_scale, self._stream(step, "input noise"))
        return drawn.to(self.network.device, self.network.dtype) / budget_of(self.network)

    def loss_noise(self, step: int) -> Tensor:
        """Return χ3 = Lap(Δ_F / ε3) / |L|, for every coefficient h_π y_k."""
        weight = self.network.head.output.weight
        return laplace(tuple(weight.shape), self.plan.loss_noise_scale, self._stream(step, "loss noise")).to(weight)

    def _stream(self, step: int, purpose: str) -> torch.Generator:
        again = ("attempt", self.attempt) if self.attempt else ()
        return self.seeds.generator("step", step, *again, purpose)

    def noisy(self, inputs: Tensor, noise: Tensor) -> Tensor:
        """Return what training sees of some examples."""
        return (inputs + noise).clamp(-self.plan.input_bound, self.plan.input_bound)

    def _gradients(self, noisy_inputs: Tensor, labels: Tensor) -> Gradients:
        scores, parameters = self.network.scores_of_noisy(noisy_inputs), self.parameters
        loss = taylor_loss(scores, labels, self.config.taylor).sum() / self.batch_size
        return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))

    def begin(self, run: Path, stretch: Stretch) -> int:
        return self.estimation.begin(run, stretch)

    def saved(self, run: Path, step: int, state: str) -> None:
        self.estimation.saved(run, step, state)

    def distrust(self, run: Path) -> None:
        self.estimation.distrust(run)

    def require_counted(self, run: Path, step: int) -> None:
        self.estimation.require_counted(run, step)

    def finish(self, run: Path) -> dict[str, Any]:
        return {**super().finish(run), "accounted_steps": Ledger.of(run).accounted}

    def save_private(self, run: Path, config_hash: str) -> None:
        """Save nothing: noise lives in the steps alone."""


_split = partial(split_network, method="AdLM")


class AdLm(UncertifiedMethod):
    """A baseline with a claimed budget, and no certificates."""

    config_class = AdLmConfig
    title = "AdLM"
    why_uncertified = "Its noise is in training alone, and verified inference needs noise in the network."

    def plan(self, config: RunConfig, info: DatasetInfo, network: Classifier | None) -> AdLmPlan:
        method = config.method
        assert isinstance(method, AdLmConfig)
        encoder = encoder_of(config, info, network, "AdLM")
        require_batches(info, method.batch_size, batches=1)
        if config.training.schedule != "constant" or config.training.warm_up:
            raise SettingError(
                "training.schedule and training.warm_up are not for method 'adlm'.",
                why="Its first steps estimate relevances at a constant rate of their own, so that the rest would begin "
                "in the middle of the schedule.",
                remedy="Set training.schedule=constant and training.warm_up=0.",
            )
        return AdLmPlan(
            num_examples=info.num_train,
            batch_size=method.batch_size,
            steps=config.training.steps,
            inputs_per_neuron=encoder.inputs_per_neuron,
            neurons_per_map=encoder.neurons_per_map,
            last_hidden_size=config.model.last_hidden_size,
            num_classes=info.num_classes,
            total_epsilon=method.epsilon,
            delta=method.delta,
            relevance_share=method.relevance_share,
            input_share=method.input_share,
            input_bound=method.input_bound,
            relevance_steps=method.relevance_steps,
            relevance_batch_size=method.relevance_batch_size,
            relevance_clip_norm=method.relevance_clip_norm,
            tuned_on_private_data=method.tuned_on_private_data,
            records_per_person=info.copies,
        )

    def register_buffers(self, network: Classifier) -> None:
        """Add β, even to begin with."""
        _split(network).register_buffer("input_budget", torch.ones(network.input_shape))

    def prepare(
        self, config: RunConfig, plan: Plan, network: Classifier, train: TrainingExamples, seeds: Seeds
    ) -> AdLmTrainable:
        assert isinstance(config.method, AdLmConfig)
        assert isinstance(plan, AdLmPlan)
        require_per_example(network := _split(network))
        _ = plan.relevance.noise_stddev  # an ε out of reach is found before anything is written
        if len(train) != plan.num_examples:
            raise SettingError(
                f"the plan is for {plan.num_examples} training examples, the data have {len(train)}.",
                why="The sampling rate and the noise follow from the number.",
                remedy="Describe the data by what they are: DatasetInfo.num_train.",
            )
        memory_mb, pieces = budget_mb(config.machine), config.machine.pieces
        trainable = AdLmTrainable(config.method, plan, network, train, seeds, memory_mb=memory_mb, pieces=pieces)
        require_per_example_at_size(config, network, min(trainable.chunk, config.method.batch_size))
        return trainable

    def releases(self, plan: Plan) -> tuple[Release, ...]:
        assert isinstance(plan, AdLmPlan)
        return (NoisyBatch(plan),)


@final
@dataclass(frozen=True)
class NoisyBatch(Release):
    """x̄ = x + Lap(Δ_h0/ε2)/|L|, clipped, of a batch; budgets of inputs are public, and even here."""

    plan: AdLmPlan
    name = "noisy inputs of a batch"
    source = "AdLM, the perturbed affine layer"
    attack = "the difference of two noisy inputs, in which the noise cancels wherever neither was clipped"

    def score(self, own: Tuples, pair: tuple[Tuples, Tuples], seeds: Seeds) -> float:
        bound, stream = self.plan.input_bound, seeds.generator("noise", "input")
        noise = laplace(tuple(own.inputs.shape[1:]), self.plan.input_noise_scale, stream)
        released = (own.inputs + noise).clamp(-bound, bound)
        whole = (released[[0, -1]].abs() < bound).all(0)
        seen = (released[-1] - released[0])[whole]
        first, second = ((tuples.inputs[-1] - tuples.inputs[0])[whole] for tuples in pair)
        return float((seen - first).norm() - (seen - second).norm())
