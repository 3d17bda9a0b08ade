"""What `verify` and `doctor` found, check by check; what `shard` wrote; and what `train` prints."""

from __future__ import annotations

from enum import StrEnum

from stobatch.results.document import Count, Document, Flag, Guarantee, Part, Size, Text, Whole
from stobatch.results.training import DatasetFacts, Training


class Outcome(StrEnum):
    """Of one check of a run."""

    AGREES = "agrees"
    DIFFERS = "differs"
    NOT_CHECKED = "not checked"


class Check(Part):
    """One thing of a run that was looked at: the file it is about, and what was found."""

    name: Text
    outcome: Outcome
    file: Text = ""
    detail: Text


class Source(Part):
    """The program that checked."""

    stobatch: Text | None
    commit: Text | None


class Verification(Document):
    """What `verify` checked of a run, and what it found."""

    run: Text
    verdict: Outcome
    checked_by: Source
    checks: tuple[Check, ...]
    cannot_be_checked: tuple[Text, ...]

    @property
    def differing(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.outcome is Outcome.DIFFERS)

    def lines(self) -> list[str]:
        checks = [f"{check.outcome}: {check.name} {check.file} {check.detail}" for check in self.checks]
        return [f"{self.run}: {self.verdict}", *checks]


class Health(StrEnum):
    """How a thing of this machine is."""

    OK = "ok"
    WARNING = "warning"
    """It works, and something about it will slow a training down or end it later."""
    MISSING = "missing"
    """Optional, and not installed."""
    ABSENT = "not here"
    """This machine has no such thing, or nobody asked for it; nothing to mend."""
    BROKEN = "broken"


class HealthCheck(Part):
    """A check of the machine that was made: one line of what was tried and measured, and one of what to do."""

    name: Text
    status: Health
    said: Text
    remedy: Text
    seconds: Size
    needed: Flag

    @property
    def stops_training(self) -> bool:
        return self.needed and self.status is Health.BROKEN


class HealthReport(Document):
    """What `doctor` found on this machine."""

    complete: Flag
    ready: Flag
    seconds: Size
    checks: tuple[HealthCheck, ...]

    def lines(self) -> list[str]:
        return [f"ready: {self.ready}", *(f"{check.name}: {check.status}, {check.said}" for check in self.checks)]


class RepeatedRecords(Part):
    """Records that occur more than once in a folder of shards."""

    count: Count
    in_more_than_one_shard: Count
    first_positions: tuple[tuple[Count, ...], ...]


class Dealt(Part):
    """How records were dealt to shards."""

    rule: Text
    seed: Whole | None = None


class ShardFolder(Document):
    """What `shard` wrote, or found in a folder."""

    folder: Text
    dataset: DatasetFacts
    num_shards: Count
    smallest_shard: Count
    largest_shard: Count
    encoding: Text
    dealt: Dealt
    bytes: Count
    test_copies: Count | None
    repeated_records: RepeatedRecords | None = None

    def lines(self) -> list[str]:
        return [f"{self.folder}: {self.dataset.num_train} training examples of {self.dataset.name}"]


class RunGuarantee(Document):
    """What `guarantee` prints: what a run guarantees about its training data, in full."""

    run: Text
    training_hash: Text
    guarantee: Guarantee

    def lines(self) -> list[str]:
        return [f"{self.run} ({self.training_hash})", *repr(self.guarantee).splitlines()]


class TrainedRun(Document):
    """What `train` prints: the training, and the guarantee of its run."""

    run: Text
    training_hash: Text
    training: Training
    guarantee: Guarantee

    def lines(self) -> list[str]:
        return [f"{self.run} ({self.training_hash})", *self.training.lines(), f"privacy: {self.guarantee}"]
