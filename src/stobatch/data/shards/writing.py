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
import torch
from torch import Tensor

from stobatch.data.copies import find_copies
from stobatch.data.dataset import Dataset, DatasetInfo, check_examples
from stobatch.data.pixels import scale
from stobatch.data.shards.dealing import Dealer, too_many
from stobatch.data.shards.manifest import ENCODINGS, FILE, LABELS, TEST_TITLE, Manifest, Shard, StoredFile, stem_of
from stobatch.data.shards.reading import ShardedExamples, read_test
from stobatch.data.streams import Stream
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
