"""MNIST, shipped inside the package so that the first run needs no download; and the same digits at 8x8."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.config import DataConfig
from stobatch.data.dataset import DatasetInfo, Examples
from stobatch.data.idx_files import IdxSet
from stobatch.data.sources import Source

FOLDER = Path(__file__).parent / "mnist_files"

FILES = IdxSet(
    name="mnist",
    title="MNIST",
    class_names=[str(digit) for digit in range(10)],
    train_counts=(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
    test_counts=(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
    md5={
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    belongs="MNIST is part of the package.",
    remedy="Install stobatch again: `pip install --force-reinstall stobatch`.",
)
_BORDER, _BLOCK = 2, 3
"""For 8x8: two background pixels are cut off on each side; each block of 3x3 pixels becomes its mean."""


def read(
    info: DatasetInfo, root: Path, generator: torch.Generator | None, *, folder: Path = FOLDER
) -> tuple[Examples, Examples]:
    """Read the files, which lie in the package: `root` does not matter."""
    return FILES.read(info, folder)


def describe_small(config: DataConfig, root: Path) -> DatasetInfo:
    """Describe MNIST at 8x8: digits small enough that thousands of models train on them in minutes, as audits need."""
    return replace(FILES.describe(config, root), name="small_digits", input_shape=(1, 8, 8))


def read_small(info: DatasetInfo, root: Path, generator: torch.Generator | None) -> tuple[Examples, Examples]:
    def small(examples: Examples) -> Examples:
        return Examples(shrink_to_small(examples.inputs), examples.labels, examples.num_classes)

    train, test = read(info, root, generator)
    return small(train), small(test)


def shrink_to_small(inputs: Tensor) -> Tensor:
    """Return pictures of 28x28 at 8x8."""
    inner = inputs[:, :, _BORDER:-_BORDER, _BORDER:-_BORDER]
    # A mean of values in [-1, 1] can round to just outside.
    return F.avg_pool2d(inner, _BLOCK).clamp(-1, 1).contiguous()


SOURCE = Source(FILES.describe, read, can_augment=False, public=True, test_copies=0)
SMALL_DIGITS = Source(describe_small, read_small, can_augment=False, public=True, test_copies=0)
