"""Answers of a GPU that are read a step later: to look at one at once waits until it has nothing left to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

Judge = Callable[[list[bool]], None]
"""Raises where an answer is wrong."""


class Later:
    """Questions to a GPU, in the order of asking. On a CPU an answer is there at once, and is judged at once."""

    def __init__(self) -> None:
        self._open: deque[tuple[torch.cuda.Event, Tensor, Judge]] = deque()

    def __len__(self) -> int:
        """Return how many questions are open."""
        return len(self._open)

    def ask(self, flags: Tensor, judge: Judge) -> None:
        """Have the flags judged as soon as somebody looks at what is open."""
        if not flags.is_cuda:
            judge(flags.tolist())
            return
        # A copy into pinned memory takes its turn on the GPU, and the event says when it is there.
        answers = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        answers.copy_(flags, non_blocking=True)
        there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        there.record(torch.cuda.current_stream(flags.device))
        self._open.append((there, answers, judge))

    def look(self, leave: int = 0) -> None:
        """Judge what is open, but for the last few questions."""
        while len(self._open) > leave:
            there, answers, judge = self._open.popleft()
            there.synchronize()
            judge(answers.tolist())
