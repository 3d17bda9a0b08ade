"""Privacy plans: every number that privacy depends on, fixed before data is read; DP-SGD by one or several trainers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, sqrt
from typing import Any, final

from stobatch.dp.accounting import LEAST_NOISE, MOST_NOISE, PoissonGaussian, check_delta, noise_for
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.dp.prior import Prior
from stobatch.dp.selection import Search, Searched
from stobatch.errors import SettingError
from stobatch.types import Neighbours, Status


@dataclass(frozen=True)
class TrainedPart:
    """The trained parameters of a network, by name and number of values; adapters are not counted in `parameters`."""

    names: tuple[str, ...]
    trained: int
    parameters: int


@dataclass(frozen=True)
class PlanRow:
    """One line of the printed plan."""

    name: str
    symbol: str
    value: float
    formula: str
    paper: str


@dataclass(frozen=True)
class Plan(ABC):
    """The guarantee of a training and the numbers it follows from, all public."""

    public_seeds: bool = field(default=False, kw_only=True)
    """Whether the seeds are known to others, who can then subtract the noise."""
    prior: Prior | None = field(default=None, kw_only=True)
    """The weights that training starts from; None where they are random."""
    network: tuple[str, ...] = field(default=(), kw_only=True)
    """For a user's network: how it is clipped, and which certificates it will have; no number depends on it."""
    parts: TrainedPart | None = field(default=None, kw_only=True)
    """The trained parameters; None where all are trained."""
    classes_from_labels: bool = field(default=False, kw_only=True)
    """Whether the number of classes was read off the training data, and not given."""
    read_from_folder: tuple[str, ...] = field(default=(), kw_only=True)
    """What of classes, size and colour was read off a folder of private pictures, and not given."""
    provider: str | None = field(default=None, kw_only=True)
    """Whose code the method is, in words; None where it is built in."""

    @property
    @abstractmethod
    def claim(self) -> PrivacyGuarantee:
        """Return the guarantee of the mechanism with secret seeds and random initial weights."""

    @final
    @property
    def guarantee(self) -> PrivacyGuarantee:
        """Return the guarantee for the training data: the claim with its prior, void where the seeds are public."""
        claim = self.in_context(self.claim)
        return claim.with_public_seed() if self.public_seeds else claim

    @final
    def in_context(self, claim: PrivacyGuarantee) -> PrivacyGuarantee:
        """Return a claim of the mechanism with what the training started from, and how its data were described."""
        if self.classes_from_labels and claim.status is not Status.NONE:
            claim = replace(claim, objections=(*claim.objections, CLASSES_OBJECTION))
        if self.read_from_folder and claim.status is not Status.NONE:
            objection = _object_to_reading(self.read_from_folder)
            claim = replace(claim, objections=(*claim.objections, objection))
        if self.provider is not None and claim.status is not Status.NONE:
            foreign = f"{FOREIGN_METHOD} {self.provider}, {_NOT_CHECKED}"
            claim = replace(claim, assumptions=(*claim.assumptions, foreign))
        return claim.started_from(self.prior)

    def after(self, accounted_steps: int) -> PrivacyGuarantee:
        """Return the claim after this many steps, steps repeated after a crash included."""
        return self.claim

    def recorded(self, rounds: Mapping[str, int], excluded: Mapping[str, str]) -> Plan:
        """Return the plan after a federation: `rounds` counts the answers of each party, `excluded` gives reasons."""
        return self

    @property
    def curve(self) -> PoissonGaussian | None:
        """Return the mechanism whose privacy loss the training does not exceed; None where no mechanism is proved."""
        return None

    def mechanism_of(self, accounted_steps: int | None = None) -> PoissonGaussian | Search | None:
        """Return the mechanism to account for, of the plan or of the counted steps; None where none is proved."""
        return None

    @abstractmethod
    def rows(self) -> list[PlanRow]:
        """Return the lines of the printed plan."""

    def sizes(self) -> dict[str, Any]:
        """Return the public numbers that the plan was derived from."""
        not_sizes = ("public_seeds", "parts", "prior", "network", "classes_from_labels", "read_from_folder", "provider")
        return {name: value for name, value in vars(self).items() if name not in not_sizes}

    def _part_rows(self) -> list[PlanRow]:
        parts = self.parts
        return [PlanRow("parameters trained", "", parts.trained, f"of {parts.parameters}", "")] if parts else []

    def to_dict(self) -> dict[str, Any]:
        rows = [vars(row) for row in (*self.rows(), *self._part_rows())]
        network = {"network": list(self.network)} if self.network else {}
        return {"guarantee": self.guarantee.to_dict(), "sizes": self.sizes(), "rows": rows, **network}


