"""Run cases by number, each from a seed of its own, and keep what went wrong."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from stobatch.errors import StobatchError

from . import command_lines, files, handed_over, settings

LIMIT_S = 30.0

Surface = Callable[[Random, Path], None]

SURFACES: dict[str, tuple[Surface, int]] = {
    "settings": (settings.assignments, 280),
    "config files": (settings.config_files, 100),
    "architectures": (settings.architectures, 60),
    "plans": (settings.plans, 1),
    "documents": (files.documents, 230),
    "shard manifests": (files.manifests, 80),
    "tensor files": (files.tensors, 80),
    "checkpoints": (files.checkpoints, 14),
    "tables": (files.tables, 30),
    "written documents": (files.written_documents, 10),
    "data sets": (handed_over.datasets, 50),
    "party messages": (handed_over.messages, 60),
    "command lines": (command_lines.command_lines, 5),
}
"""Each with its share of a thousand cases: the slow ones have few."""


class Hung(BaseException):
    """A case that took longer than the limit."""


@dataclass
class Outcome:
    """How the cases of one surface ended."""

    cases: int = 0
    accepted: int = 0
    refused: int = 0
    tracebacks: int = 0
    wrong: int = 0
    hung: int = 0
    slowest_s: float = 0.0
    findings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "slowest_s": round(self.slowest_s, 2)}


def _too_long(number: int, frame: FrameType | None) -> None:
    raise Hung


def _memory() -> str | None:
    """Where files are not written to a disk, if there is such a place: a case writes one and reads it."""
    place = "/dev/shm"
    return place if os.access(place, os.W_OK) else None


def run(surface: str, indices: range, seed: int) -> Outcome:
    """Make these cases. The same seed and number give the same case, whatever ran before it."""
    make, outcome = SURFACES[surface][0], Outcome()
    before = signal.signal(signal.SIGALRM, _too_long)
    try:
        with tempfile.TemporaryDirectory(prefix="stobatch-fuzz-", dir=_memory()) as name, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for index in indices:
                _one(make, surface, index, seed, Path(name), outcome)
    finally:
        signal.signal(signal.SIGALRM, before)
    return outcome


def _one(make: Surface, surface: str, index: int, seed: int, folder: Path, outcome: Outcome) -> None:
    started = time.monotonic()
    rng = Random(f"{seed}/{surface}/{index}")
    outcome.cases += 1
    found = ""
    signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        make(rng, folder)
        outcome.accepted += 1
    except StobatchError as error:
        outcome.refused += 1
        if "\n" in str(error) or not str(error).isprintable():
            outcome.wrong += 1
            found = f"a message of several lines: {error}"
    except Hung:
        outcome.hung += 1
        found = f"no end after {LIMIT_S:g} s"
    except AssertionError as error:
        outcome.wrong += 1
        found = f"wrong: {error}"
    except (Exception, SystemExit):
        outcome.tracebacks += 1
        found = "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - started)
    if found and len(outcome.findings) < 20:
        again = f"python -m tests.system.fuzz --surface '{surface}' --seed {seed} --first {index} --cases 1"
        outcome.findings.append(f"{again}\n{found[:1000]}")


def campaign(cases: int, seed: int, *, surface: str | None = None, first: int = 0, jobs: int = 1) -> dict[str, Outcome]:
    """So many cases over all surfaces by their shares, or of one alone; in one process, or in several."""
    if surface is not None:
        return {surface: run(surface, range(first, first + cases), seed)}
    shared = parts(cases, 1 if jobs == 1 else PARTS)
    if jobs == 1:
        done = [run(name, indices, seed) for name, indices in shared]
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as processes:
            done = list(processes.map(_run, shared, [seed] * len(shared)))
    return {name: joined([one for (of, _), one in zip(shared, done, strict=True) if of == name]) for name in SURFACES}


PARTS = 100
"""Of each surface: small ones, so that nobody is left with what is slow."""


def parts(cases: int, of_each: int) -> list[tuple[str, range]]:
    """All cases by surface and number, cut into parts."""
    counts = {name: cases * share // 1000 for name, (_, share) in SURFACES.items()}
    return [(name, range(first, count, of_each)) for first in range(of_each) for name, count in counts.items()]


def _run(part: tuple[str, range], seed: int) -> Outcome:
    return run(*part, seed)


def joined(outcomes: list[Outcome]) -> Outcome:
    all_of_them = Outcome()
    for one in outcomes:
        for key in ("cases", "accepted", "refused", "tracebacks", "wrong", "hung"):
            setattr(all_of_them, key, getattr(all_of_them, key) + getattr(one, key))
        all_of_them.slowest_s = max(all_of_them.slowest_s, one.slowest_s)
        all_of_them.findings += one.findings[: 20 - len(all_of_them.findings)]
    return all_of_them
