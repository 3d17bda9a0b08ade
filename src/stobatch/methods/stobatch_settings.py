"""The published mechanism's settings, and the schedule they describe."""

from __future__ import annotations

from dataclasses import dataclass

from stobatch.config import MethodConfig
from stobatch.seeds import Seeds
from stobatch.settings import setting
from stobatch.training.schedule import IterativeSchedule, Schedule, StochasticSchedule


@dataclass(frozen=True)
class StoBatchConfig(MethodConfig, name="stobatch"):
    """The published mechanism's settings, by default those of Appendix P for MNIST."""

    total_epsilon: float = setting(1.0, above=0, doc="The total budget that Theorem 4 claims")
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
        "shared", choices=("shared", "per_class"), doc="χ3 as one vector for all classes (the paper) or one per class"
    )


def schedule_of(config: StoBatchConfig, num_batches: int, seeds: Seeds) -> Schedule:
    if config.schedule == "iterative":
        return IterativeSchedule(num_batches, seeds)
    return StochasticSchedule(num_batches, seeds, config.trainers_per_step)
