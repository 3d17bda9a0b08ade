"""The run directory: what lies where, who may write, and what vouches for it. Imports no torch.

`Run` has its files, its lock and the commands that continue it. The manifest lists the public files with their digests:
a verb builds on files that are as it says (`require_unchanged`) and enters its own as its last act (`seal`). A key in
the private folder makes commitments to private data, and marks private files as this very run's.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Self

from stobatch.errors import RunError
from stobatch.files import (
    PRIVATE,
    Records,
    make_folder,
    read_json,
    remove_temporaries,
    require_writable,
    sha256_of,
    write_json,
)

COMMITMENT_KEY = "commitment_key"
"""In the private folder: the key of a run's commitments to private data."""
START = "prior.safetensors"
"""Of a run that was started from a prior: its weights as they were taken."""
IMAGES = "images.safetensors"
"""In the private folder: a few test images, clean and attacked."""


class HashedSettings(Protocol):
    """Settings that name what is trained with them."""

    @property
    def training_hash(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


def _first_difference(started: Any, asked: Mapping[str, Any]) -> str:
    """Say where two configurations of one run differ first, in the order of their sections."""
    before, now = (dict(_flat(one)) for one in (started, asked))
    for key in (*now, *before):
        # Speed and measurement are no part of what was trained.
        if key.partition(".")[0] in ("machine", "certification", "evaluation", "audit"):
            continue
        if before.get(key) != now.get(key):
            return f"There {key} is {before.get(key)}, here it is {now.get(key)}."
    return ""


def _flat(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items() if isinstance(settings, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@dataclass(frozen=True)
class Run:
    """One run's directory. Every verb reads what the verb before it wrote, and adds its own files."""

    path: Path

    @classmethod
    def at(cls, path: object) -> Self:
        """Return the run in a directory that a caller names; raise where that is no path."""
        if not isinstance(path, str | os.PathLike):
            raise RunError(
                f"a {type(path).__name__} names no run.", remedy="Give the run's directory, as 'runs/demo' or a Path."
            )
        return cls(Path(path))

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
        place = shlex.quote(str(self.path))
        named = f"stobatch {verb} {f'--out {place}' if verb == 'train' else place}"
        return named if verb == "report" else f"{named} --resume"

    def records(
        self,
        verb: str,
        *,
        config_hash: str,
        expected_rows: int,
        private: bool = False,
        weights_sha256: str | None = None,
    ) -> Records:
        """Return the per-example table of a verb; another configuration of the verb gets another folder."""
        base = self.path / PRIVATE if private else self.path
        return Records(
            base / "records" / f"{verb}-{config_hash}",
            config_hash=config_hash,
            expected_rows=expected_rows,
            resume_command=self.command(verb.partition("-")[0]),
            private=private,
            weights_sha256=weights_sha256,
        )

    def require_new(self, config: HashedSettings, *, resume: bool) -> None:
        """Refuse to touch a directory that holds something else; say how to continue what can be continued."""
        require_writable(self.path)
        if not self.path.exists() or self._was_barely_started():
            return
        if not self.exists:
            raise RunError(f"{self.path} exists and is not a run.", remedy="Choose another --out.")
        started = self.read("config")
        if started.get("training_hash") != config.training_hash:
            raise RunError(
                f"{self.path} was started with other settings.",
                why=_first_difference(started.get("config"), config.to_dict())
                or f"It names configuration {started.get('training_hash')}, and these are {config.training_hash}.",
                remedy="Choose another --out, or resume with the settings it was started with.",
            )
        if not resume:
            raise RunError(
                f"{self.path} already holds this run.",
                remedy="Add --resume (resume=True in Python) to continue it, or choose another --out.",
            )

    def _was_barely_started(self) -> bool:
        """Return whether a start was killed before its settings were there: hidden files, a key and a prior at most."""
        own = {self.path / PRIVATE, self._file(COMMITMENT_KEY, private=True), self.path / START}
        return self.path.is_dir() and all(p in own for p in self.path.rglob("*") if not p.name.startswith("."))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock: two trainings would count the same steps once, two verbs overwrite each other's files.

        A killed one holds nothing; what it was writing when it died is removed here.
        """
        created = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
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
                for folder in created:
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


MANIFEST = "manifest"
PAGE = "report.html"
"""What `report` writes into a run: it says what the other files said when it was written."""
SIGNATURE_FILES = ("manifest.json.sig", "manifest.json.minisig")
UNLISTED = ("manifest.json", *SIGNATURE_FILES)
WRITES = {
    "train": ("config.json", "plan.json", "training.json", "model.safetensors", START, "federation.json"),
    "certify": ("certificates.json", "records/certify-"),
    "attack": ("attack.json", "records/attack-"),
    "evaluate": ("scores.json", "records/attack-", "records/probe-"),
    "audit": ("audit.json", "evidence/"),
    "report": (PAGE,),
}
"""How the names of the public files begin that each verb writes."""


def public_files(run: Run) -> Iterator[str]:
    """Yield names of all files of a run that others may see, relative to it; temporary and signing files left out."""
    for path in sorted(run.path.rglob("*")):
        name = path.relative_to(run.path)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not hidden and name.parts[0] != PRIVATE and name.as_posix() not in UNLISTED:
            yield name.as_posix()


def seal(run: Run, verb: str, environment: dict[str, Any]) -> bool:
    """Enter what a verb has written, as its last act. A signature of the manifest before is of other files: removed.

    So is the page of a verb that changed what it rests on: True says that it was there. It goes before the manifest is
    written, which differs from the verb's files until then: after a kill in between nothing vouches for an older page.

    A verb that wrote the same bytes again changes nothing. A run that an older version trained has no digests to build
    on, and stays without a manifest.
    """
    training = run.read("training") if run.has("training") else {}
    if run.is_trained and "weights_sha256" not in training:
        return False
    before = run.read(MANIFEST) if run.has(MANIFEST) else {"made": {}, "files": {}}
    # Files of other verbs stay listed, also those that somebody removed: `verify` misses them.
    files = {name: entry for name, entry in before["files"].items() if not name.startswith(WRITES[verb])}
    for name in public_files(run):
        if name.startswith(WRITES[verb]):
            files[name] = {"sha256": sha256_of(run.path / name), "size": (run.path / name).stat().st_size}
    files = dict(sorted(files.items()))
    if run.has(MANIFEST) and verb in before["made"] and files == before["files"]:
        return False
    made, page = before["made"], run.path / PAGE
    outdated = verb not in ("train", "report") and (page.exists() or PAGE in files)
    if outdated:
        page.unlink(missing_ok=True)
        files.pop(PAGE, None)
        made = {name: entry for name, entry in made.items() if name != "report"}
    content = {
        "training_hash": run.read("config").get("training_hash"),
        "weights_sha256": training.get("weights_sha256"),
        "data": training.get("data"),
        "made": {**made, verb: {"date": _date(verb), **source(), **environment}},
        "files": files,
    }
    for name in SIGNATURE_FILES:
        (run.path / name).unlink(missing_ok=True)
    run.write(MANIFEST, content)
    return outdated


def verb_since_page(run: Run) -> str | None:
    """Return a verb that changed the run after its page was written; None where the page is of the run as it is.

    This version takes the page away then, so that only older versions leave one.
    """
    if not (run.has(MANIFEST) and (run.path / PAGE).exists()):
        return None
    try:
        dates = {str(verb): str(entry["date"]) for verb, entry in run.read(MANIFEST)["made"].items()}
    except (KeyError, TypeError, AttributeError):
        raise RunError(f"{run.path / 'manifest.json'} has no list of verbs.", remedy="Restore it.") from None
    written = dates.get("report")
    if written is None:
        return None
    for verb, date in dates.items():
        # A date may name the day alone: then no more than days are compared.
        known = min(len(written), len(date))
        if verb not in ("train", "report") and date[:known] > written[:known]:
            return verb
    return None


def require_unchanged(run: Run, rewritten: tuple[str, ...]) -> None:
    """Raise where a verb would build on a file that is not as the manifest says; those it will replace are left out."""
    if not run.has(MANIFEST):
        return
    for name, how in differences(run):
        # Rows that a stopped verb left belong to no document yet: they are checked when it is resumed. And what is not
        # there cannot be built on, but for what an audit found, which counts as long as it is listed.
        stray = how == NOT_LISTED and (name.startswith("records/") or not is_ours(name))
        gone = not (run.path / name).exists() and not name.startswith(WRITES["audit"])
        if name not in rewritten and not stray and not gone:
            raise _changed(run, name, how)


def require_as_listed(run: Run, name: str) -> None:
    """Raise where a file that the manifest lists was changed or removed."""
    listed = entries(run).get(name) if run.has(MANIFEST) else None
    if listed is not None and (how := _difference(run.path / name, listed)):
        raise _changed(run, name, how)


def _changed(run: Run, name: str, how: str) -> RunError:
    verb = next((verb for verb, names in WRITES.items() if name.startswith(names)), "train")
    again = "train again with another --out" if verb == "train" else f"remove it and run `{run.command(verb)}`"
    return RunError(
        f"{run.path / name} {how}.",
        why=f"It was changed or removed, or `stobatch {verb}` was stopped before it had ended.",
        remedy=f"Restore it, or {again}.",
    )


NOT_LISTED = "is not in the manifest"


def differences(run: Run) -> Iterator[tuple[str, str]]:
    """Yield each public file that is not as the manifest says, with how it differs."""
    listed = entries(run)
    for name in sorted({*public_files(run), *listed}):
        how = _difference(run.path / name, listed[name]) if name in listed else NOT_LISTED
        if how:
            yield name, how


def _difference(path: Path, listed: dict[str, Any]) -> str:
    """Return how a file differs from its entry; nothing where it does not."""
    if not path.is_file():
        return "is in the manifest and not there"
    if path.stat().st_size != listed["size"]:
        return f"has {path.stat().st_size} bytes, the manifest says {listed['size']}"
    return "" if sha256_of(path) == listed["sha256"] else "has another SHA-256 than the manifest says"


def entries(run: Run) -> dict[str, dict[str, Any]]:
    """Return the manifest's list of files; raises where it is not one."""
    files = run.read(MANIFEST).get("files")
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and isinstance(entry.get("size"), int)
        for entry in files.values()
    ):
        raise RunError(f"{run.path / 'manifest.json'} has no list of files.", remedy="Restore it.")
    return files


def is_ours(name: str) -> bool:
    """Return whether a verb writes files of this name."""
    return any(name.startswith(names) for names in WRITES.values())


def has_key(run: Run) -> bool:
    """Return whether the key of the run's commitments is here: it stays with the owner."""
    return run.has(COMMITMENT_KEY, private=True)


def make_key(run: Run) -> None:
    """Draw the key of the run's commitments; without effect where there is one."""
    if not has_key(run):
        run.write(COMMITMENT_KEY, {"key": secrets.token_hex(32)}, private=True)


def commit(run: Run, *content: bytes | str) -> str | None:
    """Return HMAC-SHA-256 of something private under the run's own key; None where the key is not there.

    It is also what marks private files as this run's: no other run has the key.
    """
    if not has_key(run):
        return None
    mac = hmac.new(bytes.fromhex(run.read(COMMITMENT_KEY, private=True)["key"]), digestmod=hashlib.sha256)
    for part in content:
        plain = part.encode() if isinstance(part, str) else part
        mac.update(len(plain).to_bytes(8, "little") + plain)
    return mac.hexdigest()


def mark(run: Run) -> str:
    """Return a short name for this very run, for private files that another run of the same settings must not use."""
    return (commit(run, "mark") or "")[:16]


def _date(verb: str) -> str:
    """Return when a verb ended, of a training the day: its second would tell how long a search or a training took."""
    return datetime.now(UTC).strftime("%Y-%m-%d" if verb == "train" else "%Y-%m-%dT%H:%M:%SZ")


@cache
def source() -> dict[str, str | None]:
    """Return the program's version, and its commit where it runs from a checkout of its own repository."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        number: str | None = version("stobatch")
    except PackageNotFoundError:
        number = None
    return {"stobatch": number, "commit": _commit(Path(__file__).resolve().parent)}


def _commit(package: Path) -> str | None:
    """Return the commit; None where git is missing, or for an installed copy, outside of a repository of its own."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        changed = git("status", "--porcelain", "--untracked-files=no", ".")
        return git("rev-parse", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
