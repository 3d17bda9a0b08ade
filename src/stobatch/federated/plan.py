"""The terms of a federation: who takes part, with how many records, how often. All of it is public and fixed first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from stobatch.config import DataConfig, RunConfig
from stobatch.data import DatasetInfo, TrainingExamples
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.dp.plan import NOISE_ASSUMPTION_OF_PARTIES, DpSgdPlan, Plan, PlanRow
from stobatch.errors import SettingError
from stobatch.methods import Method
from stobatch.models import Classifier
from stobatch.results import PartyAccount
from stobatch.seeds import Seeds
from stobatch.settings import content_hash, setting
from stobatch.sound.method import Sound
from stobatch.sound.settings import SoundConfig
from stobatch.verifier import Verifier

_COUNT = re.compile(r"0*[1-9][0-9]{0,17}")
_FORM = "name:records, name:records:batch or name:records:batch:rounds"


@dataclass(frozen=True)
class PartySizes:
    """A party's public numbers.

    `rounds` is a cap: the noise is chosen for that many answers, and the party refuses the next one.
    """

    name: str
    num_examples: int
    expected_batch_size: int
    rounds: int

    def takes_part(self, step: int, steps: int) -> bool:
        """Return whether the public timetable has this party in a step: as often as its cap allows, evenly spread.

        >>> twice = PartySizes("north", 100, 10, rounds=2)
        >>> [twice.takes_part(step, 6) for step in range(6)]
        [False, False, True, False, False, True]
        """
        return (step + 1) * self.rounds // steps > step * self.rounds // steps


class FederatedConfig(SoundConfig, name="federated"):
    """The sound method with its records held by parties; every party spends at most ε and adds all of its own noise."""

    parties: tuple[str, ...] = setting(
        ("north:7000", "east:3500", "south:1500"),
        doc="Who holds how many records, as name:records, name:records:batch or name:records:batch:rounds; a batch "
        "that is not given is the party's share of batch_size, rounds are all steps; where records have persons, all "
        "numbers count persons",
    )
    combine: str = setting(
        "mean",
        choices=("mean", "median"),
        doc="Of the answers: their mean by batch sizes, or coordinate by coordinate their median, one vote for each",
        added_later=True,
    )
    answer_within: float = setting(
        600.0,
        above=0,
        doc="Seconds that a step waits; a party that has not answered by then is left out of the step",
        added_later=True,
    )

    def model_post_init(self, context: Any) -> None:
        names = [text.split(":")[0] for text in self.parties]
        for text in self.parties:
            name, *numbers = text.split(":")
            if not (name.isidentifier() and 1 <= len(numbers) <= 3 and all(_COUNT.fullmatch(n) for n in numbers)):
                raise SettingError(
                    f"'{text}' is not a party.", why=f"A party is written as {_FORM}.", remedy="Write north:7000, say."
                )
        if len(set(names)) < len(names):
            raise SettingError(f"a party is named twice: {', '.join(names)}.", remedy="Give every party its own name.")

    def sizes(self, steps: int) -> tuple[PartySizes, ...]:
        """Return the parties of a federation of this many steps.

        >>> [party.expected_batch_size for party in FederatedConfig(batch_size=1200).sizes(10)]
        [700, 350, 150]
        """
        given = {text.split(":")[0]: [int(number) for number in text.split(":")[1:]] for text in self.parties}
        total = sum(numbers[0] for numbers in given.values())
        sizes = []
        for name, (records, *rest) in given.items():
            batch = rest[0] if rest else max(1, round(self.batch_size * records / total))
            rounds = rest[1] if len(rest) > 1 else steps
            if rounds > steps:
                raise SettingError(
                    f"{name} takes part in {rounds} rounds of {steps}.",
                    why="A round is a step, and method.parties has the third number of each party for its rounds.",
                    remedy=f"Write {name}:{records}:{batch}:{steps} there, or set training.steps={rounds}.",
                )
            sizes.append(PartySizes(name, records, batch, rounds))
        return tuple(sizes)

    def sound(self, party: PartySizes) -> SoundConfig:
        """Return what one party's part is by itself: the sound method on its own records."""
        shared = {name: getattr(self, name) for name in SoundConfig.model_fields}
        return SoundConfig(**shared | {"batch_size": party.expected_batch_size})


def method_of_terms(terms: RunConfig) -> FederatedConfig:
    if not isinstance(terms.method, FederatedConfig):
        raise SettingError(
            f"method.name={terms.method.title} is not a federation.", remedy="Start from `--recipe federated.demo`."
        )
    return terms.method


def sizes_of(terms: RunConfig) -> tuple[PartySizes, ...]:
    return method_of_terms(terms).sizes(terms.training.steps)


