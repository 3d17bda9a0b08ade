"""Run directories on disk: every file appears whole or not at all, names its schema, and says how long it must be.

A verb reads the previous stage's files and adds its own. Private files (noise, seeds, optimiser state) live in
`private/`, readable by the owner only.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from stobatch import strict_json
from stobatch.errors import RunError

SCHEMA_VERSION = 1
PRIVATE = "private"


def make_folder(folder: Path, *, private: bool) -> None:
    """Make a folder as the umask says, or for the owner alone.

    `mkdir` gives its mode to the last folder alone, so those inside of `private/` are made one by one.
    """
    if private and folder.name != PRIVATE and not folder.parent.exists():
        make_folder(folder.parent, private=True)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)


def open_private(path: Path, flags: int) -> int:
    """Return a descriptor of a file that no other user can read, not even where an older one was readable."""
    descriptor = os.open(path, flags | os.O_CREAT, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


def remove_temporaries(folder: Path) -> None:
    """Remove what writers that were killed left in a folder and in `private`, `records` and `evidence` below it.

    Only for the holder of the folder's lock: a writer at work would lose its file. Files of other users and files with
    other names are not touched.
    """
    below = [path for name in (PRIVATE, "records", "evidence") for path in (folder / name).rglob(".*.tmp")]
    for path in (*folder.glob(".*.tmp"), *below):
        with suppress(FileNotFoundError, PermissionError):
            status = path.lstat()
            if _TEMPORARY.fullmatch(path.name) and stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                path.unlink()


@contextmanager
def _replacement(path: Path, *, private: bool) -> Iterator[Path]:
    """Yield a temporary path that takes the target's place, durably, once the block has ended without an error."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        make_folder(path.parent, private=private)
        try:
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666))
            yield temporary
            with temporary.open("rb+") as written:
                os.fsync(written.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _flush_folder(path.parent)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}.",
            why="What was there before is unchanged.",
            remedy=f"{_mend(error)}, then run the same command again, with --resume where it has that.",
        ) from error


def require_writable(path: Path) -> None:
    """Raise where nothing can be written at a path, before hours of work for it.

    A folder is made there and removed again: permissions alone do not say whether it can be.
    """
    for folder in path.parents:
        if folder.exists() and not folder.is_dir():
            raise RunError(f"cannot write {path}: {folder} is a file.", remedy="Choose another --out.")
    place = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    try:
        with TemporaryDirectory(prefix=".stobatch-", dir=place):
            pass
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror}.", remedy=f"Choose another --out, or mend {place}."
        ) from None


def _mend(error: OSError) -> str:
    """Return what a person can do about a file that cannot be written."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Ask for permission to write there, or choose another --out"
    return "Free some space or choose another --out"


def _flush_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a new folder so that a kill at any moment leaves it whole or not at all under its name.

    What a killed writer leaves is a hidden folder next to it, `.NAME.….tmp`.
    """
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    try:
        make_folder(temporary, private=False)
        for name, content in files.items():
            with (temporary / name).open("xb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
        _flush_folder(temporary)
        temporary.rename(folder)
        _flush_folder(folder.parent)
    except OSError as error:
        raise RunError(
            f"cannot write {folder}: {error.strerror or error}.",
            why="Nothing is left of it.",
            remedy=f"{_mend(error)}.",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_atomically(path: Path, write: Callable[[IO[bytes]], object], *, private: bool = False) -> None:
    """Write a file so that a kill at any moment leaves the old file or the new one, never a part."""
    with _replacement(path, private=private) as temporary, temporary.open("wb") as out:
        write(out)
        out.flush()


def write_json(path: Path, kind: str, content: Mapping[str, Any], *, private: bool = False) -> None:
    document = {"schema": f"stobatch.{kind}", "version": SCHEMA_VERSION, **content}
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda out: out.write(text.encode()), private=private)


def read_json(path: Path, kind: str) -> dict[str, Any]:
    """Read back what `write_json` wrote, refusing another schema."""
    try:
        document = strict_json.read(path.read_bytes())
    except FileNotFoundError:
        raise RunError(f"{path} is not there.", remedy=f"Point at a run directory that has {path.name}.") from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}.", remedy="Look at its kind and permissions.") from None
    except ValueError:
        raise RunError(
            f"{path} is not valid JSON.", remedy="It was edited or damaged: restore it or run again."
        ) from None
    if not isinstance(document, dict) or document.get("schema") != f"stobatch.{kind}":
        raise RunError(f"{path} is not a stobatch {kind}.", remedy="Point at the file that the program wrote.")
    if document.get("version") != SCHEMA_VERSION:
        raise RunError(
            f"{path} has schema version {document.get('version')}; this program reads {SCHEMA_VERSION}.",
            remedy="Use the version of stobatch that wrote it.",
        )
    return {key: value for key, value in document.items() if key not in ("schema", "version")}


