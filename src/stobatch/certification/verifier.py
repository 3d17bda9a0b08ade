"""What every way to certify offers: a label for each input, how far it holds, and who vouches for that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stobatch.attacks.expectation import Sample
from stobatch.types import Radius, Status

ASSUMPTIONS = (
    "exact arithmetic",
    "ideal random numbers",
    "every output depends on its own input alone (checked by experiment)",
)

Flags = NDArray[np.bool_]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class CertificateKind:
    """What a column of radii means: who vouches for it, for which function, in which units, how often it may fail."""

    name: str
    status: Status
    source: str
    unit: Radius
    failure_probability: float | None
    assumptions: tuple[str, ...] = ()
    function: str = "vote"
    column: str = "radius"
    """The column of records that holds the radii."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "function": self.function,
            "column": self.column,
            "status": str(self.status),
            "source": self.source,
            "norm": str(self.unit.norm),
            "input_range": str(self.unit.range),
            "failure_probability": self.failure_probability,
            "assumptions": list(self.assumptions),
        }


class Answers(Protocol):
    """Answers for a batch of inputs; every column has one entry per input."""

    @property
    def label(self) -> Labels: ...

    @property
    def abstain(self) -> Flags: ...

    def columns(self) -> dict[str, NDArray[Any]]:
        """All of them, by name; the radii under the names that the kinds of certificate say."""


class Verifier(ABC):
    """One way to certify a network's answers."""

    network: Any
    """The classifier whose answers are certified."""

    @property
    @abstractmethod
    def kinds(self) -> tuple[CertificateKind, ...]:
        """What the columns of radii mean."""

    @abstractmethod
    def verify(self, inputs: Tensor, generator: torch.Generator) -> Answers:
        """Label, abstention and radii for each input in [-1, 1]."""

    @property
    def function(self) -> str:
        """What has to be deployed for the certificates to hold."""
        return self.kinds[0].function

    def with_draws(self, draws: int) -> Verifier:
        """The same with another number of draws; for what draws nothing, itself."""
        return self

    def samples(self) -> dict[str, Sample]:
        """What an attacker of a vote differentiates, by name; empty where nothing is drawn."""
        return {}

    passes_per_draw: int = 1