def party_of(terms: RunConfig, name: str) -> PartySizes:
    for party in sizes_of(terms):
        if party.name == name:
            return party
    names = ", ".join(party.name for party in sizes_of(terms))
    raise SettingError(f"'{name}' is not a party of this federation.", remedy=f"Use one of {names}.")


def party_config(terms: RunConfig, party: PartySizes) -> RunConfig:
    """Return a party's own settings: its part of the terms, its cap as the number of steps, data that it holds."""
    return RunConfig(
        method=method_of_terms(terms).sound(party),
        data=DataConfig(name="tensors"),
        model=terms.model,
        training=terms.training.replace(steps=party.rounds),
        machine=terms.machine,
        seed=terms.seed,
    )


def terms_hash(terms: RunConfig, input_shape: tuple[int, ...], num_classes: int, *, persons: bool = False) -> str:
    """Return a hash of what all must agree on: not machines, certificates or attacks, and of data only their form."""
    agreed: dict[str, Any] = {key: terms.to_dict()[key] for key in ("method", "model", "training")}
    unit = {"unit": "person"} if persons else {}
    return content_hash({**agreed, "input_shape": list(input_shape), "num_classes": num_classes, **unit})


@dataclass(frozen=True)
class Account:
    """What one party has promised and done, in public numbers: a line of the table behind the guarantee."""

    name: str
    plan: DpSgdPlan
    rounds: int
    """Answers that the party's own ledger counts; before the first one, its cap."""

    @property
    def epsilon(self) -> float:
        return self.plan.spent(self.rounds)

    @property
    def counted(self) -> str:
        """Return what the party's numbers count."""
        return "records" if self.plan.num_persons is None else "persons"

    def to_document(self) -> PartyAccount:
        """Return the account as documents hold it."""
        return PartyAccount(
            name=self.name,
            records=self.plan.num_units,
            expected_batch_size=self.plan.expected_batch_size,
            sampling_rate=self.plan.sampling_rate,
            noise_multiplier=self.plan.noise_multiplier,
            clip_norm=self.plan.clip_norm,
            most_rounds=self.plan.steps,
            rounds=self.rounds,
            epsilon=self.epsilon,
            delta=self.plan.delta,
        )

    def __str__(self) -> str:
        plan = self.plan
        return (
            f"{self.name}: {plan.num_units} {self.counted}, sampling rate {plan.sampling_rate:.4g}, noise multiplier "
            f"{plan.noise_multiplier:.4g}, {self.rounds} of at most {plan.steps} rounds, ε = {self.epsilon:.6g}, "
            f"δ = {plan.delta:g}"
        )


