"""What an engine does: have the picked trainers' gradients computed, and average them. `distributed` has the other one.

A trainer's work is cut into pieces of rows (`split_rows`), which its devices share (`DeviceRank`); what a piece is does
not depend on who computes it, so that any number of processes gives the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from stobatch.dp.noise import Grid
from stobatch.training.exact_sum import ExactSum

_SMALL = 64
"""Fewer rows than this are not worth sharing."""
PIECES = 4
"""On a CPU, larger work is cut into a multiple of this many pieces, unless `machine.pieces` says otherwise."""


@dataclass(frozen=True)
class DeviceRank:
    """One of the devices of a trainer.

    >>> [piece for piece in range(7) if DeviceRank(1, 3).takes(piece)]
    [1, 4]
    """

    device: int = 0
    devices: int = 1

    @property
    def first(self) -> bool:
        """Return whether it does what is done once for the trainer, such as drawing its noise."""
        return self.device == 0

    def takes(self, piece: int) -> bool:
        return piece % self.devices == self.device


SINGLE_DEVICE = DeviceRank()
"""The only device of its trainer."""


def split_rows(size: int, most: int, device: torch.device, share: DeviceRank, pieces: int = PIECES) -> list[slice]:
    """Return rows 0 to `size` in pieces of at most `most`, equally large up to one row.

    On a CPU they are a multiple of `pieces`, for any number of devices up to that: all have equally much to do if
    their number divides it. A GPU wants its whole part at once, so there the number of devices decides, and results
    differ by rounding.

    >>> [piece.stop - piece.start for piece in split_rows(2499, 833, torch.device("cpu"), SINGLE_DEVICE)]
    [624, 625, 625, 625]
    """
    count = -(-size // most)
    if device.type == "cpu":
        count = count if size < _SMALL else -(-count // pieces) * pieces
    else:
        count = max(count, share.devices)
    count = min(count, size)
    ends = [size * index // count for index in range(1, count + 1)] if count else []
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


Gradients = dict[str, Tensor]
"""One gradient per parameter, by the parameter's name in the network; or what else a step releases, by its name."""


@dataclass(frozen=True)
class TrainerTask:
    """What one local trainer does in one step: which trainer, and which of its batches plays which role."""

    trainer: int
    benign_batch: int
    adversarial_batch: int


Parts = Callable[[TrainerTask, DeviceRank], Iterable[Gradients]]
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
        """Return whether this process writes the run's files and shows progress: one does."""
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
        """Return (1/𝒩) Σᵢ ∇ᵢθ over the tasks, shaped like the targets; `stop` is asked once the own parts are computed.

        With a grid the sum is exact, is rounded to it, and scaled as it says.
        """

    @abstractmethod
    def exchange(self, topic: str, text: str) -> list[str]:
        """Tell all processes a short text, and return what each of them says; also a meeting point."""

    def common_root(self, own: int) -> int:
        """Return the root of secret seeds of the process that leads, below 2¹²⁸."""
        return own

    def arrange(self, tasks: int) -> DeviceRank:
        """Prepare for steps of this many trainers; return which of a trainer's devices this process is."""
        return SINGLE_DEVICE

    def require_equal(self, topic: str, own: Mapping[str, str], remedies: Mapping[str, str]) -> None:
        """Raise where processes differ in what they must have in common."""
        return

    def open_log(self, run: Path) -> None:
        """Open this process's log, where there are several."""
        return

    def note(self, line: str) -> None:
        """Write to this process's log, if it has one."""
        return


@final
class InProcessEngine(Engine):
    """The reference engine: every other engine must give the same parameters as this one."""

    def average(
        self,
        tasks: Sequence[TrainerTask],
        parts: Parts,
        targets: Mapping[str, Tensor],
        stop: Stop = never,
        grid: Grid | None = None,
    ) -> Averaged:
        total = ExactSum(targets, grid)
        for task in tasks:
            for part in parts(task, SINGLE_DEVICE):
                total.add(part)
        return Averaged(total.mean(len(tasks)), stop())

    def exchange(self, topic: str, text: str) -> list[str]:
        return [text]
