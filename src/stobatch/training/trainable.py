"""What a method hands to the training loop, and what methods make their steps of.

A `Trainable` says who works in a step, what each adds and what is kept. Steps read examples by position (`Reader`),
in the precision of the settings, and are watched on held-out test images (`Monitored`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stobatch.config import RunConfig
from stobatch.data import Examples, TrainingExamples
from stobatch.dp.canaries import Canaries
from stobatch.dp.noise import Grid
from stobatch.errors import ModelError
from stobatch.later import Later
from stobatch.models import Classifier, budget_mb, rows_in_memory
from stobatch.models.validators import unchanged
from stobatch.training.engines import Averaged, Engine, Gradients, InProcessEngine, Stop, TrainerTask, never
from stobatch.training.engines.base import DeviceRank
from stobatch.training.ledger import Stretch

EPSILON_SPENT = "epsilon_spent"
"""What methods that descend by DP-SGD monitor; shown with the status of the plan's guarantee only."""
BEFORE_AVERAGING = "the parameters of that step, before averaging"
"""Whose accuracy is monitored where the saved model is an average over steps."""
_MOST_MONITORED = 1000
"""Test images that pass at once, where the budget of memory allows as many."""
_MOST_FEATURES = 8
"""Features of an example that are kept for each of its values, which take twice as many bytes."""


class Trainable(ABC):
    """Something that can be trained: who works in a step, what each adds, and what is kept."""

    network: Classifier
    monitored: ClassVar[str]
    """What `monitor` measures."""
    history_of: ClassVar[str] = "the parameters of that step"
    """Whose accuracy is monitored along the way; the saved model's is measured apart."""
    claims_privacy: ClassVar[bool] = True
    """Whether a guarantee is claimed, so that passes must leave nothing of the examples behind in the network."""
    released_state: ClassVar[frozenset[str]] = frozenset()
    """Buffers of the network that the method itself computes from its releases, by name."""
    later: Later | None = None
    """Where questions to a GPU are kept open until somebody looks; None where they are answered at once."""
    attempt: int = 0
    """Of the present steps: how often they were begun before with other bits. Part of the names of their draws."""

    @abstractmethod
    def optimisers(self, config: RunConfig) -> list[torch.optim.Optimizer]:
        """Return the descent rules; each parameter belongs to one of them."""

    @abstractmethod
    def tasks(self, step: int) -> list[TrainerTask]:
        """Return who works in this step."""

    @abstractmethod
    def parts(self, task: TrainerTask, step: int, share: DeviceRank) -> Iterator[Gradients]:
        """Return what one of a trainer's devices adds to its gradient at the present parameters, piece by piece.

        The pieces of all devices sum to the trainer's gradient, and what a piece is does not depend on their number
        (on a CPU). A part may leave out parameters that it does not move.
        """

    def gradients(self, task: TrainerTask, step: int) -> Gradients:
        """Return what one trainer adds to a step at the present parameters, all computed here."""
        parts, targets = partial(self._parts_of, step), self.targets(step)
        return InProcessEngine().average([task], parts, targets, grid=self.grid(step)).gradients

    def _parts_of(self, step: int, task: TrainerTask, share: DeviceRank) -> Iterator[Gradients]:
        # Checked before the parts are added to those of other devices, so nothing is released.
        with self.keeping_state():
            yield from self.parts(task, step, share)

    def keeping_state(self) -> AbstractContextManager[None]:
        """Raise if examples that pass in the block change the network, where a guarantee is claimed."""
        return unchanged(self.network, self.later) if self.claims_privacy else nullcontext()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return what moves, by name."""
        return {name: p for name, p in self.network.named_parameters() if p.requires_grad}

    def targets(self, step: int) -> Mapping[str, Tensor]:
        """Return what a step's release is for, by name: the parameters, unless the step releases something else."""
        return self.parameters

    def grid(self, step: int) -> Grid | None:
        """Return what the sum of a step's parts is rounded to, where the step's noise has a grid."""
        return None

    def release(self, step: int, engine: Engine, stop: Stop = never) -> Averaged:
        """Return the gradients of a step as anyone may see them, averaged over its trainers."""
        parts, targets = partial(self._parts_of, step), self.targets(step)
        averaged = engine.average(self.tasks(step), parts, targets, stop, self.grid(step))
        self.released(step, averaged.gradients)
        return averaged

    def check_data(self, share: DeviceRank) -> None:
        """Check that what one of a trainer's devices will read is there; called before anything is written."""
        return

    def released(self, step: int, gradients: Gradients) -> None:
        """Take note of what a step released, before the parameters move."""
        return

    @abstractmethod
    def after_update(self) -> None:
        """Restore what the plan assumed about the parameters, such as a bound on their norm."""

    @abstractmethod
    def save_private(self, run: Path, config_hash: str) -> None:
        """Store, for the owner's eyes only, what a later load needs besides the weights."""

    @abstractmethod
    def monitor(self, step: int) -> float:
        """Return a public number worth watching: computed from the parameters and the plan, never from the data."""

    def add_canaries(self, planted: Canaries) -> None:
        """Train with records in addition to the data, as an audit needs; each is treated exactly like an example."""
        raise ModelError(
            "this method has no room for canaries beside its data.",
            why="Its neighbouring data sets have one size, so a canary takes the place of a record.",
            remedy="Plant input canaries: canaries.kind=input.",
        )

    def contributions(self, inputs: Tensor, labels: Tensor, step: int, groups: Tensor | None = None) -> Gradients:
        """Return what examples add to a release at the present parameters, noise apart; for methods that bound it.

        `groups` are the numbers of the persons whom they belong to, where the guarantee is about persons.
        """
        raise ModelError(
            "this method does not bound what an example adds to a step.",
            remedy="Audit the trained model: audit.view=final and audit.canary=input.",
        )

    @property
    def per_example_bound(self) -> float:
        """Return the norm that bounds one example's part of a release, where there is one."""
        return 0.0

    def extra_state(self) -> dict[str, Tensor]:
        """Return what has to survive a restart besides parameters and optimisers; changed in place."""
        return {}

    def begin(self, run: Path, stretch: Stretch) -> int:
        """Enter steps that are about to be made, also those that a crash cut off; says which attempt they are."""
        return 0

    def saved(self, run: Path, step: int, state: str) -> None:
        """Note that the stretch was made up to this step, and that its outcome, with that digest, is safe on disk."""
        return

    def distrust(self, run: Path) -> None:
        """Distrust the present steps, which were computed wrongly: made again, they are other steps."""
        return

    def require_counted(self, run: Path, step: int) -> None:
        """Refuse to go on from a checkpoint whose steps are not counted."""
        return

    def use_average(self) -> None:
        """Turn the last parameters into the model. Repeatable."""
        return

    def finish(self, run: Path) -> dict[str, Any]:
        """Turn the last parameters into the model, and say what is worth keeping about the training."""
        self.use_average()
        return {}


