"""The training loop: the same for one trainer (Algorithm 1) and for many (Algorithm 4), and for every method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from stobatch.config import RunConfig
from stobatch.data import Examples
from stobatch.errors import ModelError
from stobatch.interrupts import finish_first
from stobatch.models import Classifier, Network
from stobatch.privacy.canaries import Planted
from stobatch.progress import progress
from stobatch.training.checkpoint import TrainingState
from stobatch.training.engines import Engine, Gradients, TrainerTask


class Trainable(ABC):
    """What a method hands to the loop."""

    network: Classifier
    monitored: ClassVar[str]
    """What `monitor` measures."""

    @abstractmethod
    def optimisers(self, config: RunConfig) -> list[torch.optim.Optimizer]:
        """The descent rules; each parameter belongs to one of them."""

    @abstractmethod
    def tasks(self, step: int) -> list[TrainerTask]:
        """Who works in this step."""

    @abstractmethod
    def gradients(self, task: TrainerTask, step: int) -> Gradients:
        """One trainer's gradients at the present parameters."""

    @abstractmethod
    def after_update(self) -> None:
        """Restore what the plan assumed about the parameters, such as a bound on their norm."""

    @abstractmethod
    def save_private(self, run: Path, config_hash: str) -> None:
        """Store, for the owner's eyes only, what a later load needs beside the weights."""

    @abstractmethod
    def monitor(self, step: int) -> float:
        """A public number worth watching: computed from the parameters and the plan, never from the data."""

    def plant(self, planted: Planted) -> None:
        """Train with records beside the data, as an audit needs; each is treated exactly like an example."""
        raise ModelError(
            "this method has no room for canaries beside its data.",
            why="Its neighbouring data sets have one size, so a canary takes the place of a record.",
            remedy="Plant input canaries: canaries.kind=input.",
        )

    def contributions(self, inputs: Tensor, labels: Tensor, step: int) -> Gradients:
        """What examples add to a release at the present parameters, noise apart; for methods that bound it."""
        raise ModelError(
            "this method does not bound what an example adds to a step.",
            remedy="Audit the trained model: audit.view=final and audit.canary=input.",
        )

    @property
    def unit(self) -> float:
        """The norm that one example's part of a release is bounded by, where it is."""
        return 0.0

    def carried(self) -> dict[str, Tensor]:
        """What has to survive a restart beside parameters and optimisers; changed in place."""
        return {}

    def begin(self, run: Path, first: int, last: int) -> None:
        """Steps from `first` to `last` are about to be made; called again for those that a crash cut off."""
        return

    def saved(self, run: Path, first: int, last: int) -> None:
        """The steps from `first` to `last` were made and are safe on disk."""
        return

    def adopt(self) -> None:
        """Turn the last parameters into the model. Repeatable."""
        return

    def finish(self, run: Path) -> dict[str, Any]:
        """`adopt`, and say what is worth keeping about the training."""
        self.adopt()
        return {}


OPTIMISERS: dict[str, type[torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def train(
    trainable: Trainable,
    config: RunConfig,
    engine: Engine,
    run: Path,
    held_out: Examples,
    *,
    resume: bool,
    quiet: bool,
) -> TrainingState:
    """Train to the last step, checkpointing on the way.

    **Guarantee.** On a CPU with the same number of threads, a run that was killed at any moment and resumed ends with
    the same bits as an undisturbed one: a step depends on the parameters, the optimiser and the seeds alone.
    """
    network = trainable.network
    state = TrainingState(network, trainable.optimisers(config), trainable.carried())
    if resume and state.restore(run, config.training_hash):
        trainable.after_update()
    parameters = dict(network.named_parameters())
    inputs = held_out.inputs[: config.training.monitor_examples].to(network.device)
    labels = held_out.labels[: config.training.monitor_examples].to(inputs.device)
    note, every, stretch_end = "", config.machine.checkpoint_every, state.step
    with (
        finish_first() as stop,
        progress("train", config.training.steps, start=state.step, quiet=quiet) as advance,
    ):
        while state.step < config.training.steps:
            if state.step == stretch_end:
                first, stretch_end = state.step, min(config.training.steps, (state.step // every + 1) * every)
                trainable.begin(run, first, stretch_end)
            average = engine.average(trainable.tasks(state.step), lambda task: trainable.gradients(task, state.step))
            descend(parameters, average, state.optimisers)
            trainable.after_update()
            state.step += 1
            stopping = stop.asked
            if state.step % config.training.monitor_every == 0 or state.step == config.training.steps:
                correct = accuracy(network, inputs, labels)
                state.history.append((float(state.step), correct, trainable.monitor(state.step)))
                note = f"test accuracy {correct:.3f}"
            if state.step % every == 0 or state.step == config.training.steps or stopping:
                state.save(run, config.training_hash)
                trainable.saved(run, first, state.step)
            advance(1, note=note)
            if stopping and state.step < config.training.steps:
                stop.raise_if_asked()
    return state


def encoder_and_head(
    network: Network, config: RunConfig, encoder_rule: str | None = None
) -> list[torch.optim.Optimizer]:
    """One descent rule for θ1, which may have its own, and one for θ2."""
    usual = config.training.optimiser
    rules = ((encoder_rule or usual, network.encoder), (usual, network.head))
    return [OPTIMISERS[name](part.parameters(), lr=config.training.learning_rate) for name, part in rules]  # type: ignore[call-arg]


def descend(
    parameters: dict[str, torch.nn.Parameter], gradients: Gradients, optimisers: list[torch.optim.Optimizer]
) -> None:
    for name, gradient in gradients.items():
        if not bool(torch.isfinite(gradient).all()):
            raise ModelError(
                f"the gradient of {name} is not a number.",
                why="The parameters have diverged.",
                remedy="Lower training.learning_rate, or start again with another seed.",
            )
        parameters[name].grad = gradient
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)


@torch.no_grad()
def accuracy(network: torch.nn.Module, inputs: Tensor, labels: Tensor, chunk: int = 1000) -> float:
    """The share of inputs whose largest score is their label's."""
    hits = sum(
        int((network(inputs[i : i + chunk]).argmax(1) == labels[i : i + chunk]).sum())
        for i in range(0, len(inputs), chunk)
    )
    return hits / len(inputs)