@dataclass(frozen=True)
class OpenPlan(Plan):
    """The plan of a method without privacy."""

    num_examples: int
    batch_size: int
    method: str

    @property
    def claim(self) -> PrivacyGuarantee:
        return PrivacyGuarantee.none(f"{self.method} is not private")

    def rows(self) -> list[PlanRow]:
        return [
            PlanRow("training examples", "N", self.num_examples, "", "Section 2"),
            PlanRow("batch size", "m", self.batch_size, "random batches", ""),
        ]


MOST_EPSILON = 100.0
"""A larger ε promises nothing (e^100 to one), and is taken for a typing error."""

LEAST_CLIP_NORM, MOST_CLIP_NORM = 1e-12, 1e12
"""Between them clipping in float32 is accurate up to rounding; gradients are below 1e19."""

TUNING_OBJECTION = (
    "hyper-parameters were chosen on the private data: the search is not covered by this ε, which holds for the last "
    "run alone"
)
SEARCH_OBJECTION = (
    "the list of settings that were searched, and every setting that was not, were chosen on the private data: this ε "
    "covers the choice among the list alone"
)
NOISE_ASSUMPTION = (
    "the noise is an ideal Gaussian rounded to a public grid, exactly; its random bits and those of samples come from "
    "SHAKE-256, which is taken to be indistinguishable from fair coins"
)
OLD_TUNING_ASSUMPTION = (
    "hyper-parameters and preprocessing were chosen on the private data, which this ε does not cover"
)
"""What files of older versions also have among the assumptions, and is none."""
NOISE_ASSUMPTION_OF_PARTIES = f"{NOISE_ASSUMPTION}; how long an answer takes tells nothing"
OLD_NOISE_ASSUMPTION_OF_PARTIES = (
    "floating-point Gaussian noise is treated as ideal, and how long an answer takes tells nothing"
)
"""What files of older federations have in its place, although their noise was rounded to a grid."""
FOREIGN_METHOD = "the method and its loss are those of"
_NOT_CHECKED = (
    "which stobatch did not check: only where its steps are those of the DP-SGD family is it tried before the first "
    "one, on a few public points, that no example's values change another's loss"
)
CLASSES_OBJECTION = (
    "the number of classes was read off the labels, which are private data: ε does not cover that, and one record may "
    "have decided it"
)


def _object_to_reading(what: tuple[str, ...]) -> str:
    """Return the objection to what a folder of private pictures decided.

    >>> _object_to_reading(("classes", "colour"))[:63]
    'the classes and colour of pictures were read off a private fold'
    """
    listed = " and ".join(filter(None, (", ".join(what[:-1]), what[-1])))
    settings = ", ".join(f"data.{one}" for one in what)
    return (
        f"the {listed} of pictures were read off a private folder: ε does not cover that, and one picture may have "
        f"decided it ({settings} would say it without them)"
    )