@contextmanager
def as_written(path: Path) -> Iterator[None]:
    """Turn a missing key, or a value of another type or shape, in what was read from a file into one sentence."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise RunError(
            f"{path} does not hold what stobatch writes.",
            why=f"It was edited or damaged, or another version wrote it ({type(error).__name__}).",
            remedy="Restore it, or run the verb that writes it again.",
        ) from error


def write_tensors(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str], *, private: bool) -> None:
    """Write a safetensors file with string metadata; no pickle, so loading one runs no code."""
    blob = serialise_tensors(tensors, metadata)
    write_atomically(path, lambda out: out.write(blob), private=private)


def serialise_tensors(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file, the same for the same content: the library orders metadata at random."""
    from safetensors.torch import save

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # Of no tensors and empty metadata the library makes a header that it cannot read.
    blob: bytes = save(plain, dict(metadata) or None)
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    if "__metadata__" in header:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    # The format pads its header with spaces to whole words of 8 bytes, so its length stays what it was.
    return (
        blob[:8] + json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size) + blob[8 + size :]
    )


def tensors_sha256(blob: bytes) -> str:
    """Return the SHA-256 of the tensors of a safetensors file, ordered by name, without its metadata and layout."""
    size = int.from_bytes(blob[:8], "little")
    header, body = json.loads(blob[8 : 8 + size]), memoryview(blob)[8 + size :]
    digest = hashlib.sha256()
    for name in sorted(header.keys() - {"__metadata__"}):
        begin, end = header[name]["data_offsets"]
        # Names, types and shapes are written as JSON, so that no two lists of tensors give the same bytes.
        digest.update(json.dumps([name, header[name]["dtype"], header[name]["shape"], end - begin]).encode())
        digest.update(body[begin:end])
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise RunError(f"{path} is not there.", remedy="Train first: `stobatch train --out RUN`.") from None
    except Exception as error:  # a damaged header makes the decoder raise nearly anything
        reason = " ".join(str(error).split())
        raise RunError(f"{path} is damaged ({reason}).", remedy="Restore it or train again into a new --out.") from None


Limits = Callable[[str], tuple[float, float] | None]
"""What the values of a column may be, from and to; None where nothing is known of the column."""
CONTENT = "content_sha256"


def content_sha256(table: Any) -> str:
    """Return the SHA-256 of a table's names and values. Page checksums leave out the footer, where the names are."""
    return hashlib.sha256(json.dumps(table.to_pydict(), default=repr).encode()).hexdigest()


Columns = dict[str, list[Any]]
"""Rows of a table, by column."""


