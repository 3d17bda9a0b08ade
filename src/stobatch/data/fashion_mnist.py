"""Fashion-MNIST: clothes in the place of digits, from Debian's package or from files under the data root."""

from __future__ import annotations

from pathlib import Path

import torch

from stobatch.data.dataset import DatasetInfo, Examples
from stobatch.data.idx_files import IdxSet
from stobatch.data.sources import Source

NAME = "fashion-mnist"
"""Of the folder, under the data root and where the package puts it."""
PACKAGED = Path("/usr/share/datasets") / NAME

FILES = IdxSet(
    name="fashion_mnist",
    title="Fashion-MNIST",
    class_names=(
        *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    train_counts=(6000,) * 10,
    test_counts=(1000,) * 10,
    md5={
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    belongs="Fashion-MNIST is not part of the package.",
    remedy="Run `apt install dataset-fashion-mnist`, or put the four files of github.com/zalandoresearch/fashion-mnist "
    f"into {NAME}/ under the data root (machine.data_root, or STOBATCH_DATA).",
)


def read(
    info: DatasetInfo, root: Path, generator: torch.Generator | None, *, packaged: Path = PACKAGED
) -> tuple[Examples, Examples]:
    """Read from the data root where it has the folder, else from the package."""
    own = root / NAME
    return FILES.read(info, packaged if packaged.is_dir() and not own.is_dir() else own)


SOURCE = Source(FILES.describe, read, can_augment=False, public=True, test_copies=0)
