"""Which trainers work in a step: the batch after the other (Algorithm 1), or picked at random (Algorithm 4).

Algorithm 1 is Algorithm 4 with one trainer whose pair of batches moves on at every step; everything else is shared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from stobatch.data.partition import pick_trainers, trainer_batches
from stobatch.errors import SettingError
from stobatch.paper import implements
from stobatch.seeds import Seeds
from stobatch.training.engines import TrainerTask


@dataclass(frozen=True)
class Schedule(ABC):
    """Maps a step to the tasks of that step; a pure function of the step and the seeds."""

    num_batches: int
    seeds: Seeds

    @abstractmethod
    def tasks(self, step: int) -> list[TrainerTask]: ...


@final
@dataclass(frozen=True)
class IterativeSchedule(Schedule):
    """Step t takes batch i = t mod N/m as benign and batch i + 1 as the source of adversarial examples."""

    def __post_init__(self) -> None:
        _need_two(self.num_batches)

    def tasks(self, step: int) -> list[TrainerTask]:
        return [TrainerTask(0, step % self.num_batches, (step + 1) % self.num_batches)]


@final
@implements(
    "Algorithm 4",
    verdict="implemented as printed; sharing χ1, χ2, χ3 among trainers lets the server and peers see exact gradients.",
)
@dataclass(frozen=True)
class StochasticSchedule(Schedule):
    """N/(2m) trainers own two fixed batches each; 𝒩 of them are picked at random for every step."""

    trainers_per_step: int = 1

    def __post_init__(self) -> None:
        _need_two(self.num_batches)
        if self.trainers_per_step > self.num_batches // 2:
            raise SettingError(
                f"trainers_per_step={self.trainers_per_step} is more than the {self.num_batches // 2} trainers.",
                why="Algorithm 4 has N/(2m) trainers with two batches each.",
                remedy="Lower method.trainers_per_step or method.batch_size.",
            )

    def tasks(self, step: int) -> list[TrainerTask]:
        pairs = trainer_batches(self.num_batches, self.seeds.generator("trainers"))
        picked = pick_trainers(len(pairs), self.trainers_per_step, self.seeds.generator("step", step, "pick"))
        return [TrainerTask(int(i), int(pairs[i, 0]), int(pairs[i, 1])) for i in picked]


def _need_two(num_batches: int) -> None:
    if num_batches < 2:
        raise SettingError(
            f"the data fill {num_batches} whole batches, a step needs two.",
            why="One batch is benign, the other is the source of adversarial examples.",
            remedy="Lower method.batch_size to at most half of the training examples.",
        )
