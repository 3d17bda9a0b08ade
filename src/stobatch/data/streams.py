"""A data set that comes by in chunks and is never held as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stobatch.data.dataset import Dataset, DatasetInfo, TrainingExamples

Chunk = tuple[Tensor, Tensor]
"""Inputs, float32 in [-1, 1], and labels, int64: consecutive examples, as few or as many as fit."""
_BYTES_AT_ONCE = 2**24


@dataclass(frozen=True)
class Stream:
    """Training and test examples in chunks, each looked at once and in order.

    Where the counts are not known before the last chunk, `counted` is false and those in `info` mean nothing.
    """

    info: DatasetInfo
    train: Iterable[Chunk]
    test: Iterable[Chunk]
    counted: bool = True

    @classmethod
    def of(cls, dataset: Dataset) -> Stream:
        return cls(dataset.info, chunks(dataset.train), chunks(dataset.test))


def rows_at_once(input_shape: tuple[int, int, int]) -> int:
    """As many examples as make a chunk of about 16 MiB."""
    return max(1, _BYTES_AT_ONCE // (4 * math.prod(input_shape)))


def chunks(examples: TrainingExamples) -> Iterator[Chunk]:
    """All examples in order, a few at a time."""
    rows = rows_at_once(examples.input_shape)
    for start in range(0, len(examples), rows):
        inputs, labels = examples.fetch(torch.arange(start, min(start + rows, len(examples))))
        yield inputs.cpu(), labels.cpu()