@dataclass(frozen=True, kw_only=True)
class FederatedPlan(Plan):
    """Parties with plans of their own and a server that is not trusted.

    **Guarantee.** Towards an observer of every message, such as the server, adding or removing one record of
    one party changes probabilities by at most e^ε, up to δ, with ε = max_i ε_i. If the data differ in a record of party
    i, every other message is a randomised function of unchanged data and of the messages before it, so the transcript
    tells no more than party i's own adaptive sequence of releases, which is DP-SGD (docs/guarantees/privacy.md;
    docs/federated.md).
    """

    plans: Mapping[str, DpSgdPlan]
    steps: int
    rounds: Mapping[str, int] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Parties whose word the server stopped to believe, and why: nothing is said about their records."""

    @property
    def accounts(self) -> tuple[Account, ...]:
        return tuple(Account(name, plan, self.rounds.get(name, plan.steps)) for name, plan in self.plans.items())

    @property
    def denominator(self) -> int:
        """Return the expected batch size of all parties together."""
        return sum(plan.expected_batch_size for plan in self.plans.values())

    def recorded(self, rounds: Mapping[str, int], excluded: Mapping[str, str]) -> FederatedPlan:
        """Return the plan with the answers that the parties counted, instead of all they may give."""
        return replace(self, rounds=rounds, excluded=excluded)

    @property
    def claim(self) -> PrivacyGuarantee:
        accounts = [account for account in self.accounts if account.name not in self.excluded]
        worst = max(accounts, key=lambda account: account.epsilon)
        but = f" but {', '.join(self.excluded)}" if self.excluded else ""
        return replace(
            worst.plan.claim,
            epsilon=worst.epsilon,
            delta=max(account.plan.delta for account in accounts),
            unit=f"{worst.plan.unit} of any one party{but}",
            source="DP-SGD of each party, the largest ε of them, towards the server and everyone else who sees all "
            "messages; docs/federated.md; PLD accountant (dp-accounting)",
            assumptions=(*map(str, accounts), *self._assumptions(worst.plan)),
            objections=(
                *worst.plan.claim.objections,
                *(
                    f"nothing is said about the records of {name}, which was excluded: {why}"
                    for name, why in self.excluded.items()
                ),
            ),
        )

    def _assumptions(self, plan: DpSgdPlan) -> tuple[str, ...]:
        records = plan.num_persons is None
        whole = "an example's whole contribution to an answer" if records else "all that an answer takes of a person"
        return (
            "every party draws its own Poisson samples and adds all of its own noise, fresh for every answer, from "
            "seeds that no one else has",
            f"{whole} is clipped to norm {plan.clip_norm:g} as one vector",
            "a party counts every answer before it computes it, and refuses to answer beyond its rounds whatever it is "
            "asked",
            f"the parties' numbers of {'records' if records else 'persons'}, batch sizes and rounds are public "
            "constants, and so is who takes part when: no privacy is claimed from not taking part",
            "no record is held by two parties, and a person has one record"
            if records
            else "no person has records with two parties: whoever has is protected less, by the sum of their ε",
            "the network and the attacks mix no examples: an example's gradient depends on no other example",
            NOISE_ASSUMPTION_OF_PARTIES,
        )

    def sizes(self) -> dict[str, Any]:
        return {"steps": self.steps, "parties": {name: plan.sizes() for name, plan in self.plans.items()}}

    def rows(self) -> list[PlanRow]:
        accounts = self.accounts
        records = accounts[0].plan.num_persons is None
        symbol, whole = ("N", "an example's") if records else ("P", "a person's")
        rows = [
            PlanRow("steps", "T", self.steps, "a message of each party that takes part", "Algorithm 4"),
            PlanRow("parties", "", len(accounts), "each with data, noise and ledger of its own", "Algorithm 4"),
            PlanRow("expected batch size, all parties", "ΣB", self.denominator, "weights are B / ΣB", ""),
            PlanRow("clipping norm", "C", accounts[0].plan.clip_norm, f"of {whole} whole contribution", ""),
        ]
        for account in accounts:
            plan, name = account.plan, account.name
            rows += [
                PlanRow(f"{name}: {account.counted}", symbol, plan.num_units, "public", ""),
                PlanRow(f"{name}: sampling rate", "q", plan.sampling_rate, f"B / {symbol}, Poisson", ""),
                PlanRow(f"{name}: rounds at most", "", plan.steps, "refuses the next one", ""),
                PlanRow(f"{name}: noise multiplier", "σ", plan.noise_multiplier, "all its own: no trusted server", ""),
                PlanRow(f"{name}: epsilon", "ε", account.epsilon, "privacy loss distribution, rounded up", ""),
            ]
        return [*rows, PlanRow("accounted epsilon", "ε", self.claim.epsilon, "the largest of the parties'", "")]


class Federated(Method):
    """Parties that never show their data, and one model."""

    config_class = FederatedConfig
    takes_prior = True

    def plan(self, config: RunConfig, info: DatasetInfo, network: Classifier | None) -> FederatedPlan:
        if config.canaries.num:
            raise SettingError(
                "a federation has no room for canaries.",
                why="A party's answers are for its own records; no one can add canaries to all of them.",
                remedy="Set canaries.num=0, and audit the sound method with the sizes of one party.",
            )
        return FederatedPlan(
            plans={party.name: party_plan(config, info, party.name) for party in sizes_of(config)},
            steps=config.training.steps,
        )

    def prepare(
        self, config: RunConfig, plan: Plan, network: Classifier, train: TrainingExamples, seeds: Seeds
    ) -> NoReturn:
        raise SettingError(
            "a federation is not trained in one place.",
            why="Its noise is drawn by the parties, each for its own records.",
            remedy="Use `stobatch federate`, or train with method sound.",
        )

    certificates = Sound.certificates

    def verifiers(self, config: RunConfig, plan: Plan, network: Classifier) -> tuple[Verifier, ...]:
        return Sound().verifiers(config, plan, network)


def party_info(info: DatasetInfo, party: PartySizes, num_records: int | None = None) -> DatasetInfo:
    """Return what the terms say of a party's data; the number of records that persons own is the party's to know."""
    if info.num_persons is None:
        return replace(info, name=party.name, num_train=party.num_examples)
    known = num_records or party.num_examples
    return replace(info, name=party.name, num_train=known, num_persons=party.num_examples)


def party_plan(terms: RunConfig, info: DatasetInfo, name: str) -> DpSgdPlan:
    """Return one party's own plan, with its cap as the number of steps: what its noise is chosen for."""
    party = party_of(terms, name)
    plan = Sound().plan(party_config(terms, party), party_info(info, party), None)
    return replace(
        plan,
        public_seeds=terms.seed is not None,
        classes_from_labels=info.classes_from_labels,
        read_from_folder=info.read_from_folder,
    )
