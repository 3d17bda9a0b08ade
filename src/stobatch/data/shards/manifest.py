"""What a folder of shards holds: the manifest, which is written last and vouches for every file by its checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stobatch.data.dataset import DatasetInfo
from stobatch.errors import DataError, RunError
from stobatch.files import read_json, write_json

FILE = "manifest.json"
KIND = "shards"
ENCODINGS = {"uint8": "|u1", "float32": "<f4"}
"""NumPy's types by name: bytes where `pixels.scale` of them is every input to the bit, else the inputs themselves."""
LABELS = "<i8"
TEST_TITLE = "the test part"
WRITE_AGAIN = "Restore it from a copy, or write the folder again with `stobatch shard`."


def stem_of(number: int) -> str:
    """The name that a shard's files begin with."""
    return f"train-{number:05d}"


@dataclass(frozen=True)
class StoredFile:
    """A file as it was when it was written."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Shard:
    """Two files with the inputs and labels of consecutive positions; the test examples are kept as one, too."""

    title: str
    first: int
    count: int
    inputs: StoredFile
    labels: StoredFile

    @property
    def rows(self) -> range:
        return range(self.first, self.first + self.count)

    @property
    def files(self) -> tuple[StoredFile, StoredFile]:
        return self.inputs, self.labels

    def to_dict(self) -> dict[str, Any]:
        return {"first": self.first, "count": self.count, "inputs": vars(self.inputs), "labels": vars(self.labels)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], title: str, stem: str) -> Shard:
        inputs, labels = StoredFile(**values["inputs"]), StoredFile(**values["labels"])
        if (inputs.file, labels.file) != (f"{stem}.inputs.npy", f"{stem}.labels.npy"):
            raise ValueError("a manifest names the files beside it and no others")
        return cls(title, int(values["first"]), int(values["count"]), inputs, labels)


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
    """Labels alone may well agree, and so may empty-looking inputs; both together are one shard under two names."""
    seen: dict[tuple[str, str], Shard] = {}
    for shard in shards:
        same = seen.setdefault((shard.inputs.sha256, shard.labels.sha256), shard)
        if same is not shard:
            raise DataError(
                f"{same.title} and {shard.title} of {path} are the same shard twice.",
                why="Every example in it would be trained on as if it were two persons'.",
                remedy="Write the folder from data in which every person has one record, or with fewer shards.",
            )
