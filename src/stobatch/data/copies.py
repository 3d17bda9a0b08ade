"""Find test records that are training records, among millions of them and without holding all in memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stobatch.data.dataset import Examples, TrainingExamples
from stobatch.data.streams import rows_at_once

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
