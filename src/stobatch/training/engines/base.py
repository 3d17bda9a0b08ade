"""What an engine does: have the picked trainers' gradients computed, and average them. A file per engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from stobatch.privacy.rounded_gaussian import Grid
from stobatch.training.pieces import ALONE, Share

Gradients = dict[str, Tensor]
"""One gradient per parameter, by the parameter's name in the network; or what else a step releases, by its name."""


@dataclass(frozen=True)
class TrainerTask:
    """What one local trainer does in one step: which trainer, and which of its batches plays which role."""

    trainer: int
    benign_batch: int
    adversarial_batch: int


Parts = Callable[[TrainerTask, Share], Iterable[Gradients]]
"""The parts of a trainer's gradient that one of its devices computes; their sum over all devices is the gradient."""


Stop = Callable[[], bool]
"""Whether this process was asked to stop."""


def never() -> bool:
    return False


@dataclass(frozen=True)
class Averaged:
    """What all processes hold after a step's one message: the average, and whether any of them was asked to stop."""

    gradients: Gradients
    stopping: bool


class Engine(ABC):
    """Runs one step's trainers somewhere and hands the average of their gradients to every process."""

    rank: int = 0
    processes: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes the run's files and shows progress: one does."""
        return self.rank == 0

    @abstractmethod
    def average(
        self,
        tasks: Sequence[TrainerTask],
        parts: Parts,
        targets: Mapping[str, Tensor],
        stop: Stop = never,
        grid: Grid | None = None,
    ) -> Averaged:
        """(1/𝒩) Σᵢ ∇ᵢθ over the tasks, shaped like the targets; `stop` is asked once the own parts are computed.

        With a grid the sum is exact, is rounded to it, and scaled as it says.
        """

    @abstractmethod
    def exchange(self, topic: str, text: str) -> list[str]:
        """Tell all processes a short text, and hear what each of them says; also a meeting point."""

    def common_root(self, own: int) -> int:
        """The root of secret seeds of the process that leads, below 2¹²⁸."""
        return own

    def arrange(self, tasks: int) -> Share:
        """Prepare for steps of so many trainers; says which of a trainer's devices this process is."""
        return ALONE

    def require_equal(self, topic: str, own: Mapping[str, str], remedies: Mapping[str, str]) -> None:
        """Raise where processes differ in what they must have in common."""
        return

    def open_log(self, run: Path) -> None:
        """Begin this process's log, where there are several."""
        return

    def note(self, line: str) -> None:
        """Write to this process's log, if it has one."""
        return
