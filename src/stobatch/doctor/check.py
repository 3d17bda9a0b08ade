"""One check of the machine: what it may say, and how it is kept from harming the others.

A check tries the thing itself and gives back an `Outcome`. `examine` gives it a thread and a time limit, so one that
raises or hangs is a `HealthCheck` that says broken, and the next one has its turn.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from stobatch.errors import StobatchError
from stobatch.results import Health, HealthCheck


@dataclass(frozen=True)
class Outcome:
    """What a check found. Without a remedy of its own it has that of its `Examination`."""

    status: Health
    said: str
    remedy: str = ""


@dataclass(frozen=True)
class Examination:
    """A check before it is made. `remedy` serves where it breaks in a way that nobody foresaw."""

    name: str
    attempt: Callable[[], Outcome]
    remedy: str
    needed: bool = True
    """Whether training on this machine needs it."""
    seconds: float = 20.0
    """After so long it counts as hung."""


_PATHS = (
    re.compile(r"(?<=['\"])/(?!dev/)[^'\"]*/([^'\"/]*)(?=['\"])"),  # in quotes, where it may have spaces
    re.compile(r"(?<![\w.:/~])/(?!dev/)(?:[^\s/'\"]+/)+([^\s/'\"]*)"),
)


def public(text: str) -> str:
    """One line without the folders and the name of this machine: what doctor says is pasted into bug reports.

    >>> public("cannot open /home/ann/thesis/x.gz:\\n  /dev/shm is full")
    'cannot open .../x.gz: /dev/shm is full'
    """
    host = socket.gethostname()
    line = " ".join(text.split())
    for path in _PATHS:
        line = path.sub(r".../\1", line)
    return re.sub(rf"\b{re.escape(host)}\b", "this-host", line) if host not in ("", "localhost") else line


def _attempt(examination: Examination) -> Outcome:
    """The outcome, whatever happens. Nothing may leave a thread, not even a request to exit."""
    try:
        return examination.attempt()
    except StobatchError as error:
        return Outcome(Health.BROKEN, f"{error.what} {error.why}", error.remedy)
    except OSError as error:
        return Outcome(Health.BROKEN, f"the system refused: {error.strerror or error}")
    except BaseException as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        return Outcome(Health.BROKEN, f"failed with {type(error).__name__}{f': {reason}' if reason else ''}")


def examine(examination: Examination) -> HealthCheck:
    """Make one check. A thread that hangs is left behind; it cannot keep the program from ending."""
    found: list[Outcome] = []
    started = time.perf_counter()
    thread = threading.Thread(target=lambda: found.append(_attempt(examination)), daemon=True)
    thread.start()
    thread.join(examination.seconds)
    outcome = found[0] if found else Outcome(Health.BROKEN, f"no answer within {examination.seconds:g} s")
    remedy = outcome.remedy or (examination.remedy if outcome.status is Health.BROKEN else "")
    return HealthCheck(
        name=examination.name,
        status=outcome.status,
        said=public(outcome.said),
        remedy=public(remedy),
        seconds=round(time.perf_counter() - started, 3),
        needed=examination.needed,
    )
