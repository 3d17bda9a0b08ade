"""Find test records that are training records, among millions of them and without holding all in memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stobatch.data.dataset import Examples, TrainingExamples
from stobatch.data.streams import chunks

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
    for inputs, _ in chunks(train):
        rows = _words(inputs)
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
    pieces = [words[start : start + 1024].astype(np.uint64) @ multipliers for start in range(0, len(words), 1024)]
    return np.concatenate([np.empty(0, np.uint64), *pieces])
