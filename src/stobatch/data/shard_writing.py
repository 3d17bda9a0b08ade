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
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stobatch.data.dataset import Dataset, DatasetInfo, Stream, check_examples
from stobatch.data.overlap import find_copies
from stobatch.data.persons import as_dense
from stobatch.data.pixels import scale
from stobatch.data.shards import (
    ENCODINGS,
    FILE,
    LABELS,
    TEST_TITLE,
    Manifest,
    Shard,
    ShardedExamples,
    ShardOwners,
    StoredFile,
    read_test,
    stem_of,
)
from stobatch.errors import DataError, RunError
from stobatch.seeds import Seeds

_OURS = re.compile(r"(train-\d{5,}|test)\.(inputs|labels|persons)\.npy(\.wide)?|\.manifest\.json\..*")
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

    **Guarantee.** Memory holds one chunk, a few bytes for each record, and in the end the test examples, among which
    copies of training examples are counted; the size of the training data does not matter. The same source, seed and
    number of shards give the same files and the same digest, however the source is cut into chunks. A folder has its
    manifest when every file is written, on disk and summed, and not before: a kill leaves a folder that is refused and
    can be written again, an error leaves nothing. Files have mode 0600 and the folder 0700: they are private data, and
    so are their checksums, which confirm a guess.
    """
    stream = source if isinstance(source, Stream) else Stream.of(source)
    if stream.groups is None:
        shard_of = deal(stream.info.num_train, stream.info.copies, num_shards, seeds)
    else:
        shard_of = deal_persons(stream.groups, num_shards, seeds)
    dealt = {"rule": "seeded permutation", "seed": seeds.root if seeds.public else None}
    with _new_folder(out):
        writer = ShardWriter(out, stream.info, shard_of, num_shards, stream.groups)
        for inputs, labels in stream.train:
            writer.add(inputs, labels)
            advance(len(labels))
        for inputs, labels in stream.test:
            writer.add_test(inputs, labels)
            advance(len(labels))
        return writer.finish(dealt, advance)


def deal(num_records: int, copies: int, num_shards: int, seeds: Seeds) -> npt.NDArray[np.int32]:
    """Return the shard of each record; within a shard records keep the order in which they came.

    **Guarantee.** It depends on a record's place in the source, the number of records and the seed alone, so changing
    one record changes one shard. Copies of one original (`DatasetInfo.copies`) stay together, so a person is in one
    shard. Shards differ in size by at most one original.
    """
    originals = -(-num_records // copies)
    if num_shards < 1:
        raise DataError(f"{num_shards} shards hold no examples.", remedy="Use one shard or more.")
    if num_shards > originals:
        raise DataError(
            f"{originals} training examples do not fill {num_shards} shards.",
            why="Every shard holds at least one.",
            remedy=f"Use from 1 to {originals} shards." if originals else "Give training examples.",
        )
    order = seeds.philox("data", "shards").permutation(originals)
    order *= num_shards
    order //= originals
    return np.repeat(order.astype(np.int32), copies)[:num_records]


def deal_persons(groups: Tensor, num_shards: int, seeds: Seeds) -> npt.NDArray[np.int32]:
    """Return the shard of each record: all records of a person have the same.

    **Guarantee.** As `deal`, with persons for records: shards differ in their numbers of persons by at most one.
    """
    of_person = deal(int(groups.max()) + 1 if len(groups) else 0, 1, num_shards, seeds)
    return np.take(of_person, groups.numpy())


def require_room(out: Path) -> None:
    """Raise unless a folder is new, empty, or left behind by a writer that was killed."""
    with _writing_errors(out):
        names = {path.name for path in out.iterdir()} if out.exists() else set()
    if FILE in names:
        raise DataError(f"{out} already holds shards.", remedy="Remove it or choose another folder.")
    foreign = sorted(name for name in names if not _OURS.fullmatch(name))
    if foreign:
        raise DataError(f"{out} holds other files ('{foreign[0]}').", remedy="Choose a folder that is new or empty.")


@contextmanager
def _new_folder(out: Path) -> Iterator[None]:
    """Make an empty, private folder; leave nothing of it unless it has a manifest in the end."""
    require_room(out)
    is_new = not out.exists()
    try:
        with _writing_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            out.mkdir(mode=0o700, exist_ok=True)
            _clear(out)
            out.chmod(0o700)
        yield
    finally:
        if not (out / FILE).exists():
            with suppress(OSError):
                _clear(out)
                if is_new:
                    out.rmdir()


def _clear(out: Path) -> None:
    for path in out.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()


class ShardWriter:
    """Appends examples to the files of a folder, and makes it one that `ShardedExamples` reads.

    Inputs are stored as bytes as long as `pixels.scale` makes the very same inputs of them. The first input that bytes
    cannot express turns everything into float32, which costs one copy of what was written before.
    """

    def __init__(
        self,
        out: Path,
        info: DatasetInfo,
        shard_of: npt.NDArray[np.int32],
        num_shards: int,
        groups: Tensor | None = None,
    ) -> None:
        self.out, self.info, self.shard_of, self.groups = out, info, shard_of, groups
        self._encoding = "uint8"
        self._counts = dict.fromkeys([*(stem_of(number) for number in range(num_shards)), _TEST], 0)
        with _writing_errors(out):
            for stem in self._counts:
                self._append(stem, np.empty((0, *info.input_shape), ENCODINGS["uint8"]), np.empty(0, LABELS))

    @property
    def _num_train(self) -> int:
        return sum(count for stem, count in self._counts.items() if stem != _TEST)

    def add(self, inputs: Tensor, labels: Tensor) -> None:
        """Append the next training examples, each to its shard."""
        first = self._num_train
        if first + len(labels) > self.info.num_train:
            raise self._count_error("training", first + len(labels), self.info.num_train)
        stored, classes = self._encode(inputs, labels, "training", first)
        shards = self.shard_of[first : first + len(labels)]
        with _writing_errors(self.out):
            for number in np.unique(shards):
                own = np.flatnonzero(shards == number)
                self._append(stem_of(int(number)), stored[own], classes[own])

    def add_test(self, inputs: Tensor, labels: Tensor) -> None:
        """Append the next test examples."""
        stored, classes = self._encode(inputs, labels, "test", self._counts[_TEST])
        with _writing_errors(self.out):
            self._append(_TEST, stored, classes)

    def finish(self, dealt: dict[str, Any], advance: Advance = lambda records: None) -> Manifest:
        """Make the files whole, sum them up and write the manifest."""
        num_train, num_test = self._num_train, self._counts[_TEST]
        if num_train != self.info.num_train:
            raise self._count_error("training", num_train, self.info.num_train)
        if num_test != self.info.num_test:
            raise self._count_error("test", num_test, self.info.num_test)
        if not num_test:
            raise DataError(f"{self.info.name} has no test examples.", remedy="Give at least one.")
        with _writing_errors(self.out):
            shards: list[Shard] = []
            for number, (stem, count) in enumerate(self._counts.items()):
                first = sum(shard.count for shard in shards) if stem != _TEST else 0
                title = f"shard {number}" if stem != _TEST else TEST_TITLE
                inputs = _seal(self._path(stem, "inputs"), ENCODINGS[self._encoding], (count, *self.info.input_shape))
                labels = _seal(self._path(stem, "labels"), LABELS, (count,))
                owners = None if stem == _TEST or self.groups is None else self._write_owners(number, stem, self.groups)
                shards.append(Shard(title, first, count, inputs, labels, owners))
                advance(count)
        manifest = Manifest(self.out, self.info, self._encoding, dealt, tuple(shards[:-1]), shards[-1])
        copies = find_copies(ShardedExamples(manifest), read_test(manifest, num_test))
        manifest = replace(manifest, test_copies=len(copies))
        with _writing_errors(self.out):
            manifest.write()
        return manifest

    def _write_owners(self, number: int, stem: str, groups: Tensor) -> ShardOwners:
        """Write whose the records of a shard are, numbered from 0 in it."""
        codes = as_dense(groups[torch.from_numpy(self.shard_of == number)])
        self._write(stem, "persons", codes.numpy(), ())
        counts = torch.bincount(codes)
        stored = _seal(self._path(stem, "persons"), LABELS, tuple(codes.shape))
        return ShardOwners(stored, len(counts), int(counts.max()))

    def _count_error(self, part: str, actual: int, promised: int) -> DataError:
        return DataError(
            f"{self.info.name} was to have {promised} {part} examples and has {actual}.",
            why="They are dealt to the shards by their number.",
            remedy="Give the right number.",
        )

    def _encode(self, inputs: Tensor, labels: Tensor, part: str, first: int) -> tuple[Any, Any]:
        """Return inputs and labels as they are stored, checked."""
        inputs, labels = inputs.detach().cpu(), labels.detach().cpu()

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
                return as_bytes.numpy(), labels.numpy()
            with _writing_errors(self.out):
                self._widen()
        return inputs.numpy(), labels.numpy()

    def _path(self, stem: str, part: str) -> Path:
        return self.out / f"{stem}.{part}.npy"

    def _append(self, stem: str, inputs: Any, labels: Any) -> None:
        """Append to the two files of a shard, opened for this alone: a thousand shards need no thousand handles."""
        self._write(stem, "inputs", inputs, self.info.input_shape)
        self._write(stem, "labels", labels, ())
        self._counts[stem] += len(labels)

    def _write(self, stem: str, part: str, rows: Any, shape: tuple[int, ...]) -> None:
        handle = os.open(self._path(stem, part), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(handle, "ab") as out:
            if not out.tell():
                out.write(_header(rows.dtype.str, (0, *shape)))
            out.write(np.ascontiguousarray(rows).data)

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


def to_bytes(inputs: Tensor) -> Tensor | None:
    """Return the bytes of which `pixels.scale` makes exactly these inputs, or None.

    >>> to_bytes(torch.tensor([-1.0, 1.0])), to_bytes(torch.tensor([0.0]))
    (tensor([  0, 255], dtype=torch.uint8), None)
    """
    nearest = inputs.add(1).mul_(127.5).round_().to(torch.uint8)
    return nearest if torch.equal(scale(nearest), inputs) else None


def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return a NumPy header, which has room for a longer first dimension, so that it can be rewritten at the end."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
    return header.getvalue()


def _seal(path: Path, dtype: str, shape: tuple[int, ...]) -> StoredFile:
    """Put the true length into a file's header, flush it to the disk, and sum it up as it now is."""
    with path.open("rb+") as file:
        file.write(_header(dtype, shape))
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return StoredFile(path.name, path.stat().st_size, digest)


@contextmanager
def _writing_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RunError) as error:
        why = error.strerror if isinstance(error, OSError) else error.what
        raise DataError(
            f"cannot write {out}: {why}.".replace("..", "."),
            remedy="Free some space or choose another folder, then write it again.",
        ) from error
