"""The published mechanism's settings, and the schedule they describe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from stobatch.config import MethodConfig
from stobatch.data.partition import pick_trainers, trainer_batches
from stobatch.errors import SettingError
from stobatch.paper import implements
from stobatch.seeds import Seeds
from stobatch.settings import setting
from stobatch.training.engines import TrainerTask


class PublishedConfig(MethodConfig, name="stobatch"):
    """The published mechanism's settings, by default those of Appendix P for MNIST."""

    epsilon: float = setting(1.0, above=0, doc="The total budget that Theorem 4 claims", stored="total_epsilon")
    label_epsilon: float = setting(0.1, above=0, doc="The label budget ε2, or its base where it grows with the total")
    budget_split: str = setting(
        "fixed_label", choices=("fixed_label", "third_of_surplus"), doc="How the total is split (Appendix P)"
    )
    encoder_norm_bound: float = setting(
        1.0, above=0, at_most=1, doc="Bound on ‖θ1‖₁,₁, enforced at every step; at most 1 keeps θ1ᵀx in [-1, 1]"
    )
    batch_size: int = setting(2499, at_least=1, doc="Examples in each fixed batch, m")
    schedule: str = setting(
        "stochastic", choices=("iterative", "stochastic"), doc="Algorithm 1 (iterative) or Algorithm 4 (stochastic)"
    )
    trainers_per_step: int = setting(1, at_least=1, doc="Trainers picked per step in Algorithm 4, 𝒩")
    adversarial_weight: float = setting(1.0, at_least=0, doc="The weight ξ of the adversarial loss")
    attack_ensemble: tuple[str, ...] = setting(
        ("ifgsm", "mim", "madry"), choices=("ifgsm", "mim", "madry"), doc="The attacks A that craft training examples"
    )
    train_attack_steps: int = setting(10, at_least=1, doc="Steps of each training attack, T_μ")
    train_attack_max_radius: float = setting(
        1.0, above=0, at_most=2, doc="μ_t is drawn from (0, this], l-infinity over [-1, 1]"
    )
    taylor: str = setting(
        "corrected", choices=("corrected", "published"), doc="The expansion of the loss: right, or as printed"
    )
    label_noise: str = setting(
        "shared",
        choices=("shared", "per_class", "penalty"),
        doc="χ3 as one vector for all classes (the paper), one per class, or as the released code has it for "
        "photographs: no noise, a penalty mean |χ3 W| on the last weights, and a loss that is the mean over classes",
    )

    @property
    def hides_labels(self) -> bool:
        """Return whether labels get noise at all."""
        return self.label_noise != "penalty"


def schedule_of(config: PublishedConfig, num_batches: int, seeds: Seeds) -> Schedule:
    if config.schedule == "iterative":
        return IterativeSchedule(num_batches, seeds)
    return StochasticSchedule(num_batches, seeds, config.trainers_per_step)


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
        _require_two_batches(self.num_batches)

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
        _require_two_batches(self.num_batches)
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


def _require_two_batches(num_batches: int) -> None:
    if num_batches < 2:
        raise SettingError(
            f"the data fill {num_batches} whole batches, a step needs two.",
            why="One batch is benign, the other is the source of adversarial examples.",
            remedy="Lower method.batch_size to at most half of the training examples.",
        )
