"""The manifest of a run: what every public file was when the verb that wrote it had ended.

`manifest.json` lists SHA-256 and size of each public file, and for each verb when, by which version and where it ran.
A verb enters the files that it wrote itself, last of all and atomically; entries of other files stay as they were, so
that a verb never vouches for a file that changed since. A verb that was killed before its entry leaves a file that
differs from the manifest: `verify` names it, and the same verb, run again, mends it.

Private things are not listed. Digests of private data would confirm a guess, so those are *commitments*: HMAC-SHA-256
with a key that stays in `private/`. The owner can open one; nobody else can test a guess against it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from stobatch.errors import RunError
from stobatch.files import PRIVATE, sha256_of
from stobatch.runs import COMMITMENT_KEY, Run

MANIFEST = "manifest"
SIGNATURE_FILES = ("manifest.json.sig", "manifest.json.minisig")
UNLISTED = ("manifest.json", *SIGNATURE_FILES)
WRITES = {
    "train": ("config.json", "plan.json", "training.json", "model.safetensors", "federation.json"),
    "certify": ("certificates.json", "records/certify-"),
    "attack": ("attack.json", "records/attack-"),
    "evaluate": ("scores.json", "records/attack-", "records/probe-"),
    "audit": ("audit.json", "evidence/"),
    "report": ("report.html",),
}
"""How the names of the public files begin that each verb writes."""


def public_files(run: Run) -> Iterator[str]:
    """Names of all files of a run that others may see, relative to it; temporary and signing files left out."""
    for path in sorted(run.path.rglob("*")):
        name = path.relative_to(run.path)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not hidden and name.parts[0] != PRIVATE and name.as_posix() not in UNLISTED:
            yield name.as_posix()


def seal(run: Run, verb: str, environment: dict[str, Any]) -> None:
    """Enter what a verb has written, as its last act. A signature of the manifest before is of other files: removed.

    A verb that wrote the same bytes again changes nothing. A run that an older version trained has no digests to build
    on, and stays without a manifest.
    """
    training = run.read("training") if run.has("training") else {}
    if run.is_trained and "weights_sha256" not in training:
        return
    before = run.read(MANIFEST) if run.has(MANIFEST) else {"made": {}, "files": {}}
    files = {}
    for name in public_files(run):
        if name.startswith(WRITES[verb]):
            files[name] = {"sha256": sha256_of(run.path / name), "size": (run.path / name).stat().st_size}
        elif name in before["files"]:
            files[name] = before["files"][name]
    if run.has(MANIFEST) and verb in before["made"] and files == before["files"]:
        return
    content = {
        "training_hash": run.read("config").get("training_hash"),
        "weights_sha256": training.get("weights_sha256"),
        "data": training.get("data"),
        "made": {**before["made"], verb: {"date": _now(), **source(), **environment}},
        "files": files,
    }
    for name in SIGNATURE_FILES:
        (run.path / name).unlink(missing_ok=True)
    run.write(MANIFEST, content)


def require_unchanged(run: Run, rewritten: tuple[str, ...]) -> None:
    """Raise where a verb would build on a file that is not as the manifest says; those it writes anew are left out."""
    if not run.has(MANIFEST):
        return
    for name, how in differences(run):
        # Rows that a stopped verb left are nobody's yet: they are checked by themselves when it is resumed. And what is
        # not there cannot be built on.
        stray = how == NOT_LISTED and (name.startswith("records/") or not is_ours(name))
        if name not in rewritten and not stray and (run.path / name).exists():
            verb = next((verb for verb, names in WRITES.items() if name.startswith(names)), "train")
            raise RunError(
                f"{run.path / name} {how}.",
                why=f"It was changed, or `stobatch {verb}` was stopped before it had ended.",
                remedy=f"Restore it, or remove it and run `{run.command(verb)}`.",
            )


NOT_LISTED = "is not in the manifest"


def differences(run: Run) -> Iterator[tuple[str, str]]:
    """Each public file that is not as the manifest says, with how it differs."""
    listed, there = entries(run), set(public_files(run))
    for name in sorted(there | listed.keys()):
        path = run.path / name
        if name not in there:
            yield name, "is in the manifest and not there"
        elif name not in listed:
            yield name, NOT_LISTED
        elif path.stat().st_size != listed[name]["size"]:
            yield name, f"has {path.stat().st_size} bytes, the manifest says {listed[name]['size']}"
        elif sha256_of(path) != listed[name]["sha256"]:
            yield name, "has another SHA-256 than the manifest says"


def entries(run: Run) -> dict[str, dict[str, Any]]:
    """The manifest's list of files; raises where it is not one."""
    files = run.read(MANIFEST).get("files")
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and isinstance(entry.get("size"), int)
        for entry in files.values()
    ):
        raise RunError(f"{run.path / 'manifest.json'} has no list of files.", remedy="Restore it.")
    return files


def is_ours(name: str) -> bool:
    """Whether a verb writes files of this name."""
    return any(name.startswith(names) for names in WRITES.values())


def make_key(run: Run) -> None:
    """Draw the key of the run's commitments; without effect where there is one."""
    if not run.has(COMMITMENT_KEY, private=True):
        run.write(COMMITMENT_KEY, {"key": secrets.token_hex(32)}, private=True)


def commit(run: Run, *content: bytes | str) -> str | None:
    """HMAC-SHA-256 of something private under the run's own key; None where the key is not there.

    It is also what marks private files as this run's: no other run has the key.
    """
    if not run.has(COMMITMENT_KEY, private=True):
        return None
    mac = hmac.new(bytes.fromhex(run.read(COMMITMENT_KEY, private=True)["key"]), digestmod=hashlib.sha256)
    for part in content:
        plain = part.encode() if isinstance(part, str) else part
        mac.update(len(plain).to_bytes(8, "little") + plain)
    return mac.hexdigest()


def mark(run: Run) -> str:
    """A short name for this very run, for private files that another run of the same settings must not use."""
    return (commit(run, "mark") or "")[:16]


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@cache
def source() -> dict[str, str | None]:
    """The program's version, and its commit where it runs from a checkout of its own repository."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        number: str | None = version("stobatch")
    except PackageNotFoundError:
        number = None
    return {"stobatch": number, "commit": _commit(Path(__file__).resolve().parent)}


def _commit(package: Path) -> str | None:
    """`None` where git is missing or the package is no part of the repository around it: an installed copy."""

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
