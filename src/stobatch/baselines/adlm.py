"""AdLM, the adaptive Laplace mechanism (Phan, Wu, Hu and Dou, 2017): less noise for inputs that matter more.

Relevances of inputs say how a budget is spread over them; the noise on input j has the scale Δ_h0/(ε_j |L|). The loss
is a polynomial with noise on its coefficients, as in the functional mechanism.

It is as published and in the released code, but for the relevances. The publication counts ε1 for them, and nothing for
the network, trained without privacy, that they come from. Here both are steps of DP-SGD with a proof
(`adlm_step.InputRelevance`). What remains is a claim, and `AdLmPlan.guarantee` says what speaks against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch

from stobatch.baselines.adlm_plan import AdLmConfig, AdLmPlan
from stobatch.baselines.adlm_step import AdLmTrainable
from stobatch.baselines.plain import require_batches
from stobatch.config import RunConfig
from stobatch.data import DatasetInfo, TrainingExamples
from stobatch.dp.noise import laplace
from stobatch.dp.plan import Plan
from stobatch.errors import ModelError, SettingError
from stobatch.methods import Method, Release, Tuples, encoder_of, require_per_example_at_size, split_network
from stobatch.models import Classifier, require_per_example
from stobatch.seeds import Seeds
from stobatch.verifier import Verifier

_split = partial(split_network, method="AdLM")


class AdLm(Method):
    """A baseline with a claimed budget, and no certificates."""

    config_class = AdLmConfig

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
        """β, even to begin with."""
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
        memory_mb, pieces = config.machine.memory_mb, config.machine.pieces
        trainable = AdLmTrainable(config.method, plan, network, train, seeds, memory_mb=memory_mb, pieces=pieces)
        require_per_example_at_size(config, network, min(trainable.chunk, config.method.batch_size))
        return trainable

    def releases(self, plan: Plan) -> tuple[Release, ...]:
        assert isinstance(plan, AdLmPlan)
        return (NoisyBatch(plan),)

    def restore(self, network: Classifier, run: Path, config_hash: str) -> None:
        """The weights are all there is: noise is in training alone."""

    def certifies(self, config: RunConfig) -> bool:
        return False

    def verifiers(self, config: RunConfig, plan: Plan, network: Classifier) -> tuple[Verifier, ...]:
        raise ModelError(
            "AdLM has no certificate.",
            why="Its noise is in training alone, and verified inference needs noise in the network.",
            remedy="Evaluate it with `stobatch evaluate`, or train a method with certificates.",
        )


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
