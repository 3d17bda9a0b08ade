"""Grey pictures of 28 x 28 pixels in four idx files, known by their digests: MNIST, and sets that look like it."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stobatch.config import DataConfig
from stobatch.data.dataset import DatasetInfo, Examples
from stobatch.data.pixels import first_names, first_of_classes, scale
from stobatch.errors import DataError

_PIECE = 2**20
"""Bytes that are unpacked at once."""


@dataclass(frozen=True, eq=False)
class IdxSet:
    """What is published about such a set, and how its files are read."""

    name: str
    title: str
    class_names: Sequence[str]
    train_counts: Sequence[int]
    test_counts: Sequence[int]
    md5: Mapping[str, str]
    """Of the unpacked files: the archives differ by compressor, the content does not."""
    belongs: str
    """Where the files come from, in a sentence."""
    remedy: str

    def describe(self, config: DataConfig, root: Path) -> DatasetInfo:
        """Return published facts: no file is opened, none has to be there."""
        names = first_names(self.class_names, config.num_classes, self.title)
        kept = len(names)
        counts = sum(self.train_counts[:kept]), sum(self.test_counts[:kept])
        return DatasetInfo(self.name, (1, 28, 28), kept, *counts, names)

    def read(self, info: DatasetInfo, folder: Path) -> tuple[Examples, Examples]:
        """Return training and test examples, the first ones of the classes that `info` keeps."""

        def part(stem: str, limit: int) -> Examples:
            pixels = self.unpack(folder, f"{stem}-images-idx3-ubyte")[16:].view(-1, 1, 28, 28)
            labels = self.unpack(folder, f"{stem}-labels-idx1-ubyte")[8:].long()
            pixels, labels = first_of_classes(pixels, labels, info, limit)
            return Examples(scale(pixels), labels, info.num_classes)

        return part("train", info.num_train), part("t10k", info.num_test)

    def unpack(self, folder: Path, name: str) -> Tensor:
        """Return the bytes of one file. Its digest vouches for the header and the length, so neither is parsed."""
        count = sum(self.train_counts if name.startswith("train") else self.test_counts)
        size = 16 + 784 * count if "images" in name else 8 + count
        path, raw = folder / f"{name}.gz", bytearray(size)
        try:
            with gzip.open(path) as file:
                # Into its place: whole, or in an array that grows, it would stand in memory two or three times.
                for start in range(0, size, _PIECE):
                    file.readinto(memoryview(raw)[start : start + _PIECE])
                raw += file.read(1)  # what is too long is another file; at the end archives have a checksum
        except FileNotFoundError:
            raise DataError(f"{path} is not there.", why=self.belongs, remedy=self.remedy) from None
        except (OSError, EOFError, zlib.error) as error:
            why = f"It is damaged: {error}.".replace("..", ".")
            raise DataError(f"{path} cannot be unpacked.", why=why, remedy=self.remedy) from None
        digest = hashlib.md5(raw, usedforsecurity=False).hexdigest()
        if digest != self.md5[name]:
            why = f"Its MD5 is {digest}, not {self.md5[name]}."
            raise DataError(f"{path} is not the file of {self.title}.", why=why, remedy=self.remedy)
        return torch.frombuffer(raw, dtype=torch.uint8)
