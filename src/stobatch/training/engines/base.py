"""What an engine does: compute the gradients of the picked trainers and average them. A file per engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

Gradients = dict[str, Tensor]
"""One gradient per parameter, by the parameter's name in the network."""


@dataclass(frozen=True)
class TrainerTask:
    """What one local trainer does in one step: which trainer, and which of its batches plays which role."""

    trainer: int
    benign_batch: int
    adversarial_batch: int


class Engine(ABC):
    """Runs one step's trainers somewhere and hands back the average of their gradients."""

    @abstractmethod
    def average(self, tasks: Sequence[TrainerTask], compute: Callable[[TrainerTask], Gradients]) -> Gradients:
        """(1/𝒩) Σᵢ ∇ᵢθ over the tasks, summed in the order of the tasks."""
