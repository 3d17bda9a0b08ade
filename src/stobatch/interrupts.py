"""Ctrl-C and SIGTERM: obeyed at once on the command line, and put off only where a stop must wait for its moment.

Outside of `finish_first` a stop raises `Interrupted` wherever the program happens to be, as Ctrl-C does in Python. That
is safe because files appear whole or not at all: what was being made is discarded, what was reported done is on disk.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM)
AGAIN_S = 2.0
"""A stop that was swallowed (an exception cannot leave a destructor, for instance) is raised again after this time."""
GRACE_S = 10.0
"""How long a piece of work that should be finished may take after a stop was asked for."""

STOPPED = "interrupted; what was reported done is saved: run the same command again, with --resume if it has it."
"""What the command line says of a stop."""


class Interrupted(BaseException):
    """The user asked to stop; everything that was reported done is on disk. No `except Exception` catches it."""


def _stop(number: int, frame: FrameType | None) -> None:
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
    raise Interrupted


@contextmanager
def obey_stops() -> Iterator[None]:
    """Raise `Interrupted` at the first Ctrl-C or SIGTERM while the block runs. For programs, not for libraries."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, _stop) for number in (*NUMBERS, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopRequest:
    """Whether a stop was asked for; a second Ctrl-C does not wait."""

    def __init__(self, grace_s: float | None = None) -> None:
        self.asked: int | None = None
        self.grace_s = grace_s

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None and number == signal.SIGINT:
            raise Interrupted
        self.asked = self.asked or number
        if self.grace_s is not None and _handles_stop_signals():
            signal.setitimer(signal.ITIMER_REAL, self.grace_s, AGAIN_S)

    def raise_if_asked(self) -> None:
        if self.asked is not None:
            raise Interrupted


@contextmanager
def finish_first(grace_s: float | None = None) -> Iterator[StopRequest]:
    """Put off stops while the block runs. It may look for one and end early; else the stop comes at the block's end.

    On the command line a block that goes on for longer than the grace is left nevertheless, where there is a grace.
    """
    request = StopRequest(grace_s)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    waiting = signal.setitimer(signal.ITIMER_REAL, 0) if _handles_stop_signals() else (0.0, 0.0)
    previous = {number: signal.signal(number, request) for number in NUMBERS}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if waiting[0]:
            signal.setitimer(signal.ITIMER_REAL, *waiting)
    if request.asked is not None:
        signal.raise_signal(request.asked)


def _handles_stop_signals() -> bool:
    return signal.getsignal(signal.SIGALRM) is _stop
