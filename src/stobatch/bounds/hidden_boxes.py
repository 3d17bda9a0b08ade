"""Tighter boxes inside deep networks: every value whose sign is open, followed back through the layers before it.

`passes` bounds a layer by the box before it, which forgets how values of that box hang together. Followed back to the
input, as leads are, a value keeps what cancels on the way (CROWN, Zhang et al., 2018). The first layers gain nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stobatch.bounds.linear import LOWER_SLOPES, Box, Passed, Rectifier, Rows, lower_bounds
from stobatch.bounds.passes import Node, passes

_COPIES = 10
"""Tensors of the size of a layer that are alive at once for each row, roughly."""


@torch.no_grad()
def hidden_boxes(steps: Sequence[Node], ball: Box, memory_mb: int) -> dict[int, Box]:
    """Return boxes of what ReLUs behind other ReLUs are given, by place of the operation that gives it.

    From the first such ReLU to the last: boxes that were found are used for those behind them.

    **Guarantee.** Every deployed pass that starts in the ball has these values in their boxes: z_j is a lower bound of
    itself, and so is -z_j of itself; `lower_bounds` keeps them lower bounds, rounding included.
    """
    known: dict[int, Box] = {}
    for step, inputs in steps:
        if not isinstance(step, Rectifier) or inputs[0] in known:
            continue
        (source,) = inputs
        before = steps[: source + 1]
        if any(isinstance(node.step, Rectifier) for node in before):
            known[source] = _followed_back(list(passes(before, ball, known=known)), memory_mb)
    return known


def _followed_back(trace: Sequence[Passed], memory_mb: int) -> Box:
    """Return the last box of a trace, with better ends where a sign is open; all others are as good as they need be."""
    box = trace[-1].after
    low, high = box.low.flatten(1).clone(), box.high.flatten(1).clone()
    examples, values = ((low < 0) & (high > 0)).nonzero(as_tuple=True)
    largest = max(part.low[0].numel() for passed in trace for part in (passed.before, passed.after))
    at_once = max(1, memory_mb * 2**20 // (8 * _COPIES * largest))
    for owner, value in zip(torch.split(examples, at_once), torch.split(values, at_once), strict=True):
        unit = torch.zeros(len(owner), low.shape[1], dtype=low.dtype, device=low.device)
        unit[torch.arange(len(owner), device=low.device), value] = 1
        low[owner, value] = _larger(low[owner, value], _least(unit, owner, box, trace))
        high[owner, value] = -_larger(-high[owner, value], _least(-unit, owner, box, trace))
    return Box(low.view_as(box.low), high.view_as(box.high))


def _least(coefficients: Tensor, owner: Tensor, box: Box, trace: Sequence[Passed]) -> Tensor:
    """Return lower bounds of these combinations of the last values of a trace."""
    rows = Rows(coefficients.view(-1, *box.low.shape[1:]), coefficients.new_zeros(len(owner)), owner)
    return lower_bounds(rows, trace, LOWER_SLOPES["smaller area"])


def _larger(bound: Tensor, other: Tensor) -> Tensor:
    """Return the better of two lower bounds; the first where the second is not a number."""
    return torch.where(other > bound, other, bound)
