"""What a proof says is released on the way to the model, so that an audit can look at it directly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from stobatch.seeds import Seeds


@dataclass(frozen=True)
class Tuples:
    """A few training tuples; the last one is where two neighbouring data sets differ."""

    inputs: Tensor
    labels: Tensor


class Release(ABC):
    """One intermediate result that a proof calls private, with an attacker who looks at nothing else."""

    name: str
    source: str
    """Which statement says that it is private."""
    attack: str

    @abstractmethod
    def score(self, own: Tuples, pair: tuple[Tuples, Tuples], seeds: Seeds) -> float:
        """Draw the release of `own`, one of the pair, and say how much it looks like the second rather than the first.

        The attacker knows the pair and every public number; not the noise, and not which of the two it is.
        """