class Records:
    """Per-example rows in Parquet, written part by part so that a killed verb resumes where it stopped.

    The table is complete when its parts hold exactly the rows 0 to expected_rows - 1, each once and in order. Pages
    have checksums; a part that is damaged, of another table or of other weights is refused, never left out.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config_hash: str,
        expected_rows: int,
        resume_command: str,
        private: bool = False,
        weights_sha256: str | None = None,
    ) -> None:
        self.folder, self.config_hash, self.private = folder, config_hash, private
        self.expected_rows, self.resume_command = expected_rows, resume_command
        self.weights_sha256 = weights_sha256

    def _part(self, start: int) -> Path:
        return self.folder / f"rows-{start:08d}.parquet"

    def _identity(self) -> dict[str, str]:
        weights = {"weights_sha256": self.weights_sha256} if self.weights_sha256 else {}
        return {
            "schema": "stobatch.records",
            "version": str(SCHEMA_VERSION),
            "config_hash": self.config_hash,
            "expected_rows": str(self.expected_rows),
            **weights,
        }

    def has(self, start: int) -> bool:
        """Return whether the part that begins at this row is whole and was written for this very table."""
        try:
            self._read_part(self._part(start), start)
        except (OSError, RunError):
            return False
        return True

    def write(self, start: int, columns: Mapping[str, Any]) -> None:
        import pyarrow as arrow
        from pyarrow import parquet

        table = arrow.table(dict(columns))
        table = table.replace_schema_metadata({**self._identity(), CONTENT: content_sha256(table)})
        with _replacement(self._part(start), private=self.private) as temporary:
            parquet.write_table(table, temporary, write_page_checksum=True)

    def read(self, limits: Limits = lambda column: None) -> dict[str, list[Any]]:
        """Return all columns, in row order, or an error that names the file and the command which mends it."""
        import pyarrow as arrow

        tables: list[Any] = []
        rows = 0
        for part in self.parts():
            table = self._read_part(part, rows, limits)
            if tables and table.schema != tables[0].schema:
                raise self._damaged_error(part, "has other columns than the parts before it")
            tables.append(table)
            rows += table.num_rows
        if not tables or rows != self.expected_rows:
            raise RunError(
                f"{self.folder} has {rows} of {self.expected_rows} rows for configuration {self.config_hash}.",
                remedy=f"Complete it with `{self.resume_command}`.",
            )
        columns: dict[str, list[Any]] = arrow.concat_tables(tables).to_pydict()
        return columns

    def parts(self) -> list[Path]:
        """Return the files of the table in the order of their rows; a file that is no part is refused."""
        there = sorted(path for path in self.folder.glob("*") if not path.name.startswith("."))
        for path in there:
            if not re.fullmatch(r"rows-\d{8}\.parquet", path.name):
                raise self._damaged_error(path, "is not a part of the table")
        return there

    def _read_part(self, path: Path, start: int, limits: Limits = lambda column: None) -> Any:
        """Return one part as a table: its pages match their checksums, its rows are numbered from `start` on."""
        from pyarrow import parquet

        try:
            # `read_table` would import the machinery for folders of files, which takes longer than reading one.
            with parquet.ParquetFile(path, page_checksum_verification=True) as file:
                table = file.read()
            metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
            columns = table.to_pydict()
        except FileNotFoundError:
            raise
        except Exception as error:  # a damaged part makes the decoder raise nearly anything
            reason = " ".join(str(error).split())[:200]
            raise self._damaged_error(path, f"is damaged ({reason})") from None
        for key, value in self._identity().items():
            if metadata.get(key) != value:
                raise self._damaged_error(path, f"is of another table: its {key} is {metadata.get(key)}, not {value}")
        # Tables of older versions have no digest; a damaged key is a key that nothing writes.
        if metadata.keys() - {CONTENT} != self._identity().keys():
            raise self._damaged_error(path, "says something of itself that no table says")
        if metadata.get(CONTENT) not in (None, content_sha256(table)):
            raise self._damaged_error(path, "does not hold the values that were written")
        if path != self._part(start) or columns.get("index") != list(range(start, start + table.num_rows)):
            raise self._damaged_error(path, f"does not hold the rows from {start} on, each once and in order")
        for name, values in columns.items():
            if wrong := _outside(values, limits(name)):
                raise self._damaged_error(path, f"has a row whose {name} is {wrong}")
        return table.replace_schema_metadata()

    def _damaged_error(self, path: Path, reason: str) -> RunError:
        return RunError(f"{path} {reason}.", remedy=f"Remove it, and make its rows again with `{self.resume_command}`.")


def _outside(values: list[Any], limits: tuple[float, float] | None) -> str:
    """Return the first value that is not a finite number within the limits, as text; nothing where all are."""
    if limits is None:
        return ""
    low, high = limits
    for value in values:
        if not isinstance(value, (int, float)) or not isfinite(value) or not low <= value <= high:
            return repr(value)
    return ""
