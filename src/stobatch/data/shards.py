"""Training data in shards on disk: larger than memory, disjoint and fixed, proven by a manifest with checksums.

A folder has `manifest.json`, for each shard `train-00000.inputs.npy` and `train-00000.labels.npy`, and
`test.inputs.npy` and `test.labels.npy`; all of it plain NumPy, all of it private (files 0600, folder 0700). Where
records have persons, `train-00000.persons.npy` says whose they are, by numbers, and all of a person's are in one shard.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stobatch.config import DataConfig
from stobatch.data.dataset import DatasetInfo, Examples, TrainingExamples, check_examples
from stobatch.data.persons import Persons, check_codes
from stobatch.data.pixels import scale
from stobatch.data.sources import Source
from stobatch.errors import DataError, RunError
from stobatch.files import read_json, sha256_of, write_json

FILE = "manifest.json"
KIND = "shards"
ENCODINGS = {"uint8": "|u1", "float32": "<f4"}
"""NumPy's types by name: bytes where `pixels.scale` of them is every input to the bit, else the inputs themselves."""
LABELS = "<i8"
TEST_TITLE = "the test part"
WRITE_AGAIN = "Restore it from a copy, or write the folder again with `stobatch shard`."


def stem_of(number: int) -> str:
    """Return the name that a shard's files begin with."""
    return f"train-{number:05d}"


