"""What `verify`, `doctor` and `data check` found; what `shard` wrote; and what `train` prints."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from stobatch.results.document import Count, Document, Flag, Guarantee, NotNull, Part, Size, Text, Whole
from stobatch.results.training import DatasetFacts, Training


class Outcome(StrEnum):
    """The outcome of one check of a run."""

    AGREES = "agrees"
    DIFFERS = "differs"
    NOT_CHECKED = "not checked"


class Check(Part):
    """A check of one part of a run: the file it is about, and the outcome."""

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
    guarantee: Guarantee | None = None
    """What the run guarantees: agreement says that files are consistent, not that anybody is protected. None where the
    model or its audits cannot be read."""
    checked_by: Source
    checks: tuple[Check, ...]
    cannot_be_checked: tuple[Text, ...]

    @property
    def differing(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.outcome is Outcome.DIFFERS)

    def lines(self) -> list[str]:
        checks = [f"{check.outcome}: {check.name} {check.file} {check.detail}" for check in self.checks]
        privacy = "not known" if self.guarantee is None else str(self.guarantee)
        return [f"{self.run}: {self.verdict}", f"privacy: {privacy}", *checks]


class Health(StrEnum):
    """The state of one part of this machine."""

    OK = "ok"
    WARNING = "warning"
    """It works, and something about it will slow a training down or end it later."""
    MISSING = "missing"
    """Optional, and not installed."""
    ABSENT = "not here"
    """This machine has none, or it was not asked for; nothing to mend."""
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


class ClassCount(Part):
    """The pictures of one class."""

    name: Text
    train: Count
    test: Count


class PersonCount(Part):
    """Whom the training pictures belong to."""

    num: Count
    largest: Count
    """Pictures of the person who has the most."""


class DataFault(Part):
    """Something about the pictures, and the first files that have it."""

    what: Text
    stops_training: Flag
    """Whether training refuses it; else it is worth a look."""
    count: Count
    files: tuple[Text, ...]
    remedy: Text


class DataCheck(Document):
    """All faults of a folder at once, and what is in it. It speaks of private files: for their owner alone."""

    folder: Text
    input_shape: tuple[Count, ...] | None
    """What training would read, with these settings; none where no picture could be read."""
    classes: tuple[ClassCount, ...]
    faults: tuple[DataFault, ...]
    persons: Annotated[PersonCount | None, NotNull] = None
    """Where a table says whose each picture is."""

    @property
    def can_be_trained_on(self) -> bool:
        return not any(fault.stops_training for fault in self.faults)

    def lines(self) -> list[str]:
        totals = [sum(one.train for one in self.classes), sum(one.test for one in self.classes)]
        shape = "x".join(map(str, self.input_shape)) if self.input_shape else "nothing"
        lines = [f"{self.folder}: {len(self.classes)} classes, {totals[0]:,} training and {totals[1]:,} test images"]
        lines.append(f"training reads {shape} (channels, height, width)")
        lines += [f"  {one.name}: {one.train:,} training, {one.test:,} test" for one in self.classes]
        if self.persons is not None:
            share = self.persons.largest / totals[0] if totals[0] else 0.0
            lines.append(
                f"{self.persons.num:,} persons own the training images; the largest owns {self.persons.largest:,}, "
                f"{share:.1%} of them"
            )
        for fault in self.faults:
            level = "fault" if fault.stops_training else "look"
            more = f" and {fault.count - len(fault.files):,} more" if fault.count > len(fault.files) else ""
            files = f" ({', '.join(fault.files)}{more})" if fault.files else ""
            lines.append(f"{level}: {fault.what}{files}. {fault.remedy}")
        return lines
