"""Training examples that stay on disk: files are mapped, and only the rows asked for are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stobatch.data.dataset import Examples, TrainingExamples, check_examples
from stobatch.data.pixels import scale
from stobatch.data.shards.manifest import ENCODINGS, LABELS, WRITE_AGAIN, Manifest, Shard, StoredFile
from stobatch.data.streams import rows_at_once
from stobatch.errors import DataError

Array = npt.NDArray[Any]


class ShardedExamples(TrainingExamples):
    """The training examples of a folder of shards.

    A shard is opened when a row of it is asked for and closed again afterwards, so memory holds the rows of one `fetch`
    and nothing else, and a process that asks for the rows of its own shards needs no other shard to be there.

    **Guarantee.** `fetch` returns what was written, to the bit: the first row of a shard that is asked for has the
    shard's two files compared with the manifest's checksums (streamed), and so has the first one after a file has
    changed its size or time. Values are checked as those of `Examples` are.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.num_classes = manifest.info.num_classes
        self._edges = np.array([0, *(shard.rows.stop for shard in manifest.shards)])
        self._checked: dict[int, Stamp] = {}

    def __len__(self) -> int:
        return self.manifest.info.num_train

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return self.manifest.info.input_shape

    @property
    def shards(self) -> tuple[range, ...]:
        return tuple(shard.rows for shard in self.manifest.shards)

    def fingerprint(self) -> str:
        """That of the checksums of the training shards, in order."""
        sums = [(shard.inputs.sha256, shard.labels.sha256) for shard in self.manifest.shards]
        return hashlib.sha256(json.dumps([self.manifest.encoding, sums]).encode()).hexdigest()

    def require(self, shards: Iterable[int] | None = None) -> None:
        """Raise unless these shards (all of them if left out) are there and are what was written; opens no other."""
        for number in range(len(self.manifest.shards)) if shards is None else shards:
            shard = self.manifest.shards[number]
            stamp = stamp_of(self.manifest.folder, shard)
            if self._checked.get(number) != stamp:
                check_sums(self.manifest, shard)
                self._checked[number] = stamp

    def fetch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The examples at these positions, in any order and from any shards, on the CPU."""
        if rows.dtype != torch.int64 or rows.ndim != 1:
            raise IndexError(f"positions are one row of int64, not {rows.dtype} of shape {tuple(rows.shape)}")
        wanted = rows.cpu().numpy()
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"positions are 0 to {len(self) - 1}, not {wanted.min()} to {wanted.max()}")
        # In the order of the files, so that a disk is read forwards; put back into the caller's order at the end.
        order = np.argsort(wanted, kind="stable")
        ascending = wanted[order]
        inputs = np.empty((len(wanted), *self.input_shape), ENCODINGS[self.manifest.encoding])
        labels = np.empty(len(wanted), LABELS)
        for number, (start, stop) in enumerate(pairwise(np.searchsorted(ascending, self._edges))):
            if start < stop:
                self.require([number])
                shard = self.manifest.shards[number]
                stored_inputs, stored_labels = mapped(self.manifest, shard)
                places, to = ascending[start:stop] - shard.first, order[start:stop]
                inputs[to], labels[to] = stored_inputs[places], stored_labels[places]
        return decoded(self.manifest, inputs, labels, wanted)

    def in_memory(self) -> Examples:
        inputs, labels = self.fetch(torch.arange(len(self)))
        return Examples(inputs, labels, self.num_classes)


Stamp = tuple[tuple[int, int, int], ...]


def stamp_of(folder: Path, shard: Shard) -> Stamp:
    """Size, time and number of both files: what changes when somebody touches them."""
    stamps = []
    for file in shard.files:
        try:
            found = (folder / file.file).stat()
        except OSError as error:
            raise _refused(folder, shard, file, f"cannot be read: {error.strerror}") from None
        if found.st_size != file.bytes:
            raise _refused(folder, shard, file, f"has {found.st_size:,} bytes instead of {file.bytes:,}")
        stamps.append((found.st_size, found.st_mtime_ns, found.st_ino))
    return tuple(stamps)


def check_sums(manifest: Manifest, shard: Shard) -> None:
    """Raise unless both files have their checksums. The sums stay out of the message: they tell about the data."""
    for file in shard.files:
        try:
            with (manifest.folder / file.file).open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise _refused(manifest.folder, shard, file, f"cannot be read: {error.strerror}") from None
        if found != file.sha256:
            owners = [other.title for other in manifest.shards for own in other.files if own.sha256 == found]
            belongs = f": it is that of {owners[0]}" if owners else ""
            raise _refused(manifest.folder, shard, file, f"is not the file that was written{belongs}")


def mapped(manifest: Manifest, shard: Shard) -> tuple[Array, Array]:
    """Views of a shard's files that read what is indexed; they last as long as somebody holds them."""
    types = (ENCODINGS[manifest.encoding], LABELS)
    shapes = ((shard.count, *manifest.info.input_shape), (shard.count,))
    views = []
    for file, dtype, shape in zip(shard.files, types, shapes, strict=True):
        try:
            found = np.load(manifest.folder / file.file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise _refused(manifest.folder, shard, file, f"is no array that can be mapped ({reason})") from None
        if found.shape != shape or found.dtype != np.dtype(dtype):
            raise _refused(manifest.folder, shard, file, f"holds {found.dtype} {found.shape}, not {dtype} {shape}")
        views.append(np.asarray(found))
    return views[0], views[1]


def decoded(manifest: Manifest, inputs: Array, labels: Array, positions: Array) -> tuple[Tensor, Tensor]:
    """What is stored as what is trained on, checked."""
    stored = torch.from_numpy(inputs)
    as_inputs = scale(stored) if manifest.encoding == "uint8" else stored
    as_labels = torch.from_numpy(labels)
    check_examples(
        as_inputs,
        as_labels,
        manifest.info.num_classes,
        called=lambda index: f"example {positions[index]} of {manifest.folder}",
    )
    return as_inputs, as_labels


def read_test(manifest: Manifest, limit: int) -> Examples:
    """The first test examples, after both files have been compared with their checksums."""
    stamp_of(manifest.folder, manifest.test)
    check_sums(manifest, manifest.test)
    stored_inputs, stored_labels = mapped(manifest, manifest.test)
    inputs, labels = np.array(stored_inputs[:limit]), np.array(stored_labels[:limit])
    return Examples(*decoded(manifest, inputs, labels, np.arange(limit)), manifest.info.num_classes)


def pieces(manifest: Manifest, shard: Shard) -> Iterator[tuple[int, Array, Array]]:
    """A shard as it is stored, piece by piece, each with its first position."""
    rows = rows_at_once(manifest.info.input_shape)
    for start in range(0, shard.count, rows):
        # Mapped anew for each piece: pages that were read count as this process's memory until the view is gone.
        inputs, labels = mapped(manifest, shard)
        yield shard.first + start, np.array(inputs[start : start + rows]), np.array(labels[start : start + rows])


def _refused(folder: Path, shard: Shard, file: StoredFile, what: str) -> DataError:
    return DataError(f"{shard.title} is damaged: {folder / file.file} {what}.", remedy=WRITE_AGAIN)