def parameter_precision(name: str) -> torch.dtype:
    """Return what the parameters are kept in. Mixed precision keeps them in float32."""
    return torch.float64 if name == "float64" else torch.float32


def working_precision(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Use bfloat16 in passes where PyTorch thinks it safe, or compute as the parameters are."""
    return torch.autocast(device.type, torch.bfloat16) if name == "bfloat16" else nullcontext()


class Reader:
    """Examples by position. Those in memory move to the device once; those on disk are read when they are needed."""

    def __init__(self, examples: TrainingExamples, device: torch.device, dtype: torch.dtype) -> None:
        self.examples, self.device, self.dtype = examples, device, dtype
        if isinstance(examples, Examples):
            self.kept = examples.inputs.to(device, dtype), examples.labels.to(device)

    @torch.no_grad()
    def keep_features(self, front: nn.Module, rows_at_once: int) -> None:
        """Keep what a fixed layer makes of the examples in their place, if they are in memory; in half precision.

        Nothing of it is written anywhere. Features that take much more memory than the examples are computed again.
        """
        if not isinstance(self.examples, Examples) or self.dtype is not torch.float32:
            return
        inputs, labels = self.kept
        each = front(inputs[:1])[0]
        if each.numel() <= _MOST_FEATURES * inputs[0].numel():
            features = torch.empty(len(inputs), *each.shape, dtype=torch.float16, device=self.device)
            for rows in torch.split(torch.arange(len(inputs), device=self.device), rows_at_once):
                features[rows] = front(inputs[rows]).half()
            self.kept = features, labels

    def beside(self, rows: Tensor) -> Tensor:
        """Return positions where the examples are: a copy at each step would wait until a GPU has nothing to do."""
        return rows.to(self.device) if isinstance(self.examples, Examples) else rows

    def fetch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and labels at these positions."""
        if isinstance(self.examples, Examples):
            there = rows.to(self.device)
            return self.kept[0][there].to(self.dtype), self.kept[1][there]
        inputs, labels = self.examples.fetch(rows)
        return inputs.to(self.device, self.dtype), labels.to(self.device)


@dataclass(frozen=True)
class Monitored:
    """The held-out test images that a training is watched on."""

    inputs: Tensor
    labels: Tensor
    rows_at_once: int

    @classmethod
    def of(cls, held_out: Examples, config: RunConfig, network: Classifier) -> Monitored:
        few = held_out.limit(config.training.monitor_examples)
        rows = rows_in_memory(network, budget_mb(config.machine), most=_MOST_MONITORED)
        inputs, labels = few.inputs.to(network.device, network.dtype), few.labels.to(network.device)
        return cls(inputs, labels, min(rows, _MOST_MONITORED))

    @torch.no_grad()
    def accuracy(self, network: nn.Module) -> float:
        """Return the share of images whose largest score is their label's."""
        rows = self.rows_at_once
        parts = zip(torch.split(self.inputs, rows), torch.split(self.labels, rows), strict=True)
        return sum(int((network(x).argmax(1) == y).sum()) for x, y in parts) / len(self.labels)

    def saved(self, network: nn.Module) -> dict[str, Any]:
        """Return what `training.json` says of the model that is saved, averaged where the method averages."""
        return {"test_accuracy": self.accuracy(network), "test_examples": len(self.labels)}
