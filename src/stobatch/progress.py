"""Progress with time left, on standard error, so that standard output stays clean for `--json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[..., None]
"""`advance(n, note="...")` moves the bar by n and optionally replaces the note beside it."""


@contextmanager
def progress(title: str, total: int, *, start: int = 0, quiet: bool = False) -> Iterator[Advance]:
    """Show one bar while the block runs; silent where there is nobody to look at it."""
    if quiet:
        yield lambda count=1, note="": None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as display:
        task = display.add_task(title, total=total, completed=start, note="")

        def advance(count: float = 1, note: str | None = None) -> None:
            if note is None:
                display.advance(task, count)
            else:
                display.update(task, advance=count, note=note)

        yield advance


Tick = Callable[[float], None]
"""Told the share of the work that was done since it was told last."""
