"""CIFAR-10 from its canonical binary files, cut to the 28 x 28 pixels that the paper's network reads.

The paper's sensitivity 3 * (14**2 + 2) * 16 has 14 x 14 hidden neurons, which is what 28 x 28 inputs give.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from stobatch.config import DataConfig
from stobatch.data.augmentation import centre_crop, random_contrast, random_crop, random_flip
from stobatch.data.dataset import DatasetInfo, Examples
from stobatch.data.download import fetch_folder
from stobatch.data.pixels import first_names, first_of_classes, scale
from stobatch.data.sources import Source
from stobatch.errors import DataError

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
FOLDER = "cifar-10-batches-bin"
TEST_FILE = "test_batch.bin"
MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    TEST_FILE: "803d5f7f4d78ea53de84dbe85f74fb6d",
}
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN_PER_CLASS, TEST_PER_CLASS = 5000, 1000
SIZE = 28
RECORD = 1 + 3 * 32 * 32
"""One byte of label, then 32 x 32 pixels in red, green and blue."""


def describe(config: DataConfig, root: Path) -> DatasetInfo:
    """Return published facts: no file is opened, none has to be there."""
    names = first_names(NAMES, config.num_classes, "CIFAR-10")
    kept = len(names)
    return DatasetInfo("cifar10", (3, SIZE, SIZE), kept, TRAIN_PER_CLASS * kept, TEST_PER_CLASS * kept, names)


def read(
    info: DatasetInfo, root: Path, generator: torch.Generator | None, *, digests: Mapping[str, str] = MD5
) -> tuple[Examples, Examples]:
    folder = root / FOLDER
    fetch_folder(URL, ARCHIVE_MD5, folder, by_hand=_instructions(folder, digests))
    train = torch.cat([records(folder, name, digests) for name in digests if name != TEST_FILE])
    pixels, labels = first_of_classes(*split(train), info, info.num_train)
    train_examples = Examples(_training_view(pixels, generator), labels, info.num_classes)
    pixels, labels = first_of_classes(*split(records(folder, TEST_FILE, digests)), info, info.num_test)
    return train_examples, Examples(scale(centre_crop(pixels, SIZE)), labels, info.num_classes)


def records(folder: Path, name: str, digests: Mapping[str, str]) -> Tensor:
    """Return the checked records [N, 3073] of one file."""
    path = folder / name
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.", remedy=_instructions(folder, digests)) from None
    digest = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if digest != digests[name] or len(raw) % RECORD:
        raise DataError(
            f"{path} is not the file of CIFAR-10.",
            why=f"It has {len(raw)} bytes and MD5 {digest}, not {digests[name]}.",
            remedy=f"Remove {folder} and run again to fetch it. {_instructions(folder, digests)}",
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, RECORD)


def split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return pixels [N, 3, 32, 32] and labels [N] of records."""
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def _training_view(pixels: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return the centre, or a random crop, flip and contrast (Appendix P): one record from one image either way."""
    if generator is None:
        return scale(centre_crop(pixels, SIZE))
    cropped = random_flip(random_crop(pixels, SIZE, generator), generator)
    return random_contrast(scale(cropped), generator)


def _instructions(folder: Path, names: Mapping[str, str]) -> str:
    return f"Put {', '.join(names)} (from {URL}) into {folder}, or point STOBATCH_DATA at a folder that has {FOLDER}/."


SOURCE = Source(describe, read, can_augment=True, public=True)
