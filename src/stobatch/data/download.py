"""Fetch an archive, check it, and unpack it so that its folder appears whole or not at all."""

from __future__ import annotations

import hashlib
import http.client
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from stobatch.errors import DataError

TIMEOUT = 20.0
"""Seconds without an answer after which the network counts as absent."""


def fetch_folder(url: str, md5: str, target: Path, *, by_hand: str) -> None:
    """Put the archive's folder called `target.name` at `target`, unless it is already there.

    **Guarantee.** Nothing is unpacked before the digest of the whole archive is right, no member is written outside
    a temporary folder, and `target` appears by one rename. `by_hand` is the remedy when there is no network.
    """
    if target.exists():
        return
    try:
        # The answer comes first: without a network not even the data root is created.
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response, _scratch(target.parent) as scratch:
            archive = scratch / url.rsplit("/", 1)[-1]
            _save(response, url, md5, archive)
            _unpack(archive, scratch / "unpacked")
            _put_in_place(scratch / "unpacked" / target.name, target)
    except (OSError, http.client.HTTPException) as error:
        what = f"{target} is not there, and {url} could not be fetched."
        raise DataError(what, why=_reason(error), remedy=by_hand) from None
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"{url} is not a readable archive.", why=_reason(error), remedy=by_hand) from None


def _reason(error: Exception) -> str:
    """Return the first line of what the system says; messages of ours have one line."""
    text = str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error) or type(error).__name__
    return f"The reason: {text.splitlines()[0].rstrip('.:')}."


@contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    """Yield a temporary folder on the same file system as the data, so that a rename puts files in place."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as name:
        yield Path(name)


def _save(response: IO[bytes], url: str, md5: str, archive: Path) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with archive.open("wb") as out:
        while block := response.read(1 << 20):
            digest.update(block)
            out.write(block)
    if digest.hexdigest() != md5:
        raise DataError(
            f"what came from {url} is not the published archive.",
            why=f"Its MD5 is {digest.hexdigest()}, not {md5}; nothing was unpacked.",
            remedy="Try again; if it stays so, the server or a proxy altered the file.",
        )


def _unpack(archive: Path, into: Path) -> None:
    """Unpack an archive. Both libraries keep every member inside the folder; tar members that would leave it raise."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            zipped.extractall(into)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(into, filter="data")


def _put_in_place(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():  # else another process finished the same download first
            raise
