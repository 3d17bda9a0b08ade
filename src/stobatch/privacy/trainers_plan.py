"""The plan of DP-SGD by several trainers who own disjoint parts of the data (docs/guarantees.md, section 9).

A record belongs to one trainer, and reaches the others only through what that trainer releases. So the privacy of a
record is that of its own trainer's releases, and that of the whole the worst of the trainers'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

from stobatch.errors import SettingError
from stobatch.privacy.accounting import PoissonGaussian, noise_for
from stobatch.privacy.dpsgd_plan import DpSgdPlan
from stobatch.privacy.guarantee import PrivacyGuarantee
from stobatch.privacy.plan import PlanRow


@dataclass(frozen=True, kw_only=True)
class TrainersPlan(DpSgdPlan):
    """`per_step` of `num_trainers` trainers take part in a step, by turns in a random order.

    Nobody is drawn twice before everybody had a turn, so the number of steps a trainer takes part in is known
    beforehand; who takes part is treated as public and amplifies nothing.

    **Guarantee**: (ε, δ)-differential privacy for adding or removing one example of any one trainer, towards those who
    see every trainer's release (`noise_shares=False`: each adds all the noise), or towards those who see the sums
    alone (`noise_shares=True`: each adds a share, and the shares sum to the noise).

    >>> plan = TrainersPlan(num_examples=60_000, expected_batch_size=2_400, steps=240, clip_norm=1.0,
    ...     target_epsilon=1.0, delta=1e-5, tuned_on_private_data=False, num_trainers=12, per_step=3)
    >>> plan.sampling_rate, plan.participations(240)
    (0.16, 60)
    """

    num_trainers: int
    per_step: int = 1
    noise_shares: bool = False

    def _check_sizes(self) -> None:
        super()._check_sizes()
        if self.sampling_rate > 1:
            most = self.num_examples * self.per_step // self.num_trainers
            raise SettingError(
                f"expected_batch_size={self.expected_batch_size} is more than the {self.per_step} trainers of a step "
                f"own, about {most} examples.",
                remedy=f"Set method.expected_batch_size to at most {most}, or raise trainers.per_step.",
            )

    @property
    def sampling_rate(self) -> float:
        """q, the probability that a step takes a given example of a trainer who takes part."""
        return self.expected_batch_size * self.num_trainers / (self.num_examples * self.per_step)

    @property
    def turns(self) -> int:
        """Steps in which everybody has at most one turn."""
        return self.num_trainers // self.per_step

    def participations(self, steps: int) -> int:
        """The most that a trainer takes part in the first `steps` steps."""
        return -(-steps // self.turns)

    @property
    def epochs(self) -> float:
        return self.participations(self.steps) * self.sampling_rate

    @property
    def noise_multiplier(self) -> float:
        releases = self.participations(self.steps) + self.spare_steps
        return noise_for(self.target_epsilon, self.delta, self.sampling_rate, releases)

    @property
    def noise_stddev(self) -> float:
        """Of what one trainer adds to the sum of its clipped contributions, per coordinate."""
        whole = self.noise_multiplier * self.clip_norm
        return whole / sqrt(self.per_step) if self.noise_shares else whole

    @property
    def denominator(self) -> float:
        """Its own part of the batch size: the average over the trainers of a step then has the whole."""
        return self.expected_batch_size / self.per_step

    def mechanism(self, steps: int) -> PoissonGaussian:
        # Which trainers a crash made repeat their steps is not kept: each is counted for all of them.
        again = max(0, steps - self.steps)
        return PoissonGaussian(self.sampling_rate, self.noise_multiplier, self.participations(steps - again) + again)

    @property
    def claim(self) -> PrivacyGuarantee:
        return replace(super().claim, unit="training example of any one trainer")

    def _repeated(self, steps: int) -> str:
        return f"{super()._repeated(steps)}; each trainer is counted for all of them"

    def _assumptions(self) -> tuple[str, ...]:
        if self.noise_shares:
            seen = (
                f"the {self.per_step} trainers of a step add independent noise of 1/√{self.per_step} each, and only "
                "their sum is seen: by a trusted server, or through secure aggregation; no trainer drops out"
            )
        else:
            seen = "each trainer adds all the noise by itself, so the server and the others may see all that it sends"
        return (
            f"{self.num_trainers} trainers own disjoint parts of the data, fixed beforehand; ε is the largest of all",
            f"a trainer takes part in at most {self.participations(self.steps)} of {self.steps} steps; who does so is "
            "treated as public, and amplifies nothing",
            seen,
            "trainers draw their noise and their samples independently of each other",
            *super()._assumptions(),
        )

    def rows(self) -> list[PlanRow]:
        def changed(row: PlanRow) -> PlanRow:
            if row.name == "sampling rate":
                return replace(row, formula="B n / (N 𝒩), Poisson, inside a trainer that takes part")
            if row.name == "noise on the mean, standard deviation":
                on_sum = self.noise_stddev * sqrt(self.per_step)
                return replace(row, value=on_sum / self.expected_batch_size, formula="of all trainers together")
            return row

        of_trainers = [
            PlanRow("trainers", "n", self.num_trainers, "owners of disjoint data", "Algorithm 4"),
            PlanRow("trainers in a step", "𝒩", self.per_step, "by turns", "Algorithm 4"),
            PlanRow("steps of one trainer, at most", "", self.participations(self.steps), "", ""),
        ]
        return [*of_trainers, *(changed(row) for row in super().rows())]
