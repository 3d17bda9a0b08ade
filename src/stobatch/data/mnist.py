"""MNIST, shipped inside the package so that the first run needs no download; and the same digits at 8x8."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.config import DataConfig
from stobatch.data.dataset import DatasetInfo, Examples
from stobatch.data.pixels import first_names, first_of_classes, scale
from stobatch.data.sources import Source
from stobatch.errors import DataError

FOLDER = Path(__file__).parent / "mnist_files"

MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
"""Of the unpacked files: the archives differ by compressor, the content does not."""

TRAIN_COUNTS = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
TEST_COUNTS = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)
_BORDER, _BLOCK = 2, 3
"""For 8x8: two background pixels are cut off on each side; each block of 3x3 pixels becomes its mean."""


def describe(config: DataConfig, root: Path) -> DatasetInfo:
    """Published facts; `root` does not matter, the files lie in the package."""
    names = first_names([str(digit) for digit in range(10)], config.num_classes, "MNIST")
    kept = len(names)
    return DatasetInfo("mnist", (1, 28, 28), kept, sum(TRAIN_COUNTS[:kept]), sum(TEST_COUNTS[:kept]), names)


def read(
    info: DatasetInfo, root: Path, generator: torch.Generator | None, *, folder: Path = FOLDER
) -> tuple[Examples, Examples]:
    def part(stem: str, limit: int) -> Examples:
        pixels = unpack(folder, f"{stem}-images-idx3-ubyte")[16:].view(-1, 1, 28, 28)
        labels = unpack(folder, f"{stem}-labels-idx1-ubyte")[8:].long()
        pixels, labels = first_of_classes(pixels, labels, info, limit)
        return Examples(scale(pixels), labels, info.num_classes)

    return part("train", info.num_train), part("t10k", info.num_test)


def describe_small(config: DataConfig, root: Path) -> DatasetInfo:
    """MNIST at 8x8: digits small enough that thousands of models train on them in minutes, as audits need."""
    return replace(describe(config, root), name="small_digits", input_shape=(1, 8, 8))


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


def unpack(folder: Path, name: str) -> Tensor:
    """Return the bytes of one file. Its digest vouches for the header and the length, so neither is parsed again."""
    path = folder / f"{name}.gz"
    try:
        raw = gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise _refused(f"{path} is not there.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise _refused(f"{path} cannot be unpacked.", f"It is damaged: {error}.".replace("..", ".")) from None
    digest = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if digest != MD5[name]:
        raise _refused(f"{path} is not the file of MNIST.", f"Its MD5 is {digest}, not {MD5[name]}.")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _refused(what: str, why: str = "MNIST is part of the package.") -> DataError:
    return DataError(what, why=why, remedy="Install stobatch again: `pip install --force-reinstall stobatch`.")


SOURCE = Source(describe, read, can_augment=False, public=True, test_copies=0)
SMALL_DIGITS = Source(describe_small, read_small, can_augment=False, public=True, test_copies=0)