@dataclass(frozen=True)
class StoredFile:
    """A file as it was when it was written."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardOwners:
    """The file that says whose the records of a shard are, and what it adds up to."""

    codes: StoredFile
    num: int
    largest: int
    """Records of the person who has the most."""

    def to_dict(self) -> dict[str, Any]:
        return {"codes": vars(self.codes), "num": self.num, "largest": self.largest}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], stem: str) -> ShardOwners:
        codes = StoredFile(**values["codes"])
        if codes.file != f"{stem}.persons.npy":
            raise ValueError("a manifest names the files beside it and no others")
        return cls(codes, int(values["num"]), int(values["largest"]))


@dataclass(frozen=True)
class Shard:
    """Two files with the inputs and labels of consecutive positions; the test examples are kept as one, too."""

    title: str
    first: int
    count: int
    inputs: StoredFile
    labels: StoredFile
    owners: ShardOwners | None = None

    @property
    def rows(self) -> range:
        return range(self.first, self.first + self.count)

    @property
    def files(self) -> tuple[StoredFile, ...]:
        return self.inputs, self.labels, *(() if self.owners is None else (self.owners.codes,))

    def to_dict(self) -> dict[str, Any]:
        entry = {"first": self.first, "count": self.count, "inputs": vars(self.inputs), "labels": vars(self.labels)}
        return entry if self.owners is None else {**entry, "persons": self.owners.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], title: str, stem: str) -> Shard:
        inputs, labels = StoredFile(**values["inputs"]), StoredFile(**values["labels"])
        if (inputs.file, labels.file) != (f"{stem}.inputs.npy", f"{stem}.labels.npy"):
            raise ValueError("a manifest names the files beside it and no others")
        owners = ShardOwners.from_dict(values["persons"], stem) if "persons" in values else None
        return cls(title, int(values["first"]), int(values["count"]), inputs, labels, owners)


@dataclass(frozen=True)
class Manifest:
    """A folder of shards, described without opening a file of data.

    **Guarantee.** The shards' ranges of positions cover 0 to num_train - 1 without overlap or hole, no two shards are
    the same, and `digest` is that of all the rest. Nothing is said about the files until they are read: that is what
    the checksums in here are for.

    The checksums confirm a guess of the private data, so a manifest is as private as they are: mode 0600, in a folder
    of mode 0700.
    """

    folder: Path
    info: DatasetInfo
    encoding: str
    dealt: Mapping[str, Any]
    shards: tuple[Shard, ...]
    test: Shard
    test_copies: int | None = None
    """Test records that are training records, counted when the folder was written; unknown in older folders."""

    def __post_init__(self) -> None:
        _check_ranges(self.folder / FILE, self.shards, self.info.num_train)
        _check_ranges(self.folder / FILE, (self.test,), self.info.num_test)
        _check_different(self.folder / FILE, self.shards)
        owners = [shard.owners for shard in self.shards if shard.owners is not None]
        total = sum(owner.num for owner in owners) if owners else None
        if total != self.info.num_persons or len(owners) not in (0, len(self.shards)):
            mismatch = f"describes {self.info.num_persons or 'no'} persons, its shards have {total or 'none'}"
            raise DataError(f"{self.folder / FILE} {mismatch}.", remedy=WRITE_AGAIN)

    @property
    def digest(self) -> str:
        return _digest(self._content())

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for shard in (*self.shards, self.test) for file in shard.files)

    def _content(self) -> dict[str, Any]:
        return {
            "dataset": self.info.to_dict(),
            "encoding": self.encoding,
            "dealt": dict(self.dealt),
            "shards": [shard.to_dict() for shard in self.shards],
            "test": self.test.to_dict(),
            **({} if self.test_copies is None else {"test_copies": self.test_copies}),
        }

    def write(self) -> None:
        """Make the folder a whole one; before this it is refused."""
        write_json(self.folder / FILE, KIND, {**self._content(), "digest": self.digest}, private=True)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        path = folder / FILE
        if not path.exists():
            begun = folder.is_dir() and any(folder.glob("train-*.npy"))
            raise DataError(
                f"{path} is not there.",
                why="The folder was not written to its end." if begun else "It makes a folder one of shards.",
                remedy="Write the folder with `stobatch shard`, and point STOBATCH_DATA or machine.data_root at it.",
            )
        try:
            content = read_json(path, KIND)
        except (RunError, OSError) as error:
            why = error.what if isinstance(error, RunError) else f"cannot read {path}: {error.strerror}."
            raise DataError(why, remedy=WRITE_AGAIN) from None
        try:
            claimed = content.pop("digest")
            if claimed != _digest(content):
                raise ValueError("the digest is that of other content")
            manifest = cls._from_content(folder, content)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DataError(
                f"{path} is not what was written.",
                why="Its parts or its digest do not fit together: it was edited or damaged.",
                remedy=WRITE_AGAIN,
            ) from None
        return manifest

    @classmethod
    def _from_content(cls, folder: Path, content: Mapping[str, Any]) -> Manifest:
        if content["encoding"] not in ENCODINGS:
            raise ValueError("an encoding that nothing writes")
        return cls(
            folder,
            DatasetInfo.from_dict(content["dataset"]),
            content["encoding"],
            content["dealt"],
            tuple(
                Shard.from_dict(values, f"shard {number}", stem_of(number))
                for number, values in enumerate(content["shards"])
            ),
            Shard.from_dict(content["test"], TEST_TITLE, "test"),
            int(content["test_copies"]) if "test_copies" in content else None,
        )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_ranges(path: Path, shards: tuple[Shard, ...], total: int) -> None:
    covered = 0
    for shard in shards:
        if shard.first != covered or shard.count < 1:
            overlap = shard.first < covered
            raise DataError(
                f"{shard.title} of {path} has the positions {shard.first} to {shard.first + shard.count - 1}, "
                f"and those before it end at {covered - 1}.",
                why="Shards overlap: an example would be trained on twice."
                if overlap
                else "A position has no example.",
                remedy=WRITE_AGAIN,
            )
        covered += shard.count
    if covered != total or not shards:
        raise DataError(f"{path} describes {total} examples and has {covered}.", remedy=WRITE_AGAIN)


def _check_different(path: Path, shards: tuple[Shard, ...]) -> None:
    """Raise where labels and inputs of two shards agree: then they are one shard under two names."""
    seen: dict[tuple[str, str], Shard] = {}
    for shard in shards:
        same = seen.setdefault((shard.inputs.sha256, shard.labels.sha256), shard)
        if same is not shard:
            raise DataError(
                f"{same.title} and {shard.title} of {path} are the same shard twice.",
                why="Every example in it would be trained on as if it were two persons'.",
                remedy="Write the folder from data in which every person has one record, or with fewer shards.",
            )


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

    @property
    def persons(self) -> Persons | None:
        if self.manifest.info.num_persons is None:
            return None
        owners = [shard.owners for shard in self.manifest.shards if shard.owners is not None]
        counts, largest = [owner.num for owner in owners], max(owner.largest for owner in owners)
        return Persons.in_shards(self.shards, counts, self._codes, largest)

    def _codes(self, number: int) -> Tensor:
        """Return the persons of a shard's records, after its files have been compared with their checksums."""
        self.require([number])
        shard = self.manifest.shards[number]
        assert shard.owners is not None
        codes = torch.from_numpy(np.array(_map_array(self.manifest, shard, shard.owners.codes, LABELS, (shard.count,))))
        check_codes(codes, shard.count)
        return codes

    def fingerprint(self) -> str:
        """Return the digest of the checksums of the training shards, in order."""
        sums = [tuple(file.sha256 for file in shard.files) for shard in self.manifest.shards]
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
        """Return the examples at these positions, in any order and from any shards, on the CPU."""
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
                stored_inputs, stored_labels = map_files(self.manifest, shard)
                places, to = ascending[start:stop] - shard.first, order[start:stop]
                inputs[to], labels[to] = stored_inputs[places], stored_labels[places]
        return decode(self.manifest, inputs, labels, wanted)

    def in_memory(self) -> Examples:
        (inputs, labels), persons = self.fetch(torch.arange(len(self))), self.persons
        return Examples(inputs, labels, self.num_classes, groups=None if persons is None else persons.codes())


