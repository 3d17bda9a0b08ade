"""What `stobatch data check` finds in a folder of images."""

from __future__ import annotations

from typing import Annotated

from stobatch.results.document import Count, Document, Flag, NotNull, Part, Text


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
        found = [f"{self.folder}: {len(self.classes)} classes, {totals[0]:,} training and {totals[1]:,} test images"]
        found.append(f"training reads {shape} (channels, height, width)")
        found += [f"  {one.name}: {one.train:,} training, {one.test:,} test" for one in self.classes]
        if self.persons is not None:
            share = self.persons.largest / totals[0] if totals[0] else 0.0
            found.append(
                f"{self.persons.num:,} persons own the training images; the largest owns {self.persons.largest:,}, "
                f"{share:.1%} of them"
            )
        for fault in self.faults:
            level = "fault" if fault.stops_training else "look"
            more = f" and {fault.count - len(fault.files):,} more" if fault.count > len(fault.files) else ""
            files = f" ({', '.join(fault.files)}{more})" if fault.files else ""
            found.append(f"{level}: {fault.what}{files}. {fault.remedy}")
        return found
