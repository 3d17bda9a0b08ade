"""Write a folder of shards from chunks that come by; the manifest is written last and makes the folder valid."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stobatch.data.dataset import Dataset, DatasetInfo, Stream, check_examples
from stobatch.data.overlap import find_copies
from stobatch.data.pixels import scale
from stobatch.data.shards import (
    ENCODINGS,
    FILE,
    LABELS,
    TEST_TITLE,
    Array,
    Manifest,
    Shard,
    ShardedExamples,
    StoredFile,
    pieces,
    read_test,
    stem_of,
)
from stobatch.errors import DataError, RunError
from stobatch.seeds import Seeds

_OURS = re.compile(r"(train-\d{5,}|test)\.(inputs|labels)\.npy(\.wide)?|\.manifest\.json\..*")
_TEST = "test"
_COPY_AT_ONCE = 2**22

Advance = Callable[[int], object]


def write_shards(
    source: Dataset | Stream,
    out: Path,
    num_shards: int,
    seeds: Seeds,
    *,
    advance: Advance = lambda records: None,
) -> Manifest:
    """Write a data set as a folder of shards, chunk by chunk.

    `advance` hears of every record twice: when it is written and when it is in a checksum.

    **Guarantee.** Memory holds one chunk, twelve bytes for each record, and in the end the test examples, among which
    copies of training examples are counted; the size of the training data does not matter. The same
    source, seed and number of shards give the same files and the same digest, however the source is cut into chunks.
    """
    stream = source if isinstance(source, Stream) else Stream.of(source)
    with ShardWriter(out, stream.info, num_shards, seeds, counted=stream.counted) as writer:
        for inputs, labels in stream.train:
            writer.add(inputs, labels)
            advance(len(labels))
        for inputs, labels in stream.test:
            writer.add_test(inputs, labels)
            advance(len(labels))
        return writer.finish(advance)


def require_room(out: Path) -> None:
    """Raise unless a folder is new, empty, or left behind by a writer that was killed."""
    with _writing(out):
        names = {path.name for path in out.iterdir()} if out.exists() else set()
    if FILE in names:
        raise DataError(f"{out} already holds shards.", remedy="Remove it or choose another folder.")
    foreign = sorted(name for name in names if not _OURS.fullmatch(name))
    if foreign:
        raise DataError(f"{out} holds other files ('{foreign[0]}').", remedy="Choose a folder that is new or empty.")


class ShardWriter:
    """Takes examples in any number of chunks and leaves a folder that `ShardedExamples` reads.

    **Guarantee.** A folder has its manifest when every file is written, on disk and summed, and not before. A kill
    leaves a folder that is refused and can be written again; an error, or an end without `finish`, leaves nothing.
    Files have mode 0600 and the folder 0700: they are private data, and so are their checksums, which confirm a guess.

    Inputs are stored as bytes as long as `pixels.scale` makes the very same inputs of them. The first input that bytes
    cannot express turns everything into float32, which costs one copy of what was written before.
    """

    def __init__(self, out: Path, info: DatasetInfo, num_shards: int, seeds: Seeds, *, counted: bool = True) -> None:
        self.out, self.info, self.counted = out, info, counted
        if num_shards < 1:
            raise DataError(f"{num_shards} shards hold no examples.", remedy="Use one shard or more.")
        self._dealer = Dealer(num_shards, info.copies, info.num_train if counted else None, seeds)
        self._encoding = "uint8"
        self._counts = dict.fromkeys([*(stem_of(number) for number in range(num_shards)), _TEST], 0)
        self._made_folder = False

    def __enter__(self) -> Self:
        with _writing(self.out):
            self._make_room()
            for stem in self._counts:
                self._append(stem, np.empty((0, *self.info.input_shape), ENCODINGS["uint8"]), np.empty(0, LABELS))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not (self.out / FILE).exists():
            with suppress(OSError):
                self._clear()
                if self._made_folder:
                    self.out.rmdir()

    def add(self, inputs: Tensor, labels: Tensor) -> None:
        """The next training examples."""
        inputs, labels = inputs.detach().cpu(), labels.detach().cpu()
        first = self._num_train
        if self.counted and first + len(labels) > self.info.num_train:
            raise self._miscounted("training", first + len(labels), self.info.num_train)
        stored = self._checked(inputs, labels, "training", first)
        shards = self._dealer.shards_of(first, len(labels))
        with _writing(self.out):
            for number in np.unique(shards):
                own = np.flatnonzero(shards == number)
                self._append(stem_of(int(number)), stored[own], labels.numpy()[own])

    def add_test(self, inputs: Tensor, labels: Tensor) -> None:
        """The next test examples."""
        inputs, labels = inputs.detach().cpu(), labels.detach().cpu()
        stored = self._checked(inputs, labels, "test", self._counts[_TEST])
        with _writing(self.out):
            self._append(_TEST, stored, labels.numpy())

    def finish(self, advance: Advance = lambda records: None) -> Manifest:
        """Make the files whole, sum them up and write the manifest."""
        found, num_test = self._num_train, self._counts[_TEST]
        if self.counted and found != self.info.num_train:
            raise self._miscounted("training", found, self.info.num_train)
        if self.counted and num_test != self.info.num_test:
            raise self._miscounted("test", num_test, self.info.num_test)
        if not num_test:
            raise DataError(f"{self.info.name} has no test examples.", remedy="Give at least one.")
        if not all(self._counts.values()):
            raise too_many(self._dealer.num_shards, -(-found // self.info.copies))
        with _writing(self.out):
            shards: list[Shard] = []
            for number, stem in enumerate(self._counts):
                first = sum(shard.count for shard in shards) if stem != _TEST else 0
                title = f"shard {number}" if stem != _TEST else TEST_TITLE
                shards.append(Shard(title, first, self._counts[stem], *self._finished(stem)))
                advance(self._counts[stem])
        info = DatasetInfo(**{**vars(self.info), "num_train": found, "num_test": num_test})
        manifest = Manifest(self.out, info, self._encoding, self._dealer.rule, tuple(shards[:-1]), shards[-1])
        copies = find_copies(ShardedExamples(manifest), read_test(manifest, num_test))
        manifest = replace(manifest, test_copies=len(copies))
        with _writing(self.out):
            manifest.write()
        return manifest

    @property
    def _num_train(self) -> int:
        return sum(count for stem, count in self._counts.items() if stem != _TEST)

    def _miscounted(self, part: str, found: int, promised: int) -> DataError:
        return DataError(
            f"{self.info.name} was to have {promised} {part} examples and has {found}.",
            why="They are dealt to the shards by their number.",
            remedy="Give the right number, or counted=False if it is not known.",
        )

    def _checked(self, inputs: Tensor, labels: Tensor, part: str, first: int) -> Any:
        """The inputs as they are stored."""

        def called(index: int) -> str:
            return f"{part} example {first + index} of {self.info.name}"

        check_examples(inputs, labels, self.info.num_classes, called=called)
        if tuple(inputs.shape[1:]) != self.info.input_shape:
            raise DataError(
                f"{called(0)} is {tuple(inputs.shape[1:])}, not {self.info.input_shape}.",
                why="One network has one input size.",
                remedy="Bring all inputs to one shape.",
            )
        if self._encoding == "uint8":
            as_bytes = to_bytes(inputs)
            if as_bytes is not None:
                return as_bytes.numpy()
            with _writing(self.out):
                self._widen()
        return inputs.numpy()

    def _path(self, stem: str, part: str) -> Path:
        return self.out / f"{stem}.{part}.npy"

    def _make_room(self) -> None:
        require_room(self.out)
        if not self.out.exists():
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.mkdir(mode=0o700)
            self._made_folder = True
        self._clear()
        self.out.chmod(0o700)

    def _clear(self) -> None:
        for path in self.out.iterdir():
            if _OURS.fullmatch(path.name):
                path.unlink()

    def _append(self, stem: str, inputs: Any, labels: Any) -> None:
        """To the two files of a shard, which are opened for this alone: a thousand shards need no thousand handles."""
        for part, rows, shape in (("inputs", inputs, self.info.input_shape), ("labels", labels, ())):
            handle = os.open(self._path(stem, part), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(handle, "ab") as out:
                if not out.tell():
                    out.write(_header(rows.dtype.str, (0, *shape)))
                out.write(np.ascontiguousarray(rows).data)
        self._counts[stem] += len(labels)

    def _widen(self) -> None:
        """Turn the bytes that were written so far into what `pixels.scale` makes of them."""
        header = _header(ENCODINGS["float32"], (0, *self.info.input_shape))
        for stem in self._counts:
            path = self._path(stem, "inputs")
            wide = path.with_name(f"{path.name}.wide")
            handle = os.open(wide, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with path.open("rb") as narrow, os.fdopen(handle, "wb") as out:
                narrow.seek(len(_header(ENCODINGS["uint8"], (0, *self.info.input_shape))))
                out.write(header)
                while piece := narrow.read(_COPY_AT_ONCE):
                    out.write(scale(torch.frombuffer(bytearray(piece), dtype=torch.uint8)).numpy().data)
            wide.replace(path)
        self._encoding = "float32"

    def _finished(self, stem: str) -> tuple[StoredFile, StoredFile]:
        """Both files with their true length in the header, on disk, and summed as they now are."""
        count = self._counts[stem]
        return (
            _sealed(self._path(stem, "inputs"), ENCODINGS[self._encoding], (count, *self.info.input_shape)),
            _sealed(self._path(stem, "labels"), LABELS, (count,)),
        )


def to_bytes(inputs: Tensor) -> Tensor | None:
    """The bytes of which `pixels.scale` makes exactly these inputs, or None.

    >>> to_bytes(torch.tensor([-1.0, 1.0])), to_bytes(torch.tensor([0.0]))
    (tensor([  0, 255], dtype=torch.uint8), None)
    """
    nearest = inputs.add(1).mul_(127.5).round_().to(torch.uint8)
    return nearest if torch.equal(scale(nearest), inputs) else None


def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """NumPy leaves room in it for a longer first dimension, so that it can be written anew at the end."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
    return header.getvalue()


