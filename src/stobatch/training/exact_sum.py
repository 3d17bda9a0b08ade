"""A sum that does not depend on the order of its parts, so that any number of processes gives the same bits.

Rounding makes floating-point addition depend on its order, and an all-reduce over four processes adds in another order
than one process does. Numbers on a common grid that stay below 2⁵³ grid steps add up without rounding. Two grids hold
a part: a coarse one, and a fine one for what the coarse one leaves over. Both sums are exact, and exact sums commute.

What is released under noise is rounded once more, to the grid of the noise, and only then scaled and shortened to the
precision of the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stobatch.dp.noise import Grid

_COARSE, _FINE = 2.0**-22, 2.0**-64
"""Coarse steps add exactly up to ±2³⁰; what they leave over, at most 2⁻²³ each, does so for 4,096 parts."""
_TO_COARSE, _TO_FINE = (1.5 * 2.0**52 * step for step in (_COARSE, _FINE))
"""From 2⁵² to 2⁵³ steps the last place of a float64 is one step: x + c - c is the multiple of the step nearest to x,
for |x| below 2⁵¹ steps."""
_CARRY_EVERY = 2048
"""A carry leaves at most 2⁻²³ in the fine sum, so 2,048 parts later it is below 2⁻¹¹, 2⁵³ fine steps; so is the sum of
4,096 processes, each of which carries before it sends."""
_BLOCK = 2**16


class ExactSum:
    """The sum of gradients, parameter by parameter.

    **Guarantee.** For parts below 2³⁰ in total, and at most 4,096 processes, the result has the same bits for every
    order and grouping of `add`, and for every way to add up the `message`s; it misses the sum by at most 2⁻⁶⁵ a part,
    and float32 parts above 2⁻⁴⁰ are not rounded at all. Larger gradients are summed as float64 sums them. With a grid,
    the result is a function of the multiple of the grid's step that is nearest to that sum.

    `message` is all of it in one flat vector, with a place at its end for votes of processes; `carry` comes before it
    is sent.

    >>> weight = nn.Parameter(torch.zeros(2))
    >>> sums = ExactSum({"weight": weight})
    >>> for value in (1e8, 1e-8, -1e8): sums.add({"weight": torch.tensor([value, 0.5])})
    >>> sums.mean(1)["weight"]
    tensor([1.0000e-08, 1.5000e+00])
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter | Tensor], grid: Grid | None = None) -> None:
        self.parameters, self.grid, self._added = parameters, grid, 0
        sizes = [parameter.numel() for parameter in parameters.values()]
        self.size = sum(sizes)
        device = next(iter(parameters.values())).device
        self.message = torch.zeros(2 * self.size + 1, dtype=torch.float64, device=device)
        self.buffer, self.votes = self.message[:-1].view(2, self.size), self.message[-1:]
        self._coarse, self._fine = (dict(zip(parameters, torch.split(row, sizes), strict=True)) for row in self.buffer)

    def clear(self) -> None:
        """Set the sum to zero, in the same memory."""
        self.message.zero_()
        self._added = 0

    def take(self, rounded: Tensor) -> None:
        """Replace the sum by one that was rounded on its way, with the votes behind it."""
        self.buffer.zero_()
        self.buffer[0], self.votes[:] = rounded[:-1], rounded[-1:]

    @torch.no_grad()
    def add(self, part: Mapping[str, Tensor]) -> None:
        """Add the part of some parameters; what it does not name counts as zero."""
        self._added += 1
        if self._added % _CARRY_EVERY == 0:
            self.carry()
        if self.size <= _BLOCK and part.keys() == self.parameters.keys():
            # Of a small network all at once: audits make millions of such steps.
            flat = torch.cat([part[name].detach().reshape(-1).to(torch.float64) for name in self.parameters])
            _add(flat, self.buffer[0], self.buffer[1])
            return
        for name, value in part.items():
            whole = value.detach().reshape(-1)
            # Block by block: what is computed on the way stays in a CPU's cache. A GPU pays for every call instead.
            size = _BLOCK if whole.is_cpu else max(1, len(whole))
            for start in range(0, len(whole), size):
                block = slice(start, start + size)
                _add(whole[block].to(torch.float64), self._coarse[name][block], self._fine[name][block])

    def carry(self) -> None:
        """Move whole coarse steps out of the fine sum, so that it has room for as many parts again."""
        whole = (self.buffer[1] + _TO_COARSE).sub_(_TO_COARSE)
        self.buffer[0] += whole
        self.buffer[1] -= whole

    def mean(self, count: int) -> dict[str, Tensor]:
        """Return the sum over `count`, in each parameter's own precision and shape."""
        coarse, fine = self.buffer
        if self.grid is None:
            whole = (coarse + fine).div_(count)
        else:
            self.carry()
            # Coarse steps are multiples of the grid's, so rounding what is fine rounds the sum. A half goes up, always:
            # to the even neighbour it would go up or down with the noise, and show that there was a half.
            step = self.grid.step
            whole = (fine / step).add_(0.5).floor_().mul_(step).add_(coarse).mul_(self.grid.scale / count)
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        return {
            name: value.to(parameter.dtype).view(parameter.shape)
            for (name, parameter), value in zip(self.parameters.items(), torch.split(whole, sizes), strict=True)
        }


def _add(exact: Tensor, to_coarse: Tensor, to_fine: Tensor) -> None:
    coarse = (exact + _TO_COARSE).sub_(_TO_COARSE)
    to_coarse += coarse
    # The difference of neighbours on two grids is itself a float64: nothing is lost before the rounding.
    to_fine += exact.sub(coarse).add_(_TO_FINE).sub_(_TO_FINE)
