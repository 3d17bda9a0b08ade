"""A federation of persons: whoever owns several records is with one party, and each party's ε is per person."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.small_federation import STEPS, pictures, terms

from stobatch.errors import DataError, SettingError
from stobatch.federated import Party
from stobatch.federated.rounds import federate, found_parties, parties_of, split

PARTIES = ["north:14:6", "east:10:4", "south:6:3:4"]
PERSONS = {"method.parties": PARTIES, "method.records_per_person": 2}
OWNERS = torch.arange(90) % 30


def test_a_person_is_with_one_party() -> None:
    data = pictures(OWNERS)
    found = split(terms(**PERSONS), data.train.in_memory())
    assert {name: len(own.persons or ()) for name, own in found.items()} == {"north": 14, "east": 10, "south": 6}
    assert sum(map(len, found.values())) == 90
    whole = data.train.in_memory()
    owner = {image.numpy().tobytes(): int(OWNERS[row]) for row, image in enumerate(whole.inputs)}
    lived = [{owner[image.numpy().tobytes()] for image in own.inputs} for own in found.values()]
    assert sum(map(len, lived)) == 30
    assert len(set.union(*lived)) == 30


def test_a_federation_of_persons_is_trained_and_says_so(tmp_path: Path) -> None:
    model = federate(terms(**PERSONS), tmp_path / "run", dataset=pictures(OWNERS), quiet=True)
    claim = model.plan.claim
    assert claim.unit == "person of any one party"
    assert any("14 persons" in line for line in claim.assumptions)
    assert any("no person has records with two parties" in line for line in claim.assumptions)
    party = Party.open(parties_of(tmp_path / "run") / "north")
    assert party.rounds == STEPS
    assert party.plan.sampling_rate == 6 / 14
    assert party.guarantee.unit == "person of north"
    assert party.train.persons is not None
    assert len(party.train.persons) == 14


def test_parties_want_no_more_persons_than_there_are() -> None:
    with pytest.raises(SettingError, match="want 31 persons, the data have 30"):
        split(terms(**PERSONS | {"method.parties": ["north:31"]}), pictures(OWNERS).train.in_memory())


def test_records_of_other_persons_than_agreed_are_refused(tmp_path: Path) -> None:
    agreed, data = terms(**PERSONS), pictures(OWNERS)
    own = split(agreed, data.train.in_memory())["east"]
    with pytest.raises(DataError, match="persons of north are not what the terms say"):
        Party.found(tmp_path / "north", agreed, data.info, "north", own)
    assert not (tmp_path / "north").exists()
    # One who knows of no persons does not agree with those who do.
    without = terms(**PERSONS)
    assert found_parties(agreed, tmp_path / "parties", data)
    known = Party.open(tmp_path / "parties" / "south")
    plain = pictures()
    few = split(without, plain.train.in_memory())["south"]
    assert Party.found(tmp_path / "alone", without, plain.info, "south", few).agreed != known.agreed
