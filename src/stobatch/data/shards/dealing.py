"""Which shard a record goes to: decided by its place in the source and a seed, never by what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stobatch.errors import DataError
from stobatch.seeds import Seeds

Numbers = npt.NDArray[np.int64]


class Dealer:
    """Deals records to shards; within a shard they keep the order in which they came.

    Where their number is known a seeded permutation deals them, else they go to the shards by turns. Copies of one
    original (`DatasetInfo.copies`) stay together, so a person is in one shard.

    **Guarantee.** The shard of a record depends on its place in the source, the number of records and the seed alone,
    so that changing one record changes one shard. Shards differ in size by at most one original.
    """

    def __init__(self, num_shards: int, copies: int, num_records: int | None, seeds: Seeds) -> None:
        self.num_shards, self.copies = num_shards, copies
        self.rule: dict[str, Any] = {"rule": "by turns"}
        self._shard_of_original: npt.NDArray[np.int32] | None = None
        if num_records is not None:
            originals = -(-num_records // copies)
            if not 1 <= num_shards <= originals:
                raise too_many(num_shards, originals)
            order = seeds.wide_generator("data", "shards").permutation(originals)
            order *= num_shards
            order //= originals
            self._shard_of_original = order.astype(np.int32)
            self.rule = {"rule": "seeded permutation", "seed": seeds.root if seeds.public else None}

    def shards_of(self, first: int, count: int) -> Numbers:
        """The shards of so many records from a place in the source on."""
        originals = np.arange(first, first + count) // self.copies
        if self._shard_of_original is None:
            return originals % self.num_shards
        return self._shard_of_original[originals].astype(np.int64)


def too_many(num_shards: int, originals: int) -> DataError:
    return DataError(
        f"{originals} training examples do not fill {num_shards} shards.",
        why="Every shard holds at least one.",
        remedy=f"Use from 1 to {originals} shards." if originals else "Give training examples.",
    )
