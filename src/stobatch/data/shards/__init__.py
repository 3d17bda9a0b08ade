"""Training data in shards on disk: larger than memory, disjoint and fixed, proven by a manifest with checksums.

A folder has `manifest.json`, for each shard `train-00000.inputs.npy` and `train-00000.labels.npy`, and
`test.inputs.npy` and `test.labels.npy`; all of it plain NumPy, all of it private (files 0600, folder 0700).
"""

from __future__ import annotations

from pathlib import Path

import torch

from stobatch.config import DataConfig
from stobatch.data.dataset import DatasetInfo, Examples
from stobatch.data.shards.manifest import Manifest
from stobatch.data.shards.reading import ShardedExamples, read_test
from stobatch.data.shards.repeats import find_repeated_records
from stobatch.data.shards.writing import ShardWriter, write_shards
from stobatch.errors import DataError

__all__ = ["Manifest", "ShardWriter", "ShardedExamples", "describe", "find_repeated_records", "read", "write_shards"]


def describe(config: DataConfig, root: Path) -> DatasetInfo:
    """What the manifest says; no file of data is opened. Settings that would change which records there are, are not.

    A limit or fewer classes would need another manifest: the ranges and checksums of this one are for all records.
    """
    info = Manifest.read(root).info
    for key, wanted, there in (
        ("train_limit", config.train_limit, info.num_train),
        ("num_classes", config.num_classes, info.num_classes),
    ):
        if wanted not in (None, there):
            raise DataError(
                f"data.{key}={wanted} cannot be kept: the shards in {root} have {there}.",
                why="What was dealt to shards is fixed.",
                remedy=f"Leave data.{key} unset, or write others with `stobatch shard --set data.{key}={wanted}`.",
            )
    return info


def read(info: DatasetInfo, root: Path, generator: torch.Generator | None) -> tuple[ShardedExamples, Examples]:
    """The training examples stay on disk; the test examples are read."""
    manifest = Manifest.read(root)
    return ShardedExamples(manifest), read_test(manifest, info.num_test)