def _sealed(path: Path, dtype: str, shape: tuple[int, ...]) -> StoredFile:
    with path.open("rb+") as file:
        file.write(_header(dtype, shape))
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return StoredFile(path.name, path.stat().st_size, digest)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RunError) as error:
        why = error.strerror if isinstance(error, OSError) else error.what
        raise DataError(
            f"cannot write {out}: {why}.".replace("..", "."),
            remedy="Free some space or choose another folder, then write it again.",
        ) from error


Numbers = npt.NDArray[np.int64]


class Dealer:
    """Deals records to shards; within a shard they keep the order in which they came.

    Where their number is known a seeded permutation deals them, else they go to the shards by turns. Copies of one
    original (`DatasetInfo.copies`) stay together, so a person is in one shard.

    **Guarantee.** The shard of a record depends on its place in the source, the number of records and the seed alone,
    so that changing one record changes one shard. Shards differ in size by at most one original.
    """

    def __init__(self, num_shards: int, copies: int, num_records: int | None, seeds: Seeds) -> None:
        self.num_shards, self.copies = num_shards, copies
        self.rule: dict[str, Any] = {"rule": "by turns"}
        self._shard_of_original: npt.NDArray[np.int32] | None = None
        if num_records is not None:
            originals = -(-num_records // copies)
            if not 1 <= num_shards <= originals:
                raise too_many(num_shards, originals)
            order = seeds.philox("data", "shards").permutation(originals)
            order *= num_shards
            order //= originals
            self._shard_of_original = order.astype(np.int32)
            self.rule = {"rule": "seeded permutation", "seed": seeds.root if seeds.public else None}

    def shards_of(self, first: int, count: int) -> Numbers:
        """The shards of so many records from a place in the source on."""
        originals = np.arange(first, first + count) // self.copies
        if self._shard_of_original is None:
            return originals % self.num_shards
        return self._shard_of_original[originals].astype(np.int64)


def too_many(num_shards: int, originals: int) -> DataError:
    return DataError(
        f"{originals} training examples do not fill {num_shards} shards.",
        why="Every shard holds at least one.",
        remedy=f"Use from 1 to {originals} shards." if originals else "Give training examples.",
    )


_DIGEST = np.dtype([("high", "<u8"), ("low", "<u8")])
_RECORDS_AT_ONCE = 8_000_000
"""Digests that are held at a time: with their positions and their order about 256 MB."""


def find_repeated_records(
    manifest: Manifest, *, advance: Callable[[int], object] = lambda records: None, at_once: int = _RECORDS_AT_ONCE
) -> Iterator[tuple[int, ...]]:
    """The positions of each record (inputs and label) that occurs more than once, in one shard or in several.

    **Guarantee.** Every repetition is found, bit for bit; that two different records are taken for one has a
    probability below 2^-60 for a billion of them. Memory does not grow with the data: they are read as often as it
    takes to hold the digests of one part at a time.
    """
    parts = passes(manifest, at_once)
    for part in range(parts):
        found = [_digests(manifest, shard, part, parts, advance) for shard in manifest.shards]
        digests = np.concatenate([digest for digest, _ in found])
        positions = np.concatenate([position for _, position in found])
        order = np.argsort(digests, order=("high", "low"), kind="stable")
        digests, positions = digests[order], positions[order]
        edges = np.flatnonzero(digests[1:] != digests[:-1]) + 1
        starts, stops = np.concatenate([[0], edges]), np.concatenate([edges, [len(digests)]])
        for start, stop in zip(*(ends[stops - starts > 1] for ends in (starts, stops)), strict=True):
            yield tuple(sorted(int(position) for position in positions[start:stop]))


def passes(manifest: Manifest, at_once: int = _RECORDS_AT_ONCE) -> int:
    """How often the data is read."""
    return -(-manifest.info.num_train // at_once)


def _digests(
    manifest: Manifest, shard: Shard, part: int, parts: int, advance: Callable[[int], object]
) -> tuple[Array, npt.NDArray[np.int64]]:
    """Those digests of a shard that belong to this part, and where they lie."""
    kept: list[Array] = [np.empty(0, _DIGEST)]
    places: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    for first, inputs, labels in pieces(manifest, shard):
        # -0.0 is no other value than 0.0, and adding 0 makes it that.
        values = inputs + np.zeros((), inputs.dtype)
        flat = values.reshape(len(values), -1).view(np.uint8)
        raw = b"".join(
            hashlib.blake2b(row.tobytes() + label.tobytes(), digest_size=16).digest()
            for row, label in zip(flat, labels, strict=True)
        )
        digests = np.frombuffer(raw, _DIGEST)
        own = np.flatnonzero(digests["high"] % np.uint64(parts) == part)
        kept.append(digests[own])
        places.append(first + own)
        advance(len(inputs))
    return np.concatenate(kept), np.concatenate(places)