@dataclass(frozen=True, kw_only=True)
class DpSgdPlan(Plan):
    """DP-SGD: Poisson batches, one clipped contribution per example, Gaussian noise on the sum, a public denominator.

    A contribution is everything that a step takes from one example: the gradients of its benign loss, of its
    adversarial versions and of its reconstruction, clipped as one vector. So the sum changes by at most C when the
    example is added or removed.

    Where the examples belong to persons (`num_persons`), the unit is a person: a step takes each person with
    probability B / P, at most `records_per_person` of that person's records, and clips their mean gradient.

    **Guarantee**: (ε, δ)-differential privacy for adding or removing one example, or one person with all records, with
    the accounted ε at most `target_epsilon`. The noise follows from the other numbers, or is given, and then a plan
    that would exceed the target is refused. All numbers are public and fixed before any data is read.

    >>> plan = DpSgdPlan(num_examples=60_000, expected_batch_size=2_499, steps=240, clip_norm=1.0, target_epsilon=1.0,
    ...                  delta=1e-5, tuned_on_private_data=False)
    >>> round(plan.noise_multiplier, 2), plan.guarantee.epsilon <= 1.0
    (2.61, True)
    """

    num_examples: int
    expected_batch_size: int
    steps: int
    clip_norm: float
    target_epsilon: float
    delta: float
    tuned_on_private_data: bool
    records_per_person: int = 1
    spare_steps: int = 0
    """Steps that may be repeated after a crash, with fresh randomness, within the budget."""
    given_noise_multiplier: float | None = None
    """σ where it was given; unset, it is the smallest within the target."""
    searched: Searched | None = None
    """The search that this training is a candidate of; None outside searches."""
    num_persons: int | None = None
    """The number of persons whom the examples belong to, where the unit is a person; batches then count persons."""

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_budget()
        PoissonGaussian(self.sampling_rate, 1.0, self.most_steps)  # checks the steps
        if self.given_noise_multiplier is not None:
            self._check_noise(self.given_noise_multiplier)

    def _check_sizes(self) -> None:
        if not 1 <= self.expected_batch_size <= self.num_units:
            whole = "training examples" if self.num_persons is None else "persons"
            raise SettingError(
                f"batch_size={self.expected_batch_size} does not fit {self.num_units} {whole}.",
                why=f"Each step takes every {self.word} with probability batch_size / {self.num_units}.",
                remedy=f"Set method.batch_size to a number from 1 to {self.num_units}.",
            )
        if not LEAST_CLIP_NORM <= self.clip_norm <= MOST_CLIP_NORM:
            raise SettingError(
                f"clip_norm={self.clip_norm:g} is not allowed.",
                why="It bounds what one example adds to a step, and the noise is a multiple of it; gradients far below "
                "or above vanish or overflow in float32, and so would the bound.",
                remedy=f"Use a number from {LEAST_CLIP_NORM:g} to {MOST_CLIP_NORM:g}, such as 1.",
            )
        if self.num_persons is None and self.records_per_person != 1:
            raise SettingError(
                f"records_per_person={self.records_per_person} is not covered by the proof.",
                why="Augmented copies stored as separate tuples are each clipped and drawn alone, so a person "
                "contributes several times what the accountant counts.",
                remedy="Augment inside the example's contribution, before clipping, and keep one record per person.",
            )

    def _check_budget(self) -> None:
        check_delta(self.delta)
        if self.delta >= 1 / self.num_units:
            number = "num_examples" if self.num_persons is None else "num_persons"
            raise SettingError(
                f"delta={self.delta:g} is not below 1 / {number} = {1 / self.num_units:.3g}.",
                why=f"A mechanism that publishes one {self.word} picked at random would keep that promise.",
                remedy=f"Use {0.1 / self.num_units:.1g} or less.",
            )
        if not 0 < self.target_epsilon <= MOST_EPSILON:
            raise SettingError(
                f"target_epsilon={self.target_epsilon:g} is not allowed.",
                why=f"It has to be above 0, and above {MOST_EPSILON:g} it promises nothing.",
                remedy="Use a number between 0.1 and 10.",
            )

    def _check_noise(self, given: float) -> None:
        if not LEAST_NOISE <= given <= MOST_NOISE:
            raise SettingError(
                f"noise_multiplier={given:g} is not allowed.",
                why="With less noise the promise rests on delta, or on records being left out by luck; more is a slip "
                "of the pen.",
                remedy=f"Set method.noise_multiplier to a number from {LEAST_NOISE:g} to {MOST_NOISE:g}.",
            )
        spent = self.spent(self.most_steps)
        if spent > self.target_epsilon:
            # Rounded up, so that the printed ε suffices.
            enough = ceil(1e3 * spent) / 1e3 if spent <= MOST_EPSILON else spent
            raising = f"Set method.epsilon={enough:g}, or raise" if enough <= MOST_EPSILON else "Raise"
            raise SettingError(
                f"noise_multiplier={given:g} spends ε = {enough:g}, more than epsilon={self.target_epsilon:g}.",
                why=f"That is what the accountant finds for {self.releases} releases at a sampling rate of "
                f"{self.sampling_rate:.4g} and δ = {self.delta:g}.",
                remedy=f"{raising} method.noise_multiplier, or take fewer steps or smaller batches.",
            )

    @property
    def num_units(self) -> int:
        """Return the number of units that are sampled, clipped and protected: examples or persons."""
        return self.num_examples if self.num_persons is None else self.num_persons

    @property
    def word(self) -> str:
        """Return the word for one unit."""
        return "example" if self.num_persons is None else "person"

    @property
    def unit(self) -> str:
        """Return the unit of the guarantee."""
        return "training example" if self.num_persons is None else "person"

    @property
    def sampling_rate(self) -> float:
        """Return q, the probability that a step takes a given unit."""
        return self.expected_batch_size / self.num_units

    @property
    def denominator(self) -> float:
        """Return the public constant that a trainer divides its noisy sum by."""
        return self.expected_batch_size

    @property
    def epochs(self) -> float:
        """Return how often a unit takes part on average."""
        return self.steps * self.sampling_rate

    @property
    def most_steps(self) -> int:
        """Return the number of steps that the noise is chosen for."""
        return self.steps + self.spare_steps

    @property
    def releases(self) -> int:
        """Return how many of the steps read the records of one owner, at most."""
        return self.most_steps

    @property
    def noise_multiplier(self) -> float:
        """Return σ, the noise's standard deviation over the clipping norm."""
        if self.given_noise_multiplier is not None:
            return self.given_noise_multiplier
        target = self.target_epsilon if self.searched is None else self.searched.candidate_epsilon
        return noise_for(target, self.delta, self.sampling_rate, self.releases)

    @property
    def noise_stddev(self) -> float:
        """Return the standard deviation of the noise on the sum of clipped contributions, per coordinate."""
        return self.noise_multiplier * self.clip_norm

    def mechanism(self, steps: int) -> PoissonGaussian:
        """Return the mechanism of the first `steps` steps, for the accountant."""
        return PoissonGaussian(self.sampling_rate, self.noise_multiplier, steps)

    @property
    def curve(self) -> PoissonGaussian:
        return self.mechanism(self.most_steps)

    def mechanism_of(self, accounted_steps: int | None = None) -> PoissonGaussian | Search | None:
        counted = max(accounted_steps or self.most_steps, self.steps)
        if self.searched is None:
            return self.mechanism(counted)
        search = self.searched.search
        mechanism = self.mechanism(max(counted, self.most_steps))
        if mechanism in search.mechanisms:
            return search
        # More steps than any candidate was planned for: the search is accounted with them.
        return replace(search, mechanisms=(*search.mechanisms, mechanism))

    def spent(self, steps: int) -> float:
        """Return ε after this many steps; the whole run spends `claim.epsilon`."""
        if not 0 <= steps <= self.most_steps:
            raise SettingError(
                f"{steps} steps are not part of a plan of {self.most_steps}.",
                why="What is promised counts the planned number, so further steps would exceed it.",
                remedy=f"Stop after {self.most_steps} steps, or make a new plan before reading any data.",
            )
        return self.mechanism(steps).epsilon(self.delta) if steps else 0.0

    @property
    def claim(self) -> PrivacyGuarantee:
        what, accountant = f"DP-SGD with joint per-{self.word} clipping", "PLD accountant"
        if self.searched is not None:
            what, accountant = f"{what}, the best of a random number of trainings", "Rényi accountant"
        return PrivacyGuarantee(
            epsilon=self._epsilon(self.most_steps),
            delta=self.delta,
            neighbours=Neighbours.ADD_REMOVE,
            unit=self.unit,
            status=Status.PROVED,
            source=f"{what}; docs/guarantees.md, section 4; {accountant} (dp-accounting)",
            assumptions=self._assumptions(),
            objections=self._tuning_objections(),
        )

    def _epsilon(self, counted: int) -> float:
        """Return ε of so many steps, or of the whole search where this training is part of one."""
        mechanism = self.mechanism_of(counted)
        assert mechanism is not None
        return mechanism.epsilon(self.delta)

    def after(self, accounted_steps: int) -> PrivacyGuarantee:
        counted, planned = max(accounted_steps, self.steps), self.claim
        if self.searched is not None:
            planned = replace(planned, epsilon=self._epsilon(counted))
        elif counted > self.most_steps:
            planned = replace(planned, epsilon=self.mechanism(counted).epsilon(self.delta))
        elif counted < self.most_steps:
            planned = replace(planned, epsilon=self.spent(counted))
        repeated = (self._repeated(counted - self.steps),) if counted > self.steps else ()
        return replace(planned, assumptions=(*planned.assumptions, *repeated))

    def _repeated(self, steps: int) -> str:
        spare = f", {self.spare_steps} of them planned as spare" if self.spare_steps else ""
        return (
            f"{steps} steps beyond the {self.steps} planned are counted{spare}: a crash cut them off, and they were "
            "made again with samples and noise of their own"
        )

    def _assumptions(self) -> tuple[str, ...]:
        if self.num_persons is None:
            whole = "an example's whole contribution to a step, adversarial versions included,"
            public = f"the number of training examples, {self.num_examples}, is public"
            alone = "the network and the attacks mix no examples: an example's gradient depends on no other example"
            records = "a person has one record"
        else:
            whole = "a person's whole contribution to a step, the mean gradient of all records drawn of that person,"
            public = f"the number of persons, {self.num_persons}, is public, and so is that of their records"
            alone = "the network and the attacks mix no examples: a person's gradient depends on no other person's"
            records = (
                f"every training record of a person has that person's name, whom nobody else shares; a step draws at "
                f"most {self.records_per_person} of a person's records; test records are not protected"
            )
        return (
            f"Poisson sampling: each step takes every {self.word} independently with probability "
            f"{self.sampling_rate:.6g}; shuffled or fixed batches would need another accountant",
            f"{whole} is clipped to norm {self.clip_norm:g} as one vector",
            f"fresh Gaussian noise of standard deviation {self.noise_stddev:.6g} on the sum at every step, empty "
            "batches included; drawn once for it, however many processes share the work",
            f"at most {self.steps} steps{self._spare()}, and nothing else is computed from the training examples",
            f"the sum is divided by the public constant {self.expected_batch_size}, never by the realised batch size",
            f"{public}: sampling rate and denominator are constants fixed before looking, and stay as they are when "
            f"{'an example' if self.num_persons is None else 'a person'} is added or removed",
            alone,
            NOISE_ASSUMPTION,
            "norms are taken with an allowance for rounding at its worst; how sums of clipped contributions round, in "
            "the precision of training, is not bounded",
            "a step that a crash cut off is repeated bit by bit, which is the same release, or else with samples and "
            "noise of its own, and counted again; the run's directory is never set back to an older copy",
            "the seeds of sampling and noise stay secret; processes that share the work belong to one owner",
            records,
            *self._tuning_assumptions(),
        )

    def _tuning_assumptions(self) -> tuple[str, ...]:
        if self.searched:
            return self.searched.assumptions(tuned_on_private_data=self.tuned_on_private_data)
        if self.tuned_on_private_data:
            return ()  # an objection
        return (
            "hyper-parameters and preprocessing were chosen without the private data: from public data or from the "
            "literature",
        )

    def _tuning_objections(self) -> tuple[str, ...]:
        if not self.tuned_on_private_data:
            return ()
        return (TUNING_OBJECTION,) if self.searched is None else (SEARCH_OBJECTION,)

    def _spare(self) -> str:
        return f", {self.spare_steps} more that a crash makes again" if self.spare_steps else ""

    def _spare_rows(self) -> list[PlanRow]:
        return [PlanRow("spare steps", "", self.spare_steps, "for crashes", "")] if self.spare_steps else []

    def _search_rows(self) -> list[PlanRow]:
        if self.searched is None:
            return []
        law, number = self.searched.search.law, self.searched.combinations
        return [
            PlanRow("candidates, on average", "", law.mean, str(law), ""),
            PlanRow("combinations of settings", "", number, "each candidate draws one", ""),
            PlanRow(f"held-out {self.searched.word}s", "", self.searched.held_out, "drawn anew by each candidate", ""),
            PlanRow("noise on a score, standard deviation", "", self.searched.search.score_noise, "of a count", ""),
            PlanRow("accounted epsilon of the search", "ε", self.claim.epsilon, "Rényi accounting", "Definition 1"),
        ]

    def sizes(self) -> dict[str, Any]:
        # Fields that were added later are left out where they are not used, so that older plans stay the same.
        added_later = ("spare_steps", "given_noise_multiplier", "num_persons", "searched")
        sizes = {name: value for name, value in super().sizes().items() if value or name not in added_later}
        return sizes if self.searched is None else {**sizes, "searched": self.searched.to_dict()}

    def rows(self) -> list[PlanRow]:
        accounted = self.curve
        epsilon, renyi = accounted.epsilon(self.delta), accounted.renyi_epsilon(self.delta)
        on_mean = self.noise_stddev / self.expected_batch_size
        given = self.given_noise_multiplier is not None
        chosen, bound = ("given", "not exceeded") if given else ("smallest within the target", "")
        symbol, most = ("N", "") if self.num_persons is None else ("P", "drawn in a step, at most")
        whole = "an example's" if self.num_persons is None else "a person's"
        alone = " of one candidate" if self.searched else ""
        return [
            PlanRow(f"{self.unit}s", symbol, self.num_units, "public", "Section 2" if symbol == "N" else ""),
            PlanRow("expected batch size", "B", self.expected_batch_size, "the public denominator", ""),
            PlanRow("sampling rate", "q", self.sampling_rate, f"B / {symbol}, Poisson", ""),
            PlanRow("steps", "T", self.steps, "", ""),
            *self._spare_rows(),
            PlanRow("epochs, on average", "", self.epochs, "q T", ""),
            PlanRow("records per person", "", self.records_per_person, most, ""),
            PlanRow("clipping norm", "C", self.clip_norm, f"of {whole} whole contribution", ""),
            PlanRow("noise multiplier", "σ", self.noise_multiplier, chosen, ""),
            PlanRow("noise on the sum, standard deviation", "σC", self.noise_stddev, "per coordinate", ""),
            PlanRow("noise on the mean, standard deviation", "σC/B", on_mean, "per coordinate", ""),
            PlanRow("target epsilon", "", self.target_epsilon, bound, ""),
            *self._search_rows(),
            PlanRow(f"accounted epsilon{alone}", "ε", epsilon, "privacy loss distribution, rounded up", "Definition 1"),
            PlanRow(f"cross-check epsilon{alone}", "", renyi, "Rényi accounting, looser", ""),
            PlanRow("delta", "δ", self.delta, f"below 1 / {symbol}", "Definition 1"),
        ]


