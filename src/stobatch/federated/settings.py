"""The terms of a federation: who takes part, with how many records, how often. All of it is public and fixed first."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from stobatch.config import DataConfig, RunConfig
from stobatch.errors import SettingError
from stobatch.methods import SoundConfig
from stobatch.settings import content_hash, setting

_COUNT = re.compile(r"0*[1-9][0-9]{0,17}")
_FORM = "name:records, name:records:batch or name:records:batch:rounds"


@dataclass(frozen=True)
class PartySizes:
    """A party's public numbers.

    `rounds` is a cap: the noise is chosen for so many answers, and the party refuses the next one.
    """

    name: str
    num_examples: int
    expected_batch_size: int
    rounds: int

    def takes_part(self, step: int, steps: int) -> bool:
        """Whether the public timetable has this party in a step: as often as its cap allows, evenly spread.

        >>> twice = PartySizes("north", 100, 10, rounds=2)
        >>> [twice.takes_part(step, 6) for step in range(6)]
        [False, False, True, False, False, True]
        """
        return (step + 1) * self.rounds // steps > step * self.rounds // steps


@dataclass(frozen=True)
class FederatedConfig(SoundConfig, name="federated"):
    """The sound method with its records held by parties; every party spends at most ε and adds all of its own noise."""

    parties: tuple[str, ...] = setting(
        ("north:7000", "east:3500", "south:1500"),
        doc="Who holds how many records, as name:records, name:records:batch or name:records:batch:rounds; a batch "
        "that is not given is the party's share of expected_batch_size, rounds are all steps",
    )
    combine: str = setting(
        "mean",
        choices=("mean", "median"),
        doc="Of the answers: their mean by batch sizes, or coordinate by coordinate their median, one vote for each",
    )
    answer_within: float = setting(
        600.0, above=0, doc="Seconds that a step waits; a party that has not answered by then is left out of the step"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [text.split(":")[0] for text in self.parties]
        for text in self.parties:
            name, *numbers = text.split(":")
            if not (name.isidentifier() and 1 <= len(numbers) <= 3 and all(_COUNT.fullmatch(n) for n in numbers)):
                raise SettingError(
                    f"'{text}' is no party.", why=f"A party is written as {_FORM}.", remedy="Write north:7000, say."
                )
        if len(set(names)) < len(names):
            raise SettingError(f"a party is named twice: {', '.join(names)}.", remedy="Give every party its own name.")

    def to_dict(self) -> dict[str, Any]:
        """Leave out later settings that are not used, so that older federations keep their hash."""
        plain, later = super().to_dict(), {"combine": "mean", "answer_within": 600.0}
        return {key: value for key, value in plain.items() if key not in later or value != later[key]}

    def sizes(self, steps: int) -> tuple[PartySizes, ...]:
        """The parties of a federation of so many steps.

        >>> [party.expected_batch_size for party in FederatedConfig(expected_batch_size=1200).sizes(10)]
        [700, 350, 150]
        """
        given = {text.split(":")[0]: [int(number) for number in text.split(":")[1:]] for text in self.parties}
        total = sum(numbers[0] for numbers in given.values())
        found = []
        for name, (records, *rest) in given.items():
            batch = rest[0] if rest else max(1, round(self.expected_batch_size * records / total))
            rounds = rest[1] if len(rest) > 1 else steps
            if rounds > steps:
                raise SettingError(
                    f"{name} takes part in {rounds} rounds of {steps}.",
                    remedy=f"Use at most {steps}, or set training.steps={rounds}.",
                )
            found.append(PartySizes(name, records, batch, rounds))
        return tuple(found)

    def sound(self, party: PartySizes) -> SoundConfig:
        """What one party's part is by itself: the sound method on its own records."""
        shared = {field.name: getattr(self, field.name) for field in fields(SoundConfig)}
        return SoundConfig(**shared | {"expected_batch_size": party.expected_batch_size})


def method_of_terms(terms: RunConfig) -> FederatedConfig:
    if not isinstance(terms.method, FederatedConfig):
        raise SettingError(
            f"method.name={terms.method.name} is no federation.", remedy="Start from `--recipe federated.demo`."
        )
    return terms.method


def sizes_of(terms: RunConfig) -> tuple[PartySizes, ...]:
    return method_of_terms(terms).sizes(terms.training.steps)


def party_of(terms: RunConfig, name: str) -> PartySizes:
    for party in sizes_of(terms):
        if party.name == name:
            return party
    names = ", ".join(party.name for party in sizes_of(terms))
    raise SettingError(f"'{name}' is no party of this federation.", remedy=f"Use one of {names}.")


def party_config(terms: RunConfig, party: PartySizes) -> RunConfig:
    """A party's own settings: its part of the terms, its cap as the number of steps, its data in its own hands."""
    return RunConfig(
        method=method_of_terms(terms).sound(party),
        data=DataConfig(name="tensors"),
        model=terms.model,
        training=terms.training.replace(steps=party.rounds),
        machine=terms.machine,
        seed=terms.seed,
    )


def terms_hash(terms: RunConfig, input_shape: tuple[int, ...], num_classes: int) -> str:
    """What everyone must have agreed on. Machines, certificates and attacks may differ; data keep only their form."""
    agreed: dict[str, Any] = {key: terms.to_dict()[key] for key in ("method", "model", "training")}
    return content_hash({**agreed, "input_shape": list(input_shape), "num_classes": num_classes})
