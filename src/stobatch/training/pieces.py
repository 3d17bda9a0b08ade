"""How one trainer's work is cut into pieces, and which of its devices computes which.

Pieces depend on the work and not on who does it. So two processes pass the very batches through the network that one
process passes, and their sums, which are exact, have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SMALL = 64
"""Fewer rows than this are not worth sharing."""
PIECES = 4
"""On a CPU, larger work is cut into a multiple of so many pieces, unless `machine.pieces` says otherwise."""


@dataclass(frozen=True)
class Share:
    """One of the devices of a trainer.

    >>> [piece for piece in range(7) if Share(1, 3).takes(piece)]
    [1, 4]
    """

    device: int = 0
    devices: int = 1

    @property
    def first(self) -> bool:
        """Whether it does what is done once for the trainer, such as drawing its noise."""
        return self.device == 0

    def takes(self, piece: int) -> bool:
        return piece % self.devices == self.device


ALONE = Share()
"""The only device of its trainer."""


def cut(size: int, most: int, device: torch.device, share: Share, pieces: int = PIECES) -> list[slice]:
    """Rows 0 to `size` in pieces of at most `most`, equally large up to one row.

    On a CPU they are a multiple of `pieces`, for any number of devices up to that: all have equally much to do if
    their number divides it. A GPU wants its whole part at once, so there the number of
    devices decides, and results differ by rounding.

    >>> [piece.stop - piece.start for piece in cut(2499, 833, torch.device("cpu"), ALONE)]
    [624, 625, 625, 625]
    """
    count = -(-size // most)
    if device.type == "cpu":
        count = count if size < _SMALL else -(-count // pieces) * pieces
    else:
        count = max(count, share.devices)
    count = min(count, size)
    ends = [size * index // count for index in range(1, count + 1)] if count else []
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
