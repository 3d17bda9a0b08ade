"""The ledger against a model of all that can happen to a run: kills at any moment, other machines, lost checkpoints.

The model keeps what a real run cannot: every release that was ever made. Seeds are fixed; there are no false alarms.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from hashlib import sha256

import pytest

from stobatch.training.ledger import _REMEMBERED, Ledger, Stretch

STEPS = 60


class Killed(Exception):  # noqa: N818
    """Here."""


@dataclass
class Life:
    """A run on disk, and all that was ever released from it."""

    chance: random.Random
    kind: type[Ledger] = Ledger
    ledger: Ledger = field(default_factory=Ledger)
    checkpoints: dict[int, str] = field(default_factory=dict)
    releases: list[tuple[int, int, str, str]] = field(default_factory=list)
    """(step, attempt, bits, state before): the sum of a step is a function of these, its noise of the first two."""

    def session(self, bits: str, *, repeatable: bool, every: int, kills: float, stops: float) -> bool:
        """Train until it is killed, stopped or done; says whether it is done."""
        step = max(self.checkpoints, default=0)
        state = self.checkpoints.get(step, "first weights")
        try:
            while step < STEPS:
                first, last = step, min(STEPS, (step // every + 1) * every)
                self._maybe(kills)
                self.ledger = self.ledger.entered(Stretch(first, last, state, bits, repeatable))
                attempt = self.ledger.attempt
                stop = self.chance.randint(first + 1, last) if self.chance.random() < stops else last
                for step in range(first, stop):
                    self._maybe(kills / 5)
                    luck = "" if repeatable else f" {self.chance.random()}"
                    self.releases.append((step, attempt, bits + luck, state))
                    state = sha256(repr(self.releases[-1]).encode()).hexdigest()
                step = stop
                self._maybe(kills)
                self.checkpoints[step] = state
                for old in sorted(self.checkpoints)[:-2]:
                    del self.checkpoints[old]
                self._maybe(kills)
                self.ledger = self.ledger.settled(step, state)
                if stop < last:
                    return False
        except Killed:
            return False
        return True

    def _maybe(self, kills: float) -> None:
        if self.chance.random() < kills:
            raise Killed

    def damage(self) -> None:
        """The newest checkpoint is lost, if there is an older one."""
        if len(self.checkpoints) > 1:
            del self.checkpoints[max(self.checkpoints)]

    @property
    def distinct(self) -> int:
        return len(set(self.releases))

    @property
    def leaks(self) -> bool:
        """Two different sums under one noise."""
        seen: dict[tuple[int, int], tuple[int, int, str, str]] = {}
        return any(seen.setdefault(release[:2], release) != release for release in self.releases)


def lived(seed: int, *, machines: int, repeatable: bool = True, kind: type[Ledger] = Ledger) -> Life:
    chance = random.Random(seed)
    life = Life(chance, ledger=kind())
    for _ in range(400):
        machine = f"machine {chance.randrange(machines)}"
        every = chance.choice((4, 7)) if machines > 1 else 4
        done = life.session(machine, repeatable=repeatable, every=every, kills=0.1, stops=0.1)
        assert life.ledger.accounted >= life.distinct or kind is not Ledger
        assert life.ledger.reached >= max([0, *life.checkpoints])
        if done and chance.random() < 0.5:
            return life
        if chance.random() < 0.2:
            life.damage()
    return life


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("machines", [1, 3])
@pytest.mark.parametrize("repeatable", [True, False])
def test_no_noise_serves_two_sums_and_no_release_is_forgotten(seed: int, machines: int, repeatable: bool) -> None:
    life = lived(seed, machines=machines, repeatable=repeatable)
    assert not life.leaks
    assert life.ledger.accounted >= max(life.distinct, STEPS if STEPS in life.checkpoints else 0)
    assert len(life.ledger.stretches) <= _REMEMBERED + 2


@pytest.mark.parametrize("seed", range(30))
def test_kills_on_one_machine_cost_nothing(seed: int) -> None:
    chance = random.Random(seed)
    life = Life(chance)
    while not life.session("machine", repeatable=True, every=5, kills=0.15, stops=0.0):
        pass
    assert life.ledger.accounted == life.distinct == STEPS < len(life.releases)


class OneAttempt(Ledger):
    """The broken twin that repeats with the same names whatever has changed."""

    def entered(self, stretch: Stretch) -> Ledger:
        found = super().entered(stretch)
        return replace(found, stretches=tuple(replace(each, attempt=0) for each in found.stretches))


class CountsSteps(Ledger):
    """The broken twin that counts steps and not releases."""

    @property
    def accounted(self) -> int:
        return min(self.done + self.open, STEPS)


class TrustsPlaces(Ledger):
    """The broken twin that takes the same steps for the same stretch, whatever they start from."""

    def entered(self, stretch: Stretch) -> Ledger:
        return super().entered(replace(stretch, state="", bits=""))


def test_broken_ledgers_are_caught() -> None:
    assert any(lived(seed, machines=3, kind=OneAttempt).leaks for seed in range(5))
    assert any(lived(seed, machines=3, kind=TrustsPlaces).leaks for seed in range(5))
    counted = [lived(seed, machines=3, kind=CountsSteps) for seed in range(5)]
    assert any(life.ledger.accounted < life.distinct for life in counted)


def test_a_ledger_survives_its_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for seed in range(5):
        ledger = lived(seed, machines=3).ledger
        ledger.save(tmp_path)
        found = Ledger.of(tmp_path)
        assert found == ledger
        assert (found.stretches, found.past_steps, found.past_attempts) == (
            *(ledger.stretches, ledger.past_steps, ledger.past_attempts),
        )


def test_what_an_older_version_wrote_is_never_repeated_under_its_noise(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """It says how many, and not which: everything below may have been made."""
    Ledger(50, 25).save(tmp_path)
    found = Ledger.of(tmp_path)
    assert found.reached == found.accounted == 75
    again = found.entered(Stretch(50, 75, "state", "bits", repeatable=True))
    assert (again.attempt, again.accounted) == (1, 100)
    further = again.settled(75, "later").entered(Stretch(75, 100, "later", "bits", repeatable=True))
    assert (further.attempt, further.accounted) == (0, 125)


def test_what_was_computed_wrongly_is_never_repeated() -> None:
    stretch = Stretch(0, 5, "state", "bits", repeatable=True)
    ledger = Ledger().entered(stretch)
    assert ledger.entered(stretch).attempt == 0
    again = ledger.distrusted().entered(stretch)
    assert (again.attempt, again.accounted) == (1, 10)
    assert Ledger().distrusted() == Ledger()


def test_the_count_never_forgets() -> None:
    """Whatever the order of beginnings and settlements, what was begun and not settled stays counted."""
    chance = random.Random(0)
    for _ in range(200):
        ledger, least = Ledger(), 0
        for _ in range(10):
            length = chance.randint(1, 8)
            made = chance.randint(0, length)
            ledger = ledger.begun(length)
            least += made
            assert ledger.accounted >= least
            if chance.random() < 0.5:
                ledger = ledger.made(made)
            assert ledger.accounted >= least
