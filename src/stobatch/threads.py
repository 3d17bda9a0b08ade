"""Threads that each have a share of the cores, so that their operations do not wait for each other.

PyTorch lets all cores share each operation: they meet at the end of every one, and spin for some milliseconds after
the last, waiting for the next. Where the same work is done for many rows, a thread for each part of them needs neither.
Operations release the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_MIN_ROWS = 100
"""With fewer rows for each thread the Python between two operations costs more than the thread gains."""


class RunAll(Protocol):
    """Apply a function to every item, several at a time, and return the results in order."""

    def __call__(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]: ...


def count_workers(device: torch.device, rows: int) -> int:
    """Return how many threads should share this many rows of a pass."""
    # Autocast is a setting of the calling thread, which workers would not see.
    if device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return 1
    return max(1, min(torch.get_num_threads(), rows // _MIN_ROWS))


@contextmanager
def share_cores(workers: int) -> Iterator[RunAll]:
    """Yield what applies a function, without gradients, in so many threads; with one worker, in the calling thread.

    Until the end of the block the calling thread computes alone, so that no team of its own takes cores from them.
    """
    if workers == 1:
        yield lambda work, items: [work(item) for item in items]
        return
    cores = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(cores // workers,)) as pool:
            torch.set_num_threads(1)
            yield lambda work, items: list(pool.map(torch.no_grad()(work), items))
    finally:
        # A worker's set_num_threads is also the default of every thread that starts later.
        torch.set_num_threads(cores)


@contextmanager
def single_thread(*, wanted: bool = True) -> Iterator[None]:
    """Let the calling thread compute alone in the block, where threads with shares of the cores follow."""
    cores = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if wanted:
            torch.set_num_threads(cores)
