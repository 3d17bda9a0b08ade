"""MNIST at 8x8: digits small enough that thousands of models train on them in minutes, as audits need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F  # noqa: N812

from stobatch.config import DataConfig
from stobatch.data import mnist
from stobatch.data.dataset import DatasetInfo, Examples
from stobatch.data.sources import Source

_BORDER, _BLOCK = 2, 3
"""Two background pixels are cut off on each side; each block of 3x3 pixels becomes its mean."""


def describe(config: DataConfig, root: Path) -> DatasetInfo:
    return replace(mnist.describe(config, root), name="small_digits", input_shape=(1, 8, 8))


def read(info: DatasetInfo, root: Path, generator: torch.Generator | None) -> tuple[Examples, Examples]:
    train, test = mnist.read(info, root, generator)
    return _small(train), _small(test)


def _small(examples: Examples) -> Examples:
    inner = examples.inputs[:, :, _BORDER:-_BORDER, _BORDER:-_BORDER]
    # A mean of values in [-1, 1] can round to just outside.
    small = F.avg_pool2d(inner, _BLOCK).clamp(-1, 1)
    return Examples(small.contiguous(), examples.labels, examples.num_classes)


SOURCE = Source(describe, read, can_augment=False, public=True, test_copies=0)
