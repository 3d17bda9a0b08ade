"""A guarantee is an object: how much, against what, for whom, who says so, and what speaks against it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stobatch.paper import implements
from stobatch.types import Neighbours, Status, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from stobatch.seeds import Seeds

PUBLIC_SEED = "public seed"
"""Why a guarantee is void: whoever knows the seed can rebuild the noise and take it off."""


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
    audits: tuple[str, ...] = ()
    """What audits found, for and against it."""
    secret_seed_status: Status | None = None
    """Of a void guarantee: the status that the same training with secret seeds has."""

    def with_public_seed(self) -> PrivacyGuarantee:
        """Return what is left of it for a run whose seed is public: nothing, whatever the mechanism is worth.

        >>> proved = PrivacyGuarantee(1.0, 1e-5, Neighbours.ADD_REMOVE, "example", Status.PROVED, "DP-SGD")
        >>> print(proved.with_public_seed())
        VOID: public seed (ε = 1, δ = 1e-05 would be proved with secret seeds; add-or-remove-one, per example; DP-SGD)
        """
        if self.status not in (Status.PROVED, Status.CLAIMED):
            return self
        return replace(self, status=Status.VOID, secret_seed_status=self.status)

    def audited(self, findings: Iterable[Mapping[str, Any]]) -> PrivacyGuarantee:
        """The guarantee in the light of findings (`auditing.Finding.to_dict`): one that refutes it settles it.

        Findings never make it more than it was: an attack that failed may have been too weak.
        """
        own = [finding for finding in findings if finding["about"] == "privacy"]
        refuted = any(finding["verdict"] == Verdict.REFUTED for finding in own) and self.status is not Status.NONE
        lines = tuple(f"{f['verdict']}: {f['statement']} ({f['evidence']})" for f in own)
        if refuted:
            return replace(self, status=Status.REFUTED, secret_seed_status=None, audits=lines)
        return replace(self, audits=lines)

    def __str__(self) -> str:
        if self.status is Status.NONE:
            return f"no privacy guarantee ({self.source})"
        budget = f"ε = {self.epsilon:g}" + (f", δ = {self.delta:g}" if self.delta else "")
        about = f"{self.neighbours}, per {self.unit}"
        if self.status is Status.PROVED:
            return f"proved {budget} ({about}; {self.source})"
        if self.status is Status.REFUTED:
            return f"REFUTED {budget} ({about}; {self.source})"
        if self.status is Status.VOID:
            would = f"{budget} would be {self.secret_seed_status} with secret seeds"
            return f"VOID: {PUBLIC_SEED} ({would}; {about}; {self.source})"
        return f"claimed {budget} ({about}; {self.source}), NOT a proven guarantee"

    @classmethod
    def none(cls, source: str) -> PrivacyGuarantee:
        """Of a method that promises nothing about its training data."""
        return cls(float("inf"), 1.0, Neighbours.REPLACE_ONE, "training tuple", Status.NONE, source)

    def to_dict(self) -> dict[str, Any]:
        budget = {f"{self.status}_epsilon": self.epsilon, f"{self.status}_delta": self.delta}
        void = {"void_reason": PUBLIC_SEED, "status_with_secret_seeds": str(self.secret_seed_status)}
        return {
            **({} if self.status is Status.NONE else budget),
            "status": str(self.status),
            **(void if self.status is Status.VOID else {}),
            "neighbours": str(self.neighbours),
            "unit": self.unit,
            "source": self.source,
            "assumptions": list(self.assumptions),
            "objections": list(self.objections),
            "audits": list(self.audits),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyGuarantee:
        """The inverse of `to_dict`."""
        status = Status(values["status"])
        if status is Status.NONE:
            return cls.none(values["source"])
        return cls(
            values[f"{status}_epsilon"],
            values[f"{status}_delta"],
            Neighbours(values["neighbours"]),
            values["unit"],
            status,
            values["source"],
            tuple(values["assumptions"]),
            tuple(values["objections"]),
            tuple(values.get("audits", ())),
            Status(values["status_with_secret_seeds"]) if status is Status.VOID else None,
        )


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
