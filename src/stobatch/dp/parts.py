"""How much of a network a training moves, in public numbers: the rest is a constant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainedPart:
    """What is trained of a network, by name and by number of values; an adapter's values are not the network's own."""

    names: tuple[str, ...]
    trained: int
    parameters: int
