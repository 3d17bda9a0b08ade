"""The training loop: the same for one trainer (Algorithm 1) and for many (Algorithm 4), and for every method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from stobatch.config import RunConfig
from stobatch.data import Examples
from stobatch.errors import ModelError
from stobatch.interrupts import finish_first
from stobatch.models import Network
from stobatch.progress import progress
from stobatch.training.checkpoint import TrainingState
from stobatch.training.engines import Engine, Gradients, TrainerTask


class Trainable(ABC):
    """What a method hands to the loop."""

    network: Network
    encoder_optimiser: str | None = None
    """A descent rule of its own for θ1; the configured one if unset."""

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
    state = TrainingState(network, _optimisers(trainable, config))
    if resume and state.restore(run, config.training_hash):
        trainable.after_update()
    parameters = dict(network.named_parameters())
    inputs = held_out.inputs[: config.training.monitor_examples].to(network.encoder.weight.device)
    labels = held_out.labels[: config.training.monitor_examples].to(inputs.device)
    note = ""
    with (
        finish_first() as stop,
        progress("train", config.training.steps, start=state.step, quiet=quiet) as advance,
    ):
        while state.step < config.training.steps:
            average = engine.average(trainable.tasks(state.step), lambda task: trainable.gradients(task, state.step))
            _descend(parameters, average, state.optimisers)
            trainable.after_update()
            state.step += 1
            if state.step % config.training.monitor_every == 0 or state.step == config.training.steps:
                correct = accuracy(network, inputs, labels)
                state.history.append((float(state.step), correct, network.encoder.max_column_norm()))
                note = f"test accuracy {correct:.3f}"
            if state.step % config.machine.checkpoint_every == 0 or state.step == config.training.steps or stop.asked:
                state.save(run, config.training_hash)
            advance(1, note=note)
            if state.step < config.training.steps:
                stop.raise_if_asked()
    return state


def _optimisers(trainable: Trainable, config: RunConfig) -> list[torch.optim.Optimizer]:
    """One descent rule for θ1 and one for θ2."""
    network, usual = trainable.network, config.training.optimiser
    rules = ((trainable.encoder_optimiser or usual, network.encoder), (usual, network.head))
    return [OPTIMISERS[name](part.parameters(), lr=config.training.learning_rate) for name, part in rules]  # type: ignore[call-arg]


def _descend(
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
