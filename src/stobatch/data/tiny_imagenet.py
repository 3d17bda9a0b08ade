"""Tiny ImageNet in its official layout; the paper takes the first thirty of its two hundred classes.

Its official test labels were never published, so the test images here are the official validation images, as in the
paper's count of 1,500.
"""

from __future__ import annotations

from pathlib import Path

import torch

from stobatch.config import DataConfig
from stobatch.data.augmentation import three_copies
from stobatch.data.dataset import DatasetInfo, Examples
from stobatch.data.download import fetch_folder
from stobatch.data.pixels import first_names, in_turn, list_images, read_images
from stobatch.data.sources import Source
from stobatch.errors import DataError

URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
ARCHIVE_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
FOLDER = "tiny-imagenet-200"
SHAPE = (3, 64, 64)
COPIES = 3
OFFICIAL_CLASSES = 200


def describe(config: DataConfig, root: Path) -> DatasetInfo:
    """Count by listing folders and the validation list; no image is opened. The official sizes if nothing is there."""
    folder = root / FOLDER
    copies = COPIES if config.augment else 1
    if not folder.exists():
        classes = min(config.num_classes or OFFICIAL_CLASSES, OFFICIAL_CLASSES)
        return DatasetInfo("tiny_imagenet", SHAPE, classes, copies * 500 * classes, 50 * classes, (), copies)
    names = first_names(_lines(folder / "wnids.txt"), config.num_classes, "Tiny ImageNet")
    num_train, num_test = copies * len(_train_files(folder, names)), len(_test_files(folder, names))
    return DatasetInfo("tiny_imagenet", SHAPE, len(names), num_train, num_test, names, copies)


def fetch(root: Path) -> None:
    """Download the set if it is not there."""
    folder = root / FOLDER
    fetch_folder(URL, ARCHIVE_MD5, folder, by_hand=_instructions(folder))


def read(info: DatasetInfo, root: Path, generator: torch.Generator | None) -> tuple[Examples, Examples]:
    folder = root / FOLDER
    originals = -(-info.num_train // info.copies)
    train = read_images(_train_files(folder, info.class_names)[:originals], SHAPE, info.num_classes)
    if generator is not None:
        labels = train.labels.repeat_interleave(info.copies)
        train = Examples(three_copies(train.inputs, generator), labels, info.num_classes).limit(info.num_train)
    return train, read_images(_test_files(folder, info.class_names)[: info.num_test], SHAPE, info.num_classes)


def _train_files(folder: Path, wnids: tuple[str, ...]) -> list[tuple[Path, int]]:
    return in_turn([list_images(folder / "train" / wnid / "images", (".jpeg",)) for wnid in wnids])


def _test_files(folder: Path, wnids: tuple[str, ...]) -> list[tuple[Path, int]]:
    listing = folder / "val" / "val_annotations.txt"
    label = {wnid: index for index, wnid in enumerate(wnids)}
    rows = [(line, line.split("\t")) for line in _lines(listing)]
    for line, row in rows:
        if len(row) < 2:
            raise DataError(f"{listing} has the line '{line[:60]}'.", remedy="Restore the official file.")
    return [(folder / "val" / "images" / row[0], label[row[1]]) for _, row in rows if row[1] in label]


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.", remedy=_instructions(path.parent)) from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def _instructions(folder: Path) -> str:
    return (
        f"Unpack {URL} so that {FOLDER}/wnids.txt, {FOLDER}/train and {FOLDER}/val lie in {folder.parent}, "
        f"or point STOBATCH_DATA at a folder that has {FOLDER}/."
    )


SOURCE = Source(describe, read, can_augment=True, fetch=fetch, public=True)
