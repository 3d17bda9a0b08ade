"""How many steps have looked at private data, kept so that a crash can only make the count too large."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from stobatch.files import PRIVATE, as_written
from stobatch.runs import Run


@dataclass(frozen=True)
class Ledger:
    """Steps that are done, and steps that may have been made since.

    A stretch of steps is entered before its first one is made, and settled after its checkpoint is safe. What is open
    when a run is resumed was cut off by a crash: those steps will be repeated, and they are counted all the same.

    >>> Ledger().begun(50).made(50).begun(50).begun(50).accounted
    150
    """

    done: int = 0
    open: int = 0

    @property
    def accounted(self) -> int:
        return self.done + self.open

    def begun(self, steps: int) -> Ledger:
        """So many steps are about to be made; what was open stays counted."""
        return Ledger(self.accounted, steps)

    def made(self, steps: int) -> Ledger:
        """So many steps of the open stretch were made, and the rest of it was not."""
        return Ledger(self.done + steps, 0)

    @classmethod
    def of(cls, run: Path) -> Self:
        directory = Run(run)
        if not directory.has("ledger", private=True):
            return cls()
        with as_written(run / PRIVATE / "ledger.json"):
            found = directory.read("ledger", private=True)
            return cls(int(found["done"]), int(found["open"]))

    def save(self, run: Path) -> None:
        Run(run).write("ledger", {"done": self.done, "open": self.open}, private=True)
