"""The sound method, and what all DP-SGD methods share: plan, step and certificates.

The methods differ in their losses. Privacy noise is used in training only; certificates, by bounds or votes, are
separate from it (docs/guarantees.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from stobatch.bounds.certifier import why_unbounded
from stobatch.config import RunConfig
from stobatch.data import DatasetInfo, TrainingExamples
from stobatch.dp.mixing import FEW_ROWS
from stobatch.dp.plan import DpSgdPlan, Plan, TrainersPlan
from stobatch.errors import ModelError, SettingError
from stobatch.methods import Method, make_verifiers, require_per_example_at_size
from stobatch.models import Classifier, HandedOver, Layered, Network, budget_mb, build_layered, require_per_example
from stobatch.models.experiments import require_function
from stobatch.models.low_rank import as_deployed
from stobatch.models.scattering import is_linear_behind
from stobatch.seeds import Seeds
from stobatch.sound.search import with_search
from stobatch.sound.settings import DpSgdSettings, SoundConfig
from stobatch.sound.step import DpSgdTrainable
from stobatch.verifier import Verifier


class DpSgdFamily(Method):
    """Base of all DP-SGD methods. A subclass names its settings, and refuses networks that it cannot train."""

    has_trainers = True
    trains_parts = True
    certificates: ClassVar[tuple[str, ...]] = ("bounds", "votes", "margins")
    trainable: ClassVar[type[DpSgdTrainable]] = DpSgdTrainable

    def check_settings(self, config: RunConfig) -> None:
        """Raise at settings that contradict each other; called first."""
        return

    def require_trainable(self, config: RunConfig, network: Classifier) -> None:
        """Raise if the losses do not fit this network; called before anything is written."""
        return

    def plan(self, config: RunConfig, info: DatasetInfo, network: Classifier | None) -> DpSgdPlan:
        method = config.method
        assert isinstance(method, DpSgdSettings)
        if config.training.optimiser == "adam" and method.momentum:
            raise SettingError(
                f"method.momentum={method.momentum:g} is not for training.optimiser=adam.",
                why="Adam has moving averages of its own.",
                remedy="Set method.momentum=0, or training.optimiser=sgd.",
            )
        if method.augmented_views > 1 and not method.augmentations:
            raise SettingError(
                f"method.augmented_views={method.augmented_views} views of an example would all be the same.",
                remedy='Set method.augmentations, as ["crop", "flip"], or method.augmented_views=1.',
            )
        if method.class_weights and len(method.class_weights) != info.num_classes:
            raise SettingError(
                f"method.class_weights has {len(method.class_weights)} weights for {info.num_classes} classes.",
                remedy="Give one for each class, in the order of their labels.",
            )
        self.check_settings(config)
        if network is None and config.model.layers is not None:
            # Raises before any data is read if the list of layers cannot be built.
            build_layered(config.model.layers, info.input_shape, info.num_classes, torch.Generator())
        if isinstance(network, HandedOver):
            self.require_trainable(config, network)
        make: Callable[..., DpSgdPlan] = DpSgdPlan
        trainers = config.trainers
        if trainers.num > 1:
            shares = trainers.noise == "shares"
            make = partial(TrainersPlan, num_trainers=trainers.num, per_step=trainers.per_step, noise_shares=shares)
        planned = make(
            num_examples=info.num_train,
            expected_batch_size=method.batch_size,
            steps=config.training.steps,
            clip_norm=method.clip_norm,
            target_epsilon=method.epsilon,
            delta=method.delta,
            tuned_on_private_data=method.tuned_on_private_data,
            records_per_person=info.copies if info.num_persons is None else method.records_per_person,
            spare_steps=method.spare_steps,
            given_noise_multiplier=method.noise_multiplier,
            num_persons=info.num_persons,
        )
        return with_search(planned, config)

    def prepare(
        self, config: RunConfig, plan: Plan, network: Classifier, train: TrainingExamples, seeds: Seeds
    ) -> DpSgdTrainable:
        method = config.method
        assert isinstance(method, DpSgdSettings)
        assert isinstance(plan, DpSgdPlan)
        _ = plan.noise_stddev  # raises before anything is written if ε is out of reach
        require_per_example(network)
        if plan.num_persons is None and len(train) != plan.num_examples:
            raise SettingError(
                f"the plan is for {plan.num_examples} training examples, the data have {len(train)}.",
                why="The sampling rate and the noise follow from the number.",
                remedy="Describe the data by what they are: DatasetInfo.num_train.",
            )
        require_planned_persons(plan, train)
        self.require_trainable(config, network)
        trainable = self.trainable(
            method,
            plan,
            network,
            train,
            seeds,
            memory_mb=budget_mb(config.machine),
            trainers=config.trainers,
            pieces=config.machine.pieces,
            precision=config.machine.precision,
        )
        require_per_example_at_size(config, network, trainable.rows)
        return trainable

    def restore(self, network: Classifier, run: Path, config_hash: str) -> None:
        """Do nothing: the method has no state besides the weights."""

    def certifies(self, config: RunConfig) -> bool:
        method = config.method
        assert isinstance(method, DpSgdSettings)
        return config.model.layers is not None or method.noise is not None

    def verifiers(self, config: RunConfig, plan: Plan, network: Classifier) -> tuple[Verifier, ...]:
        certificate = config.certification.certificate
        names = self.certificates if certificate == "best" else (certificate,)
        return make_verifiers(names, config, plan, network)


def require_planned_persons(plan: DpSgdPlan, train: TrainingExamples) -> None:
    """Raise unless the data have as many persons as the plan, and no person has most of the records."""
    persons = train.persons
    if plan.num_persons != (None if persons is None else len(persons)):
        raise SettingError(
            "the plan and the data differ in how many persons there are.",
            why="The sampling rate and the noise follow from the number, and what is clipped as one from whose it is.",
            remedy="Describe the data by what they are: DatasetInfo.num_persons.",
        )
    if persons is not None:
        persons.require_many(len(train))


class Sound(DpSgdFamily):
    """DP-SGD with losses for certified robustness; its guarantees are theorems."""

    config_class = SoundConfig

    def check_settings(self, config: RunConfig) -> None:
        method = config.method
        assert isinstance(method, SoundConfig)
        weights = (method.natural_weight, method.certified_weight, method.adversarial_weight, method.views_weight)
        if not any((*weights, method.margin_weight)):
            raise SettingError("no loss has a weight.", remedy="Set method.natural_weight=1, for instance.")
        if method.box_loss != "box" and not method.certified_weight:
            raise SettingError(
                f"method.box_loss={method.box_loss} has no weight.",
                remedy="Set method.certified_weight=0.5, or leave method.box_loss unset.",
            )
        if method.views_weight and not method.smoothing_stddev:
            raise SettingError(
                "noisy views have no noise.", remedy="Set method.smoothing_stddev, or method.views_weight=0."
            )

    def require_trainable(self, config: RunConfig, network: Classifier) -> None:
        method = config.method
        assert isinstance(method, SoundConfig)
        if method.certified_weight and isinstance(network, HandedOver):
            if unbounded := why_unbounded(as_deployed(network)):
                # What no weight of a loss mends comes first.
                require_function(network, FEW_ROWS)
                raise ModelError(
                    f"the certified loss does not support your network: {unbounded}",
                    why="method.certified_weight is the weight of a loss on bounds, and there are none.",
                    remedy="Set method.certified_weight=0 and method.natural_weight=1; for votes also "
                    "method.smoothing_stddev=0.25 and method.views_weight=1.",
                )
        elif method.certified_weight and not isinstance(network, Layered):
            raise ModelError(
                "the certified loss needs a plain stack of layers.",
                remedy="Set model.architecture to a list of layers, or method.certified_weight=0.",
            )
        if method.margin_weight and not (isinstance(network, Layered) and is_linear_behind(network.layers)):
            raise ModelError(
                "the margin loss needs scattering followed by one linear layer.",
                remedy="Set model.architecture='scatter 8, linear', or method.margin_weight=0.",
            )
        if method.reconstruction_weight and not isinstance(network, Network):
            raise ModelError(
                "the reconstruction objective needs one of the paper's networks, with an encoder.",
                remedy="Set model.architecture=mnist_cnn, or method.reconstruction_weight=0.",
            )
