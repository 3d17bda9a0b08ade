"""Training examples that note who looks at them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor

from stobatch.data import Examples, Persons, TrainingExamples, overlap

SEARCH = -1
"""Stands for the search for copies of test records, whose count is the owner's alone (`data.overlap`)."""


@dataclass(frozen=True)
class Read:
    """Positions that were read, and the release they were read for; None stands for any other time."""

    release: int | None
    rows: tuple[int, ...]


class Watched(TrainingExamples):
    """Hands out what the wrapped examples hold. Sizes and the digest, which stays private, are not noted."""

    def __init__(self, examples: Examples) -> None:
        self.behind, self.num_classes = examples, examples.num_classes
        self.reads: list[Read] = []
        self.release: int | None = None

    def __len__(self) -> int:
        return len(self.behind)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return self.behind.input_shape

    @property
    def shards(self) -> tuple[range, ...]:
        return self.behind.shards

    @property
    def persons(self) -> Persons | None:
        return self.behind.persons

    def fingerprint(self) -> str:
        return self.behind.fingerprint()

    def fetch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.reads.append(Read(self.release, tuple(rows.tolist())))
        return self.behind.fetch(rows)

    def in_memory(self) -> Examples:
        self._all()
        return self.behind

    @property
    def inputs(self) -> Tensor:
        """For whoever takes these for examples in memory."""
        self._all()
        return self.behind.inputs

    @property
    def labels(self) -> Tensor:
        self._all()
        return self.behind.labels

    @contextmanager
    def searched(self) -> Iterator[None]:
        """Note reads as those of the search for copies."""
        before, self.release = self.release, SEARCH
        try:
            yield
        finally:
            self.release = before

    def _all(self) -> None:
        self.reads.append(Read(self.release, tuple(range(len(self)))))


@contextmanager
def searches_noted() -> Iterator[None]:
    """Tell reads by the search for copies from all others."""
    real = overlap.find_copies

    def noted(train: TrainingExamples, test: Examples) -> Any:
        if not isinstance(train, Watched):
            return real(train, test)
        with train.searched():
            return real(train, test)

    with patch.object(overlap, "find_copies", noted):
        yield
