"""How many releases have looked at private data, kept so that a crash can only make the count too large.

A stretch of steps is entered before its first one is made, and settled after its checkpoint is safe. What is open when
a run is resumed was cut off by a crash, and is made again. If the repetition has the same bits it is the same release,
and counts once. If it may have other bits it counts again, and is another attempt: its samples and its noise have names
of their own: two sums under one noise would show their difference without any (docs/guarantees/repeated-steps.md).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from stobatch.errors import RunError
from stobatch.runs import Run

_REMEMBERED = 16
"""Stretches that are kept one by one; older ones are known by the step they reached and by their attempts."""


@dataclass(frozen=True)
class Stretch:
    """Steps from `first` to `last` (excluded), and all that their bits depend on."""

    first: int
    last: int
    state: str
    """A digest of parameters, optimiser and all else that a step reads, before the first step."""
    bits: str
    """A fingerprint of the arithmetic: machine, versions, settings and seeds (`training/loop.py`)."""
    repeatable: bool
    """Whether equal fingerprints give equal bits."""
    attempt: int = 0

    def meets(self, other: Stretch) -> bool:
        return self.first < other.last and other.first < self.last

    def repeats(self, other: Stretch) -> bool:
        """Return whether this is the other one again, step by step and bit by bit, if it has the same attempt."""
        return self.repeatable and replace(self, attempt=other.attempt) == other


@dataclass(frozen=True)
class Ledger:
    """Releases that are done, and releases that may have been made since.

    >>> Ledger().begun(50).made(50).begun(50).begun(50).accounted
    150
    >>> stretch = Stretch(0, 50, "first weights", "this machine", repeatable=True)
    >>> again, elsewhere = (Ledger().entered(stretch).entered(replace(stretch, bits=m)) for m in ("this machine", "x"))
    >>> (again.accounted, again.attempt), (elsewhere.accounted, elsewhere.attempt)
    ((50, 0), (100, 1))
    """

    done: int = 0
    open: int = 0
    stretches: tuple[Stretch, ...] = field(default=(), compare=False)
    """The latest, the present one last."""
    past_steps: int = field(default=0, compare=False)
    """Steps below this one were made in stretches that are not remembered,"""
    past_attempts: int = field(default=0, compare=False)
    """and in attempts up to this one."""

    @property
    def accounted(self) -> int:
        return self.done + self.open

    @property
    def reached(self) -> int:
        """Return the first step that was never begun, like all after it."""
        return max([self.past_steps, *(stretch.last for stretch in self.stretches)])

    @property
    def attempt(self) -> int:
        """Return the attempt of the present stretch."""
        return self.stretches[-1].attempt if self.stretches else 0

    def begun(self, releases: int) -> Ledger:
        """Count releases that were never made before and are about to be; what was open stays counted."""
        return replace(self, done=self.accounted, open=releases)

    def made(self, releases: int) -> Ledger:
        """Count this many of the open releases as made, and the rest of them as not made."""
        return replace(self, done=self.done + releases, open=0)

    def entered(self, stretch: Stretch) -> Ledger:
        """Count a stretch that is about to be made. Its attempt is new unless it repeats a known one bit by bit."""
        known = next((other for other in self.stretches if stretch.repeats(other)), None)
        if known is not None:
            others = tuple(other for other in self.stretches if other is not known)
            return replace(self.begun(0), stretches=(*others, known))
        used = [other.attempt for other in self.stretches if stretch.meets(other)]
        used += [self.past_attempts] if stretch.first < self.past_steps else []
        now = replace(stretch, attempt=max(used) + 1 if used else 0)
        return replace(self.begun(stretch.last - stretch.first), stretches=(*self.stretches, now))._forget_old()

    def _forget_old(self) -> Ledger:
        old = self.stretches[:-_REMEMBERED]
        return replace(
            self,
            stretches=self.stretches[-_REMEMBERED:],
            past_steps=max([self.past_steps, *(stretch.last for stretch in old)]),
            past_attempts=max([self.past_attempts, *(stretch.attempt for stretch in old)]),
        )

    def settled(self, step: int, state: str) -> Ledger:
        """Count the present stretch as made up to a step, whose outcome, with that digest, is safe on disk.

        What is left of a stretch that is made for the first time was never made. What is left of a repetition may have
        been, before the crash: it is a stretch of its own from now on.
        """
        if not self.stretches or self.stretches[-1].last <= step:
            return self.made(self.open)
        present = self.stretches[-1]
        head = replace(present, last=step)
        if self.open:
            return replace(self.made(step - present.first), stretches=(*self.stretches[:-1], head))
        return replace(self, stretches=(*self.stretches[:-1], replace(present, first=step, state=state), head))

    def distrusted(self) -> Ledger:
        """Mark the present stretch as computed wrongly by some process: nothing repeats it."""
        wrong = tuple(replace(stretch, repeatable=False) for stretch in self.stretches[-1:])
        return replace(self, stretches=(*self.stretches[:-1], *wrong))

    def require_covers(self, step: int, run: Path) -> None:
        """Refuse to go on from a checkpoint that more steps were made for than this ledger knows of."""
        if step > min(self.reached, self.accounted):
            raise RunError(
                f"the ledger in {run} knows of {min(self.reached, self.accounted)} steps, and a checkpoint is of step "
                f"{step}.",
                why="It was lost or set back, so ε would be too small.",
                remedy="Restore private/ledger.json as it was when the run stopped, or train again into a new --out.",
            )

    @classmethod
    def of(cls, run: Path) -> Self:
        directory = Run(run)
        if not directory.has("ledger", private=True):
            return cls()
        try:
            return cls._from_dict(directory.read("ledger", private=True))
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"the ledger in {run} cannot be right: {error}.",
                why="It was edited or damaged, and what the run promises is read from it.",
                remedy="Restore private/ledger.json as it was, or train again into a new --out.",
            ) from None

    @classmethod
    def _from_dict(cls, content: dict[str, Any]) -> Self:
        done, open_ = _count(content["done"], "done"), _count(content["open"], "open")
        if "stretches" not in content:
            # Of an older version, or of a party: every step that was counted may have been made.
            return cls(done, open_, past_steps=done + open_)
        stretches = tuple(_stretch(entry) for entry in content["stretches"])
        steps, attempts = (_count(content[name], name) for name in ("past_steps", "past_attempts"))
        ledger = cls(done, open_, stretches, steps, attempts)
        if ledger.accounted < ledger.reached:
            raise ValueError(f"{ledger.accounted} releases are too few for {ledger.reached} steps")
        return ledger

    def save(self, run: Path) -> None:
        content: dict[str, Any] = {"done": self.done, "open": self.open}
        if self.stretches:
            kept = [asdict(stretch) for stretch in self.stretches]
            content |= {"stretches": kept, "past_steps": self.past_steps, "past_attempts": self.past_attempts}
        Run(run).write("ledger", content, private=True)


def require_possible_count(accounted: object, steps: object, run: Path) -> int:
    """Return how many releases a finished training says it made, if that can be right.

    They are no fewer than its steps, and as many as its ledger knows of, where that is there.
    """
    try:
        counted, taken = _count(accounted, "accounted_steps"), _count(steps, "steps")
        if counted < taken:
            raise ValueError(f"{counted} releases are too few for {taken} steps")
        if Run(run).has("ledger", private=True) and (known := Ledger.of(run).accounted) != counted:
            raise ValueError(f"the ledger knows of {known} releases, and not of {counted}")
    except ValueError as error:
        raise RunError(
            f"the counts in {run / 'training.json'} cannot be right: {error}.",
            why="The file was edited or damaged, and ε follows from them.",
            remedy="Restore it, or train again into a new --out.",
        ) from None
    return counted


def _count(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}")
    return value


def _stretch(entry: dict[str, Any]) -> Stretch:
    stretch = Stretch(**entry)
    for name in ("first", "last", "attempt"):
        _count(getattr(stretch, name), name)
    if stretch.first > stretch.last or not isinstance(stretch.repeatable, bool):
        raise ValueError(f"steps {stretch.first} to {stretch.last} are no stretch")
    return stretch
