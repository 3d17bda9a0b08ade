"""`doctor`: whether this machine's back-ends work, before a long or a many-process training is started.

Every check tries what it is about: a file is written for good, processes add up, a gradient is computed twice. None of
them reads private data, and what they say names no folder and no host. A check that raises or hangs is broken, and the
next one has its turn.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stobatch.doctor import checks
from stobatch.doctor.checks import Outcome
from stobatch.errors import SettingError, StobatchError
from stobatch.progress import progress
from stobatch.results import Health, HealthCheck, HealthReport

__all__ = ["Examination", "Health", "Outcome", "doctor", "examinations", "examine"]

_REINSTALL = "Install again with the versions that are tested: pip install -c constraints.txt ."
_LOOPBACK = (
    "Let processes connect on 127.0.0.1 (firewall, container), and set GLOO_SOCKET_IFNAME to an interface that is up."
)
_DRIVER = "Try `nvidia-smi`; restart the driver, or hide the GPU with CUDA_VISIBLE_DEVICES."


@dataclass(frozen=True)
class Examination:
    """A check before it is made. `remedy` serves where it breaks in a way that was not foreseen."""

    name: str
    attempt: Callable[[], Outcome]
    remedy: str
    needed: bool = True
    """Whether training on this machine needs it."""
    seconds: float = 20.0
    """The time after which it counts as hung."""


def examinations(out: Path) -> list[Examination]:
    """List all checks, in the order in which a failure explains later ones. `out` is where runs will be written."""
    data_root = os.environ.get("STOBATCH_DATA")
    return [
        Examination("packages", checks.packages, _REINSTALL),
        Examination("torch", checks.torch_works, _REINSTALL),
        Examination("cores", checks.cores_and_threads, _REINSTALL),
        Examination("memory", checks.memory, "End other programs, or lower machine.memory_mb."),
        Examination("disk", partial(checks.disk, out), "Free some space, or give --out a folder that can be written."),
        Examination("determinism", checks.determinism, "Set OMP_NUM_THREADS=1; then install torch again."),
        Examination("accountant", checks.accountant, _REINSTALL),
        Examination("clipping", checks.clipping, _REINSTALL),
        Examination("noise", checks.noise, _REINSTALL),
        Examination("mnist", checks.embedded_mnist, _REINSTALL),
        Examination(
            "data folder", partial(checks.data_folder, data_root), "Point STOBATCH_DATA at a folder you can read."
        ),
        Examination("gloo", checks.gloo, _LOOPBACK, seconds=60),
        Examination("cuda", checks.cuda, _DRIVER, seconds=60),
        Examination("nccl", checks.nccl, "Try NCCL_DEBUG=INFO; use gloo meanwhile.", seconds=60),
        *(
            Examination(f"extra {name}", partial(checks.extra, name), command, needed=False)
            for name, (_, command) in checks.EXTRAS.items()
        ),
    ]


def doctor(out: str | Path = "runs", *, only: Sequence[str] = (), quiet: bool = False) -> HealthReport:
    """Make every check, or only those named, and say whether training here can begin."""
    available = examinations(Path(out))
    names = [one.name for one in available]
    if unknown := [name for name in only if name not in names]:
        raise SettingError(f"there is no check '{unknown[0]}'.", remedy=f"Choose from: {', '.join(names)}.")
    chosen = [one for one in available if not only or one.name in only]
    checks = []
    with progress("doctor", len(chosen), quiet=quiet) as advance:
        for examination in chosen:
            advance(0, note=examination.name)
            checks.append(examine(examination))
            advance(1)
    return HealthReport(
        complete=not only,
        ready=not any(check.stops_training for check in checks),
        seconds=round(sum(check.seconds for check in checks), 3),
        checks=tuple(checks),
    )


def examine(examination: Examination) -> HealthCheck:
    """Make one check, in a thread that cannot keep the program from ending: one that hangs is left behind."""
    outcomes: list[Outcome] = []
    started = time.perf_counter()
    thread = threading.Thread(target=lambda: outcomes.append(_attempt(examination)), daemon=True)
    thread.start()
    thread.join(examination.seconds)
    outcome = outcomes[0] if outcomes else Outcome(Health.BROKEN, f"no answer within {examination.seconds:g} s")
    remedy = outcome.remedy or (examination.remedy if outcome.status is Health.BROKEN else "")
    return HealthCheck(
        name=examination.name,
        status=outcome.status,
        said=public(outcome.said),
        remedy=public(remedy),
        seconds=round(time.perf_counter() - started, 3),
        needed=examination.needed,
    )


def _attempt(examination: Examination) -> Outcome:
    """Return the outcome of a check that may raise. Nothing may leave a thread, not even a request to exit."""
    try:
        return examination.attempt()
    except StobatchError as error:
        return Outcome(Health.BROKEN, f"{error.what} {error.why}", error.remedy)
    except OSError as error:
        return Outcome(Health.BROKEN, f"the system refused: {error.strerror or error}")
    except BaseException as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        return Outcome(Health.BROKEN, f"failed with {type(error).__name__}{f': {reason}' if reason else ''}")


_PATHS = (
    re.compile(r"(?<=['\"])/(?!dev/[^/'\"]*['\"])[^'\"]*/([^'\"/]*)(?=['\"])"),  # in quotes, where it may have spaces
    re.compile(r"(?<![\w.:/~])/(?!dev/[^\s/'\"]*(?:[\s'\"]|$))(?:[^\s/'\"]+/)+([^\s/'\"]*)"),
)


def public(text: str) -> str:
    """Return one line without the folders and the name of this machine: it will be pasted into bug reports.

    >>> public("cannot open /home/ann/thesis/x.gz:\\n  /dev/shm is full")
    'cannot open .../x.gz: /dev/shm is full'
    """
    host = socket.gethostname()
    line = " ".join(text.split())
    for path in _PATHS:
        line = path.sub(r".../\1", line)
    return re.sub(rf"\b{re.escape(host)}\b", "this-host", line) if host not in ("", "localhost") else line