Stamp = tuple[tuple[int, int, int], ...]


def stamp_of(folder: Path, shard: Shard) -> Stamp:
    """Return size, time and inode of both files: what changes when they are touched."""
    stamps = []
    for file in shard.files:
        try:
            status = (folder / file.file).stat()
        except OSError as error:
            raise _damaged_error(folder, shard, file, f"cannot be read: {error.strerror}") from None
        if status.st_size != file.bytes:
            raise _damaged_error(folder, shard, file, f"has {status.st_size:,} bytes instead of {file.bytes:,}")
        stamps.append((status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(stamps)


def check_sums(manifest: Manifest, shard: Shard) -> None:
    """Raise unless both files have their checksums. The sums stay out of the message: they tell about the data."""
    for file in shard.files:
        try:
            digest = sha256_of(manifest.folder / file.file)
        except OSError as error:
            raise _damaged_error(manifest.folder, shard, file, f"cannot be read: {error.strerror}") from None
        if digest != file.sha256:
            owners = [other.title for other in manifest.shards for own in other.files if own.sha256 == digest]
            belongs = f": it is that of {owners[0]}" if owners else ""
            raise _damaged_error(manifest.folder, shard, file, f"is not the file that was written{belongs}")


def map_files(manifest: Manifest, shard: Shard) -> tuple[Array, Array]:
    """Return views of a shard's files that read what is indexed; they last as long as they are referenced."""
    inputs = (shard.count, *manifest.info.input_shape)
    return (
        _map_array(manifest, shard, shard.inputs, ENCODINGS[manifest.encoding], inputs),
        _map_array(manifest, shard, shard.labels, LABELS, (shard.count,)),
    )


def _map_array(manifest: Manifest, shard: Shard, file: StoredFile, dtype: str, shape: tuple[int, ...]) -> Array:
    try:
        array = np.load(manifest.folder / file.file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise _damaged_error(manifest.folder, shard, file, f"is not an array that can be mapped ({reason})") from None
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise _damaged_error(manifest.folder, shard, file, f"holds {array.dtype} {array.shape}, not {dtype} {shape}")
    return np.asarray(array)


def decode(manifest: Manifest, inputs: Array, labels: Array, positions: Array) -> tuple[Tensor, Tensor]:
    """Return what is stored as what is trained on, checked."""
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
    """Return the first test examples, after both files have been compared with their checksums."""
    stamp_of(manifest.folder, manifest.test)
    check_sums(manifest, manifest.test)
    stored_inputs, stored_labels = map_files(manifest, manifest.test)
    inputs, labels = np.array(stored_inputs[:limit]), np.array(stored_labels[:limit])
    return Examples(*decode(manifest, inputs, labels, np.arange(limit)), manifest.info.num_classes)


def _damaged_error(folder: Path, shard: Shard, file: StoredFile, what: str) -> DataError:
    return DataError(f"{shard.title} is damaged: {folder / file.file} {what}.", remedy=WRITE_AGAIN)


def describe(config: DataConfig, root: Path) -> DatasetInfo:
    """Return what the manifest says; no file of data is opened. Settings that would change the records are refused.

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
    """Return the data set: training examples stay on disk, test examples are read."""
    manifest = Manifest.read(root)
    return ShardedExamples(manifest), read_test(manifest, info.num_test)


SOURCE = Source(describe, read, can_augment=False)
