"""Progress with time left, on standard error, so that standard output stays clean for `--json`.

In a terminal it is a bar; elsewhere (nohup, Slurm, CI) a line every 30 seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LINE_EVERY_S = 30.0
"""Between two lines where there is no terminal."""


class Progress(ABC):
    """Work that a user waits for. Call it with what was done since the last call."""

    def __call__(self, count: float = 1, note: str | None = None) -> None:
        """Move by `count` and, if given, replace the note next to it."""
        self.advance(count, note)

    @abstractmethod
    def advance(self, count: float, note: str | None) -> None: ...

    @abstractmethod
    def expect(self, total: int) -> None:
        """Start again at nothing of `total`: for work whose size is known only once it has begun."""


class _Silent(Progress):
    def advance(self, count: float, note: str | None) -> None:
        pass

    def expect(self, total: int) -> None:
        pass


class _Lines(Progress):
    """A line now and then: what is done, how fast, how long it still takes."""

    def __init__(self, title: str, total: int, start: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.title, self.clock, self.note = title, clock, ""
        self.began, self.start, self.done, self.total = clock(), float(start), float(start), total
        self.told = self.since = self.began

    def expect(self, total: int) -> None:
        self.began, self.start, self.done, self.total = self.clock(), 0.0, 0.0, total

    def advance(self, count: float, note: str | None) -> None:
        self.done = min(self.done + count, float(self.total))
        self.note = self.note if note is None else note
        now = self.clock()
        if now - self.told >= LINE_EVERY_S:
            self.told = now
            print(self.line(now), file=sys.stderr, flush=True)

    def end(self) -> None:
        """Say that it is done, and how long it took."""
        spent = spoken_time(self.clock() - self.since)
        print(f"{self.title}: {self.done:,.0f} of {self.total:,} in {spent}", file=sys.stderr, flush=True)

    def line(self, now: float) -> str:
        spent, since_start = now - self.began, self.done - self.start
        rate = since_start / spent if spent > 0 else 0.0
        left = f", {spoken_time((self.total - self.done) / rate)} left" if rate > 0 else ""
        pace = f"{rate:.3g} a second" if rate >= 1 or not rate else f"{1 / rate:.3g} s each"
        note = f" {self.note}" if self.note else ""
        return f"{self.title}: {self.done:,.0f} of {self.total:,}, {pace}{left}{note}"


def spoken_time(seconds: float) -> str:
    """Return a duration as people say it.

    >>> spoken_time(42), spoken_time(600), spoken_time(7000)
    ('42 s', '10 min', '1 h 57 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


_running: ContextVar[Progress] = ContextVar("running")


def running() -> Progress:
    """Return the progress that is shown now, for work deep inside that knows its own size; else a silent one."""
    return _running.get(_Silent())


@contextmanager
def progress(title: str, total: int, *, start: int = 0, quiet: bool = False) -> Iterator[Progress]:
    """Show progress while the block runs; silent where it is not wanted."""
    with _show(title, total, start, quiet) as shown:
        token = _running.set(shown)
        try:
            yield shown
        finally:
            _running.reset(token)


@contextmanager
def _show(title: str, total: int, start: int, quiet: bool) -> Iterator[Progress]:
    if quiet:
        yield _Silent()
    elif not sys.stderr.isatty():
        lines = _Lines(title, total, start)
        try:
            yield lines
        except Exception:
            raise  # the error says what there is to say
        except BaseException:
            lines.end()  # stopped, and what is done is kept
            raise
        lines.end()
    else:
        with _bar(title, total, start) as bar:
            yield bar


@contextmanager
def _bar(title: str, total: int, start: int) -> Iterator[Progress]:
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description:<10}"),
        rich.BarColumn(bar_width=None),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("left"),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[note]}"),
    )
    with rich.Progress(*columns, console=Console(stderr=True)) as display:
        task = display.add_task(title, total=total, completed=start, note="")

        class Bar(Progress):
            def advance(self, count: float, note: str | None) -> None:
                if note is None:
                    display.advance(task, count)
                else:
                    display.update(task, advance=count, note=note)

            def expect(self, total: int) -> None:
                display.reset(task, total=total)

        yield Bar()


@contextmanager
def elapsed(title: str, *, quiet: bool = False) -> Iterator[None]:
    """Show how long the block has run and nothing else: for work whose size, and what is done of it, are secret."""
    if quiet:
        yield
    elif sys.stderr.isatty():
        from rich import progress as rich
        from rich.console import Console

        columns = (rich.TextColumn("{task.description}"), rich.TimeElapsedColumn())
        with rich.Progress(*columns, console=Console(stderr=True)) as display:
            display.add_task(title, total=None)
            yield
    else:
        with _ticking(title):
            yield


@contextmanager
def _ticking(title: str) -> Iterator[None]:
    """Print a line every 30 seconds by the clock alone: when a part of the work ends, nothing is to be seen."""
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(LINE_EVERY_S):
            say(f"{title}, {spoken_time(time.monotonic() - began)}")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def say(line: str, *, quiet: bool = False) -> None:
    """Print a line for a person who waits, unless nothing is to be shown."""
    if not quiet:
        print(line, file=sys.stderr, flush=True)


Tick = Callable[[float], None]
"""Told the share of the work that was done since it was told last."""


def no_progress(share: float) -> None:
    """Take note of a share of the work, and show nothing."""
