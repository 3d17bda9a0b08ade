"""A guarantee is an object: how much, against what, for whom, who says so, and what speaks against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stobatch.paper import implements
from stobatch.types import Neighbours, Status


@implements("Definition 1", "Eq. 1", verdict="the standard definition of (ε, δ)-differential privacy.")
@dataclass(frozen=True)
class PrivacyGuarantee:
    """(ε, δ)-DP with its neighbouring relation, its status and the reasons for that status.

    Nothing here can be printed without the status: a claimed epsilon is called `claimed_epsilon` in every file and
    "claimed" in every sentence.
    """

    epsilon: float
    delta: float
    neighbours: Neighbours
    unit: str
    status: Status
    source: str
    assumptions: tuple[str, ...] = ()
    objections: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.status is Status.NONE:
            return f"no privacy guarantee ({self.source})"
        budget = f"ε = {self.epsilon:g}" + (f", δ = {self.delta:g}" if self.delta else "")
        about = f"{self.neighbours}, per {self.unit}"
        if self.status is Status.PROVED:
            return f"proved {budget} ({about}; {self.source})"
        if self.status is Status.REFUTED:
            return f"REFUTED {budget} ({about}; {self.source})"
        return f"claimed {budget} ({about}; {self.source}), NOT a proven guarantee"

    @classmethod
    def none(cls, source: str) -> PrivacyGuarantee:
        """Of a method that promises nothing about its training data."""
        return cls(float("inf"), 1.0, Neighbours.REPLACE_ONE, "training tuple", Status.NONE, source)

    def to_dict(self) -> dict[str, Any]:
        budget = {f"{self.status}_epsilon": self.epsilon, f"{self.status}_delta": self.delta}
        return {
            **({} if self.status is Status.NONE else budget),
            "status": str(self.status),
            "neighbours": str(self.neighbours),
            "unit": self.unit,
            "source": self.source,
            "assumptions": list(self.assumptions),
            "objections": list(self.objections),
        }
