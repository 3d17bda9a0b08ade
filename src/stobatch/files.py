"""Run directories on disk: every file appears whole or not at all, names its schema, and says how long it must be.

A verb reads the previous stage's files and adds its own. Private things (noise, seeds, optimiser state) live in
`private/`, readable by the owner only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
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
    """A descriptor of a file that nobody else can read from its first moment on, and none of an older one either."""
    descriptor = os.open(path, flags | os.O_CREAT, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


def remove_temporaries(folder: Path) -> None:
    """Remove what writers that were killed left in a folder and in `private`, `records` and `evidence` below it.

    Only for whoever holds the folder's lock: a writer at work would lose its file. Files of other users and files with
    other names are not touched.
    """
    below = [path for name in (PRIVATE, "records", "evidence") for path in (folder / name).rglob(".*.tmp")]
    for path in (*folder.glob(".*.tmp"), *below):
        with suppress(FileNotFoundError, PermissionError):
            found = path.lstat()
            if _TEMPORARY.fullmatch(path.name) and stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid():
                path.unlink()


@contextmanager
def _replacing(path: Path, *, private: bool) -> Iterator[Path]:
    """A temporary path that takes the target's place, durably, once the block has ended without an error."""
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
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}.",
            why="What was there before is unchanged.",
            remedy="Free some space or choose another --out, then run the same command with --resume.",
        ) from error


def write_atomically(path: Path, write: Callable[[IO[bytes]], object], *, private: bool = False) -> None:
    """Write a file so that a kill at any moment leaves the old file or the new one, never a part."""
    with _replacing(path, private=private) as temporary, temporary.open("wb") as out:
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
    """A safetensors file with string metadata; no pickle, so loading one runs no code."""
    from safetensors.torch import save

    blob = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, dict(metadata))
    write_atomically(path, lambda out: out.write(blob), private=private)


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


CONTENT = "content_sha256"


def content_sha256(table: Any) -> str:
    """SHA-256 over the names and values of a table. Checksums of pages leave out the footer, where the names are."""
    return hashlib.sha256(json.dumps(table.to_pydict(), default=repr).encode()).hexdigest()


class Records:
    """Per-example rows in Parquet, written part by part so that a killed verb resumes where it stopped.

    The table is complete when its parts hold exactly the expected number of rows; a short one is refused.
    """

    def __init__(
        self, folder: Path, *, config_hash: str, expected_rows: int, resume_command: str, private: bool = False
    ) -> None:
        self.folder, self.config_hash, self.private = folder, config_hash, private
        self.expected_rows, self.resume_command = expected_rows, resume_command

    def _part(self, start: int) -> Path:
        return self.folder / f"rows-{start:08d}.parquet"

    def _identity(self) -> dict[str, str]:
        return {
            "schema": "stobatch.records",
            "version": str(SCHEMA_VERSION),
            "config_hash": self.config_hash,
            "expected_rows": str(self.expected_rows),
        }

    def has(self, start: int) -> bool:
        """Whether the part that begins at this row is readable and was written by this very configuration."""
        from pyarrow import parquet

        try:
            table = parquet.ParquetFile(self._part(start)).read()
            found = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
            # Tables of older versions have no digest; a damaged key is a key that nothing writes.
            whole = found.pop(CONTENT, None) in (None, content_sha256(table))
        except Exception:  # a damaged part makes the decoder raise nearly anything
            return False
        return whole and found == self._identity()

    def write(self, start: int, columns: Mapping[str, Any]) -> None:
        import pyarrow as arrow
        from pyarrow import parquet

        table = arrow.table(dict(columns))
        table = table.replace_schema_metadata({**self._identity(), CONTENT: content_sha256(table)})
        with _replacing(self._part(start), private=self.private) as temporary:
            parquet.write_table(table, temporary)

    def read(self) -> dict[str, list[Any]]:
        """All columns, in row order, or an error that names the command which completes them."""
        import pyarrow as arrow
        from pyarrow import parquet

        parts = sorted(p for p in self.folder.glob("rows-*.parquet") if self.has(int(p.stem.removeprefix("rows-"))))
        found = [parquet.ParquetFile(part).read().replace_schema_metadata() for part in parts]
        table = arrow.concat_tables(found) if parts else None
        rows = table.num_rows if table is not None else 0
        if table is None or rows != self.expected_rows:
            raise RunError(
                f"{self.folder} has {rows} of {self.expected_rows} rows for configuration {self.config_hash}.",
                remedy=f"Complete it with `{self.resume_command}`.",
            )
        columns: dict[str, list[Any]] = table.to_pydict()
        return columns
