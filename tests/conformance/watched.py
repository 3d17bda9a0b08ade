"""Training examples that note who looks at them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stobatch.data import Examples, TrainingExamples


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

    def _all(self) -> None:
        self.reads.append(Read(self.release, tuple(range(len(self)))))