@dataclass(frozen=True, kw_only=True)
class TrainersPlan(DpSgdPlan):
    """DP-SGD in which `per_step` of `num_trainers` trainers take part in a step, by turns in a random order.

    No trainer has a second turn before all had one, so the number of steps of each is known beforehand. Who takes part
    is treated as public: no amplification is claimed for it.

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
            most = self.num_units * self.per_step // self.num_trainers
            raise SettingError(
                f"batch_size={self.expected_batch_size} is more than the {self.per_step} trainers of a step "
                f"own, about {most} {self.word}s.",
                remedy=f"Set method.batch_size to at most {most}, or raise trainers.per_step.",
            )

    @property
    def sampling_rate(self) -> float:
        """Return q, the probability that a step takes a given unit of a trainer who takes part."""
        return self.expected_batch_size * self.num_trainers / (self.num_units * self.per_step)

    @property
    def turns(self) -> int:
        """Return the number of steps in which every trainer has at most one turn."""
        return self.num_trainers // self.per_step

    def participations(self, steps: int) -> int:
        """Return how many of the first `steps` steps a trainer takes part in, at most."""
        return -(-steps // self.turns)

    @property
    def epochs(self) -> float:
        return self.participations(self.steps) * self.sampling_rate

    @property
    def releases(self) -> int:
        return self.participations(self.steps) + self.spare_steps

    @property
    def noise_stddev(self) -> float:
        """Return the standard deviation of one trainer's noise on its sum, per coordinate."""
        whole = self.noise_multiplier * self.clip_norm
        return whole / sqrt(self.per_step) if self.noise_shares else whole

    @property
    def denominator(self) -> float:
        """Return B / per_step: averaging over the trainers of a step divides their total by B."""
        return self.expected_batch_size / self.per_step

    def mechanism(self, steps: int) -> PoissonGaussian:
        # Which trainers repeated steps after a crash is not recorded: each is counted for all repeated steps.
        repeated = max(0, steps - self.steps)
        total = self.participations(steps - repeated) + repeated
        return PoissonGaussian(self.sampling_rate, self.noise_multiplier, total)

    @property
    def claim(self) -> PrivacyGuarantee:
        return replace(super().claim, unit=f"{self.unit} of any one trainer")

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
            f"{self.num_trainers} trainers own disjoint parts of the data, fixed beforehand"
            f"{'' if self.num_persons is None else ', with all records of a person in one'}; ε is the largest of all",
            f"a trainer takes part in at most {self.participations(self.steps)} of {self.steps} steps; who does so is "
            "treated as public, and amplifies nothing",
            seen,
            "trainers draw their noise and their samples independently of each other",
            *super()._assumptions(),
        )

    def rows(self) -> list[PlanRow]:
        def changed(row: PlanRow) -> PlanRow:
            if row.name == "sampling rate":
                whole = "N" if self.num_persons is None else "P"
                return replace(row, formula=f"B n / ({whole} 𝒩), Poisson, inside a trainer that takes part")
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
