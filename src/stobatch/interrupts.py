"""A polite stop: the first Ctrl-C or SIGTERM ends a loop after the present piece of work, with everything saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupted(Exception):  # noqa: N818
    """The user asked to stop; everything up to the last finished piece is on disk."""


class StopRequest:
    """Whether a stop was asked for; a second Ctrl-C does not wait."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def raise_if_asked(self) -> None:
        if self.asked:
            raise Interrupted


@contextmanager
def finish_first() -> Iterator[StopRequest]:
    """Collect stop requests while the block runs; the block decides where it can stop."""
    request = StopRequest()
    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
