"""Where runs and data lie: can a file be written for good, is the clock sane, are the data whole."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stobatch.data import cifar10, mnist, tiny_imagenet
from stobatch.doctor.check import Outcome
from stobatch.errors import RunError
from stobatch.files import write_atomically
from stobatch.results import Health

Write = Callable[[Path, Callable[[Any], object]], object]

MIB = 2**20
BLOCK = 4 * MIB
LEAST_FREE, FEW_FREE = 256 * MIB, 2048 * MIB
"""A run of the largest recipe with its checkpoints takes tens of MiB; a sweep takes gigabytes."""
EARLIEST = 1_735_689_600.0
"""The first second of 2025: no clock that is right shows an earlier time."""
DATA_SETS = {cifar10.FOLDER: "CIFAR-10", tiny_imagenet.FOLDER: "Tiny ImageNet"}


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above that exists: where it would be made."""
    place = folder.expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def _not_writable(reason: str) -> Outcome:
    return Outcome(Health.BROKEN, f"a file cannot be written where runs go: {reason}")


def disk(folder: Path, write: Write = write_atomically, free: Callable[[Path], int] | None = None) -> Outcome:
    """Write, flush to the device, rename and read back, the way every file of a run is written; leave nothing."""
    place, block = _existing(folder), os.urandom(BLOCK)
    left = free(place) if free else shutil.disk_usage(place).free
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".doctor-") as scratch:
            file = Path(scratch) / "probe"
            started = time.perf_counter()
            write(file, lambda out: out.write(block))
            seconds = time.perf_counter() - started
            same = file.read_bytes() == block
    except RunError as error:
        return _not_writable(getattr(error.__cause__, "strerror", None) or error.what)
    except OSError as error:
        return _not_writable(error.strerror or str(error))
    if not same:
        return _not_writable("what is read back is not what was written")
    said = f"4 MiB written, flushed, renamed and read back in {1e3 * seconds:.0f} ms; {left / 1e9:.1f} GB free"
    if left < LEAST_FREE:
        return Outcome(Health.BROKEN, said)
    if left < FEW_FREE:
        return Outcome(Health.WARNING, said, "Free some space before a long training.")
    return Outcome(Health.OK, said)


def clock(folder: Path, now: Callable[[], float] = time.time, tick: Callable[[], float] = time.monotonic) -> Outcome:
    """Both clocks advance alike, the date is possible, and the file system's clock agrees: time limits count on it."""
    wall, steady, pause = now(), tick(), 0.1
    time.sleep(pause)
    walked, ticked = now() - wall, tick() - steady
    with tempfile.NamedTemporaryFile(dir=_existing(folder), prefix=".doctor-") as file:
        skew = Path(file.name).stat().st_mtime - now()
    said = (
        f"in {pause:g} s the clocks advanced {walked:.2f} and {ticked:.2f} s; the disk's differs by {abs(skew):.1f} s"
    )
    if wall < EARLIEST or ticked < pause / 2:
        return Outcome(Health.BROKEN, f"{said}; {'the date is before 2025' if wall < EARLIEST else 'one stands still'}")
    if abs(walked - ticked) > 0.5 or abs(skew) > 5:
        return Outcome(Health.WARNING, said, "Synchronise the clock of this machine and of its file server (NTP).")
    return Outcome(Health.OK, said)


def embedded_mnist(folder: Path = mnist.FOLDER) -> Outcome:
    """Unpack every file and compare its digest; a difference is refused there."""
    total = sum(mnist.unpack(folder, name).numel() for name in mnist.MD5)
    return Outcome(Health.OK, f"{len(mnist.MD5)} files, {total / 1e6:.0f} MB unpacked, have the right digests")


def data_folder(root: str | None) -> Outcome:
    """The folder that STOBATCH_DATA names: it can be listed and read."""
    if not root:
        return Outcome(Health.ABSENT, "STOBATCH_DATA is not set; data other than MNIST are looked for in ./data")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        return Outcome(Health.BROKEN, "STOBATCH_DATA names no folder")
    entries = sorted(folder.iterdir())
    first = next((entry for entry in entries if entry.is_file()), None)
    if first is not None:
        with first.open("rb") as file:
            file.read(1)
    found = [name for entry, name in DATA_SETS.items() if (folder / entry).is_dir()]
    return Outcome(
        Health.OK, f"STOBATCH_DATA has {len(entries)} entries; known data sets: {', '.join(found) or 'none'}"
    )
