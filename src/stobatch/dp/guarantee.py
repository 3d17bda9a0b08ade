"""A privacy guarantee as an object: budget, neighbours, unit, status, assumptions, objections and audits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Protocol

from stobatch.dp.prior import Prior
from stobatch.paper import implements
from stobatch.types import Neighbours, Status, Verdict

PUBLIC_SEED = "public seed"
"""Why a guarantee is void: with the seed the noise can be computed and subtracted."""


class AboutGuarantee(Protocol):
    """What a guarantee needs from a finding: the claim it is about, its verdict, and its evidence."""

    @property
    def about(self) -> str: ...

    @property
    def verdict(self) -> Verdict: ...

    @property
    def statement(self) -> str: ...

    @property
    def evidence(self) -> str: ...


@implements("Definition 1", "Eq. 1", verdict="the standard definition of (ε, δ)-differential privacy.")
@dataclass(frozen=True, repr=False)
class PrivacyGuarantee:
    """(ε, δ)-DP with its neighbouring relation, its status and the reasons for that status.

    It is never printed without its status: a claimed ε is `claimed_epsilon` in every file and "claimed" in every
    sentence.
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
    """Findings of audits."""
    secret_seed_status: Status | None = None
    """For a void guarantee: the status of the same training with secret seeds."""
    prior: Prior | None = None
    """The weights that the training started from; None where they were random."""

    def started_from(self, prior: Prior | None) -> PrivacyGuarantee:
        """Return the guarantee of a training from these weights: only claimed if they may have seen the data.

        >>> proved = PrivacyGuarantee(1.0, 1e-5, Neighbours.ADD_REMOVE, "example", Status.PROVED, "DP-SGD")
        >>> print(proved.started_from(Prior("fonts", "ab" * 32, ("fonts (OFL-1.1)",), ())))
        proved ε = 1, δ = 1e-05 (add-or-remove-one, per example; DP-SGD; from the prior fonts)
        >>> print(proved.started_from(Prior("resnet", "ab" * 32, ("imagenet",), ("imagenet",), conflict="they have")))
        claimed ε = 1, δ = 1e-05 (add-or-remove-one, per example; DP-SGD; from the prior resnet), NOT a proven guarantee
        """
        if prior is None or self.status is Status.NONE:
            return replace(self, prior=prior)
        objections = (prior.tuning_objection, *self.objections) if prior.tuned else self.objections
        if prior.conflict is None:
            assumptions = (*self.assumptions, prior.assumption)
            return replace(self, prior=prior, assumptions=assumptions, objections=objections)
        status = Status.CLAIMED if self.status is Status.PROVED else self.status
        return replace(self, prior=prior, status=status, objections=(prior.objection, *objections))

    def with_public_seed(self) -> PrivacyGuarantee:
        """Return the guarantee of a run whose seed is public: void.

        >>> proved = PrivacyGuarantee(1.0, 1e-5, Neighbours.ADD_REMOVE, "example", Status.PROVED, "DP-SGD")
        >>> print(proved.with_public_seed())
        VOID: public seed (ε = 1, δ = 1e-05 would be proved with secret seeds; add-or-remove-one, per example; DP-SGD)
        """
        if self.status not in (Status.PROVED, Status.CLAIMED):
            return self
        return replace(self, status=Status.VOID, secret_seed_status=self.status)

    def audited(self, findings: Iterable[AboutGuarantee]) -> PrivacyGuarantee:
        """Return the guarantee with audit findings (`results.Finding`): refuted if one refutes it.

        Findings never raise the status: an attack that failed may have been too weak.
        """
        about_privacy = [finding for finding in findings if finding.about == "privacy"]
        refuted = any(f.verdict == Verdict.REFUTED for f in about_privacy) and self.status is not Status.NONE
        lines = tuple(f"{finding.verdict}: {finding.statement} ({finding.evidence})" for finding in about_privacy)
        if refuted:
            return replace(self, status=Status.REFUTED, secret_seed_status=None, audits=lines)
        return replace(self, audits=lines)

    def __str__(self) -> str:
        if self.status is Status.NONE:
            return f"no privacy guarantee ({self.source})"
        budget = f"ε = {self.epsilon:g}" + (f", δ = {self.delta:g}" if self.delta else "")
        about = f"{self.neighbours}, per {self.unit}; {self.source}"
        about += f"; from the prior {self.prior.name}" if self.prior else ""
        if self.status is Status.PROVED:
            return f"proved {budget} ({about})"
        if self.status is Status.REFUTED:
            return f"REFUTED {budget} ({about})"
        if self.status is Status.VOID:
            would = f"{budget} would be {self.secret_seed_status} with secret seeds"
            return f"VOID: {PUBLIC_SEED} ({would}; {about})"
        return f"claimed {budget} ({about}), NOT a proven guarantee"

    def __repr__(self) -> str:
        """Return the sentence, and below it assumptions, objections and audits."""
        notes = {"assumes": self.assumptions, "but": self.objections, "audit": self.audits}
        return "\n".join([str(self), *(f"  {word}: {note}" for word, each in notes.items() for note in each)])

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{escape(note)}</li>" for note in (*self.assumptions, *self.objections, *self.audits))
        return f"<p>{escape(str(self))}</p><ul>{notes}</ul>"

    @classmethod
    def none(cls, source: str) -> PrivacyGuarantee:
        """Return the guarantee of a method without privacy."""
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
            **({"prior": self.prior.to_dict()} if self.prior else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyGuarantee:
        """Return the inverse of `to_dict`."""
        status = Status(values["status"])
        none = cls.none(values["source"])
        return cls(
            none.epsilon if status is Status.NONE else values[f"{status}_epsilon"],
            none.delta if status is Status.NONE else values[f"{status}_delta"],
            Neighbours(values["neighbours"]),
            values["unit"],
            status,
            values["source"],
            tuple(values["assumptions"]),
            tuple(values["objections"]),
            tuple(values.get("audits", ())),
            Status(values["status_with_secret_seeds"]) if status is Status.VOID else None,
            Prior.from_dict(values["prior"]) if "prior" in values else None,
        )
