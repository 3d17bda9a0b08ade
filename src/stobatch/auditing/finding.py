"""What an instrument found: the claim it was held against, how it was attacked, how sure it is, and the evidence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stobatch.types import Status, Verdict

WITH_SECRET_SEEDS = "with secret seeds"
"""Of a claim that a training with a public seed does not keep, and its method does: that one is tested."""


@dataclass(frozen=True)
class Finding:
    """One instrument's word on one claim.

    **Guarantee.** Where the claim holds, `verdict` is refuted with probability at most 1 - confidence over the audit's
    own randomness, whatever was audited. A claim that is proved by a trade-off curve is the curve: a bound that assumes
    it may refute as well. It is consistent only if an attack that always wins would have refuted the claim; otherwise
    it is not tested, and `details["could_not_refute"]` says why.
    """

    instrument: str
    """many_runs, one_run, membership, release or certificates"""
    about: str
    """The claim: `privacy`, or the name of a kind of certificate."""
    claim: str
    """The claim in words, with its status."""
    claim_status: Status
    """Who vouched for it before the audit."""
    verdict: Verdict
    statement: str
    """What was found, in one sentence that a person can check."""
    threat_model: str
    """What the attacker sees and knows."""
    attack: str
    confidence: float
    details: dict[str, Any] = field(default_factory=dict)
    """Numbers behind the statement, for tables and figures; nothing private."""
    evidence: str = ""
    """The file that holds them all, relative to the run."""

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "claim_status": str(self.claim_status), "verdict": str(self.verdict)}
