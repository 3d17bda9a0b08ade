"""Records that occur twice: legal where two persons look alike, fatal where one person is counted as two."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from stobatch.data.shards.manifest import Manifest, Shard
from stobatch.data.shards.reading import Array, pieces

_DIGEST = np.dtype([("high", "<u8"), ("low", "<u8")])
_RECORDS_AT_ONCE = 8_000_000
"""Digests that are held at a time: with their positions and their order about 256 MB."""


def find_repeated_records(
    manifest: Manifest, *, advance: Callable[[int], object] = lambda records: None, at_once: int = _RECORDS_AT_ONCE
) -> Iterator[tuple[int, ...]]:
    """The positions of each record (inputs and label) that occurs more than once, in one shard or in several.

    **Guarantee.** Every repetition is found, bit for bit; that two different records are taken for one has a
    probability below 2^-60 for a billion of them. Memory does not grow with the data: they are read as often as it
    takes to hold the digests of one part at a time.
    """
    parts = passes(manifest, at_once)
    for part in range(parts):
        found = [_digests(manifest, shard, part, parts, advance) for shard in manifest.shards]
        digests = np.concatenate([digest for digest, _ in found])
        positions = np.concatenate([position for _, position in found])
        order = np.argsort(digests, order=("high", "low"), kind="stable")
        digests, positions = digests[order], positions[order]
        edges = np.flatnonzero(digests[1:] != digests[:-1]) + 1
        starts, stops = np.concatenate([[0], edges]), np.concatenate([edges, [len(digests)]])
        for start, stop in zip(*(ends[stops - starts > 1] for ends in (starts, stops)), strict=True):
            yield tuple(sorted(int(position) for position in positions[start:stop]))


def passes(manifest: Manifest, at_once: int = _RECORDS_AT_ONCE) -> int:
    """How often the data is read."""
    return -(-manifest.info.num_train // at_once)


def _digests(
    manifest: Manifest, shard: Shard, part: int, parts: int, advance: Callable[[int], object]
) -> tuple[Array, npt.NDArray[np.int64]]:
    """Those digests of a shard that belong to this part, and where they lie."""
    kept: list[Array] = [np.empty(0, _DIGEST)]
    places: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    for first, inputs, labels in pieces(manifest, shard):
        # -0.0 is no other value than 0.0, and adding 0 makes it that.
        values = inputs + np.zeros((), inputs.dtype)
        flat = values.reshape(len(values), -1).view(np.uint8)
        raw = b"".join(
            hashlib.blake2b(row.tobytes() + label.tobytes(), digest_size=16).digest()
            for row, label in zip(flat, labels, strict=True)
        )
        digests = np.frombuffer(raw, _DIGEST)
        own = np.flatnonzero(digests["high"] % np.uint64(parts) == part)
        kept.append(digests[own])
        places.append(first + own)
        advance(len(inputs))
    return np.concatenate(kept), np.concatenate(places)
