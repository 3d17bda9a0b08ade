"""What lies where in a run directory, and how to write a command that continues it. Imports no torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stobatch.errors import RunError
from stobatch.files import PRIVATE, Records, make_folder, read_json, remove_temporaries, write_json

COMMITMENT_KEY = "commitment_key"
"""In the private folder: the key of what a run says of private things without telling them."""
IMAGES = "images.safetensors"
"""In the private folder: a few test images, clean and attacked."""


@dataclass(frozen=True)
class Run:
    """One run's directory. Every verb reads what the verb before it wrote, and adds its own files."""

    path: Path

    @property
    def model_file(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def exists(self) -> bool:
        return (self.path / "config.json").exists()

    @property
    def is_trained(self) -> bool:
        return self.model_file.exists()

    def write(self, kind: str, content: dict[str, Any], *, private: bool = False) -> None:
        write_json(self._file(kind, private), kind, content, private=private)

    def read(self, kind: str, *, private: bool = False) -> dict[str, Any]:
        return read_json(self._file(kind, private), kind)

    def has(self, kind: str, *, private: bool = False) -> bool:
        return self._file(kind, private).exists()

    def _file(self, kind: str, private: bool) -> Path:
        return self.path / PRIVATE / f"{kind}.json" if private else self.path / f"{kind}.json"

    def command(self, verb: str) -> str:
        return f"stobatch {verb} {shlex.quote(str(self.path))} --resume"

    def records(
        self,
        verb: str,
        *,
        config_hash: str,
        expected_rows: int,
        private: bool = False,
        weights_sha256: str | None = None,
    ) -> Records:
        """The per-example table of a verb; another configuration of the verb gets another folder."""
        base = self.path / PRIVATE if private else self.path
        return Records(
            base / "records" / f"{verb}-{config_hash}",
            config_hash=config_hash,
            expected_rows=expected_rows,
            resume_command=self.command(verb.partition("-")[0]),
            private=private,
            weights_sha256=weights_sha256,
        )

    def require_new(self, training_hash: str, *, resume: bool) -> None:
        """Refuse to touch a directory that holds something else; say how to continue what can be continued."""
        for folder in self.path.parents:
            if folder.exists() and not folder.is_dir():
                raise RunError(f"cannot write {self.path}: {folder} is a file.", remedy="Choose another --out.")
        if not self.path.exists() or self._was_barely_started():
            return
        if not self.exists:
            raise RunError(f"{self.path} exists and is not a run.", remedy="Choose another --out.")
        found = self.read("config").get("training_hash")
        if found != training_hash:
            raise RunError(
                f"{self.path} holds configuration {found}, not {training_hash}.",
                remedy="Choose another --out, or resume with the settings it was started with.",
            )
        if not resume:
            raise RunError(
                f"{self.path} already holds this run.", remedy="Add --resume to continue it, or choose another --out."
            )

    def _was_barely_started(self) -> bool:
        """Whether a start was killed before its settings were there: it leaves hidden files, and its key at most."""
        own = {self.path / PRIVATE, self._file(COMMITMENT_KEY, private=True)}
        return self.path.is_dir() and all(p in own for p in self.path.rglob("*") if not p.name.startswith("."))

    @contextmanager
    def held(self) -> Iterator[None]:
        """One writer at a time: two trainings would count the same steps once, two verbs overwrite each other's news.

        A killed one holds nothing; what it was writing when it died is removed here.
        """
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            make_folder(self.path, private=False)
            directory = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise RunError(f"cannot use {self.path}: {error.strerror}.", remedy="Choose another --out.") from None
        try:
            self._lock(directory)
            remove_temporaries(self.path)
            yield
        finally:
            # What was refused before it wrote anything leaves nothing.
            with suppress(OSError):
                for folder in made:
                    folder.rmdir()
            os.close(directory)

    def _lock(self, directory: int) -> None:
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            return
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another command works on {self.path}.", remedy="Wait for it, stop it, or choose another --out."
            ) from None

    def require_trained(self) -> None:
        if not self.exists:
            raise RunError(
                f"{self.path} is not a run.", remedy="Train first: `stobatch train --recipe demo --out RUN`."
            )
        if not self.is_trained:
            raise RunError(
                f"{self.path} is not trained to the end.",
                remedy=f"Continue it: `stobatch train --out {self.path} --resume`.",
            )
