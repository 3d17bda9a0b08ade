"""Each party's own full noise, fresh for every answer and independent of everyone else's; each broken twin is caught.

Statistical tests alarm falsely with probability 1e-9 each.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.noise_checks import dependent, not_gaussian
from support.small_federation import WIDE, ask, flat, opened, pictures, started, terms
from torch import Tensor

from stobatch.federated import Federation, FederationError, InProcessTransport, Party
from stobatch.federated.rounds import found_parties
from stobatch.seeds import Seeds
from stobatch.types import Status


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return started(tmp_path / "run", terms(**{"model.architecture": WIDE}))[0]


def directory(federation: Federation, name: str) -> Path:
    return federation.run.path.with_name("run.parties") / name


def noise_of(party: Party, federation: Federation, steps: list[int]) -> list[Tensor]:
    """What an answer has beside the clipped contributions, on the scale of the sum.

    The contributions are those of a copy of the party, with the same ledger and seeds, whose noise is switched off.
    """
    bare_folder = Path(shutil.copytree(party.run.path, party.run.path.with_name(f"bare {party.name}")))
    bare = type(party).open(bare_folder)
    bare.root, bare.trainable.noise_stddev = party.root, 0.0
    scale = party.plan.clip_norm * party.plan.expected_batch_size
    found = [(flat(ask(party, federation, s)) - flat(ask(bare, federation, s))) * scale for s in steps]
    shutil.rmtree(bare_folder)
    return found


def test_every_answer_of_every_party_has_full_noise_of_its_own(federation: Federation) -> None:
    """Steps that come again, and steps asked by themselves: what the server asks does not matter."""
    streams: dict[str, list[Tensor]] = {}
    for name, steps in (("north", [0, 0, 1]), ("east", [0, 1, 1]), ("south", [0, 5])):
        party = Party.open(directory(federation, name))
        streams[name] = noise_of(party, federation, steps)
        assert party.plan.noise_stddev == party.plan.noise_multiplier * 0.5
        for stream in streams[name]:
            assert len(stream) == 20_003
            assert not not_gaussian(stream, party.plan.noise_stddev)
    assert not dependent([stream for own in streams.values() for stream in own])


class Silent(Party):
    """A broken party: it adds no noise, since the others do."""

    def _compute(self, step: int) -> dict[str, Tensor]:
        self.trainable.noise_stddev = 0.0
        return super()._compute(step)


class OneOfThree(Party):
    """A broken party: a share of the noise, as if the server were trusted to add the answers up first."""

    def _compute(self, step: int) -> dict[str, Tensor]:
        planned, self.trainable.noise_stddev = self.trainable.noise_stddev, self.trainable.noise_stddev / 3**0.5
        found = super()._compute(step)
        self.trainable.noise_stddev = planned
        return found


@pytest.mark.parametrize("twin", [Silent, OneOfThree])
def test_a_party_without_its_full_noise_is_caught(twin: type[Party], federation: Federation) -> None:
    party = twin.open(directory(federation, "north"))
    (stream,) = noise_of(party, federation, [0])
    assert not_gaussian(stream, party.plan.noise_stddev)


class NamedByStep(Party):
    """A broken party: noise named by the step, which the server chooses."""

    def _compute(self, step: int) -> dict[str, Tensor]:
        self.trainable.seeds = self.root.child("step", step)
        return super()._compute(step)


def test_noise_that_hangs_on_what_the_server_says_is_caught(federation: Federation) -> None:
    """Asked for one step at two points, the difference of the answers has no noise in it at all."""
    party = NamedByStep.open(directory(federation, "north"))
    assert dependent(noise_of(party, federation, [0, 0]))
    moved = {name: value + 0.1 for name, value in federation.parameters().items()}
    first, second = (party.answer(p, 1, federation.agreed).gradients for p in (federation.parameters(), moved))
    noise = party.plan.noise_multiplier / party.plan.expected_batch_size
    assert float((flat(first) - flat(second)).std()) < noise / 10


def shared(federation: Federation) -> tuple[Party, Party]:
    """The broken twin: north and east draw from one root."""
    north, east = (Party.open(directory(federation, name)) for name in ("north", "east"))
    east.root = north.root
    return north, east


def test_two_parties_with_one_seed_are_caught(federation: Federation) -> None:
    """Their noise is the same up to its scale, so a weighted difference of their answers cancels it."""
    north, east = shared(federation)
    one, other = (noise_of(party, federation, [0])[0] for party in (north, east))
    assert dependent([one, other])
    left = one / north.plan.noise_stddev - other / east.plan.noise_stddev
    assert float(left.abs().max()) < 1e-3
    honest = [noise_of(Party.open(directory(federation, name)), federation, [0])[0] for name in ("north", "east")]
    assert not dependent(honest)


def test_two_parties_with_one_seed_are_refused(federation: Federation) -> None:
    north, east = shared(federation)
    south = Party.open(directory(federation, "south"))
    with pytest.raises(FederationError, match="east and north have the same seeds") as error:
        federation.enrol(InProcessTransport({"north": north, "east": east, "south": south}).statements())
    assert "take the other's noise off" in str(error.value)


def test_secret_parties_have_seeds_of_their_own(tmp_path: Path) -> None:
    agreed = terms(seed=None)
    parties = opened(found_parties(agreed, tmp_path, pictures()))
    assert len({party.root.root for party in parties.values()}) == 3
    assert not any(party.root.public for party in parties.values())
    assert not any("--seed" in line for party in parties.values() for line in party.guarantee.objections)


def test_public_seeds_are_said_to_be(federation: Federation) -> None:
    party = Party.open(directory(federation, "north"))
    assert party.root != Seeds.reproducible(4)
    assert party.guarantee.status is federation.plan.guarantee.status is Status.VOID
