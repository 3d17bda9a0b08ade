"""Test records that are training records: an accuracy on them says nothing about new ones.

A copy is a test record whose inputs are those of a training record, to the bit; labels and near copies are not looked
at. How many there are is a function of the private training data without noise, so it is told to the owner alone: by
a refusal, before anything is written, or in `private/`. What is published says only what was looked for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stobatch.config import DataConfig
from stobatch.data.dataset import Dataset, Examples, TrainingExamples, rows_at_once
from stobatch.data.shards import ShardedExamples, read_test
from stobatch.data.sources import is_public
from stobatch.errors import DataError
from stobatch.registry import DATA_SETS

HARMLESS = 1000
"""One copy in so many test records may be chance, and moves an accuracy by a tenth of a point at most."""


def count_copies(dataset: Dataset) -> int:
    """Return how many test records are training records; shards that were counted when written are not read again."""
    train, test = dataset.train, dataset.test
    if isinstance(train, ShardedExamples) and train.manifest.test_copies is not None:
        manifest, counted = train.manifest, train.manifest.test_copies
        if len(test) <= manifest.test.count and test.inputs.equal(read_test(manifest, len(test)).inputs):
            return counted
    return len(find_copies(train, test))


def require_apart(dataset: Dataset, config: DataConfig) -> int:
    """Raise where more test records are training records than chance explains; return how many there are.

    With `data.allow_overlap` nothing is refused, and `statement` says that accuracies may be those of copies.
    """
    copies, records = count_copies(dataset), len(dataset.test)
    if copies * HARMLESS > records and not config.allow_overlap:
        raise DataError(
            f"{copies} of {records} test records are training records, to the bit.",
            why="An accuracy on them says nothing about new records.",
            remedy="Remove them from the training records, or set data.allow_overlap=true: every report then says so.",
        )
    return copies


def is_own(config: DataConfig) -> bool:
    """Whether the split into training and test records is the user's, not that of a public data set."""
    return not is_public(config.name)


def statement(config: DataConfig, *, own: bool) -> str:
    """Say what is known about copies among the test records, from public settings alone."""
    if not own:
        counted = DATA_SETS[config.name].test_copies
        number = "they were not counted here" if counted is None else f"{counted} test records are training records"
        return f"the split is the one that {config.name} comes with; exact copies across it: {number}"
    if config.allow_overlap:
        return (
            "test records may be training records (data.allow_overlap): accuracies may be those of records that were "
            "trained on"
        )
    return (
        f"at most one in {HARMLESS:,} test records is a training record: exact copies were looked for where the data "
        "are, near copies were not"
    )


Words = npt.NDArray[np.uint32]
Hashes = npt.NDArray[np.uint64]


def find_copies(train: TrainingExamples, test: Examples) -> npt.NDArray[np.int64]:
    """Return the positions of test records whose inputs are those of a training record, to the bit.

    **Guarantee.** Exact: a 64-bit hash of each row only chooses which rows are compared. Training records are read in
    chunks, so they may be larger than memory.
    """
    words = _words(test.inputs)
    multipliers: Hashes = np.random.default_rng(0).integers(0, 2**64, (words.shape[1],), dtype=np.uint64)
    multipliers |= np.uint64(1)
    hashes = _hashes(words, multipliers)
    wanted: dict[int, list[int]] = {}
    for place, key in enumerate(hashes.tolist()):
        wanted.setdefault(key, []).append(place)
    copied = np.zeros(len(words), dtype=bool)
    at_once = max(1, rows_at_once(train.input_shape) // 8)
    for start in range(0, len(train), at_once):
        rows = _words(train.fetch(torch.arange(start, min(start + at_once, len(train))))[0])
        keys = _hashes(rows, multipliers)
        for row in np.flatnonzero(np.isin(keys, hashes)):
            # Places that are settled are dropped, so that a blank image which occurs everywhere costs one comparison.
            key = int(keys[row])
            places = wanted[key]
            same = [place for place in places if np.array_equal(words[place], rows[row])]
            copied[same] = True
            wanted[key] = [place for place in places if not copied[place]]
    return np.flatnonzero(copied)


def _words(inputs: Tensor) -> Words:
    """One row of 32-bit words for each record; -0.0 is no other value than 0.0, and adding 0 makes it that."""
    rows = np.ascontiguousarray((inputs.detach().cpu() + 0.0).numpy())
    words: Words = rows.reshape(len(rows), -1).view(np.uint32)
    return words


def _hashes(words: Words, multipliers: Hashes) -> Hashes:
    """Multiply and add modulo 2^64; a piece at a time, since the words are widened."""
    rows = max(1, 2**18 // words.shape[1])
    pieces = [words[start : start + rows].astype(np.uint64) @ multipliers for start in range(0, len(words), rows)]
    return np.concatenate([np.empty(0, np.uint64), *pieces])
