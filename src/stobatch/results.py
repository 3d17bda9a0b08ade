"""What an instrument found: the claim it was held against, how it was attacked, how sure it is, and the evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


PRIVACY = "privacy"
CERTIFICATES = "certificates"
"""The instrument that tests certificates; all others test privacy."""

Claim = dict[str, Any]


def judge_claims(
    privacy: str, kinds: Iterable[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]]
) -> list[Claim]:
    """Return every claim of a run with its verdict: of its privacy, by its status, and of each kind of certificate.

    >>> judge_claims("proved", [], [])
    [{'about': 'privacy', 'status': 'proved', 'verdict': 'not tested', 'reason': 'no instrument was used on it'}]
    """
    claims = [] if privacy == Status.NONE else [_judged(PRIVACY, privacy, _about_privacy(findings))]
    return claims + [_judged(kind["name"], kind["status"], _about_kind(findings, kind["name"])) for kind in kinds]


def recheck(findings: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return findings as their own numbers have them: one that says consistent of nothing is not tested.

    For files that were written before this was checked, or by a program that does not.
    """
    return [{**finding, **_empty(finding)} for finding in findings]


def _empty(finding: Mapping[str, Any]) -> dict[str, Any]:
    details, reason = finding.get("details", {}), ""
    if finding.get("instrument") == CERTIFICATES and not details.get("attacked", 1):
        reason = "no input has a certified ball"
    elif finding.get("instrument") == "membership":
        needed = details.get("targets_needed")
        if details.get("claimed_epsilon", 0) is None:
            reason = "nothing is claimed"
        elif needed is not None and details.get("num_targets", needed) < needed:
            reason = f"fewer than {needed} attacked models can never refute it"
    if not reason or finding["verdict"] != Verdict.CONSISTENT:
        return {}
    return {"verdict": str(Verdict.NOT_TESTED), "details": {**details, "could_not_refute": reason}}


def overall_verdict(claims: Sequence[Claim], findings: Sequence[Mapping[str, Any]]) -> Verdict:
    """Return what all findings say of all claims: consistent only if every one of them was tested.

    A finding that refutes counts even if its claim is gone, as when the run was certified in another way since.
    """
    if any(finding["verdict"] == Verdict.REFUTED for finding in findings):
        return Verdict.REFUTED
    tested = [claim["verdict"] != Verdict.NOT_TESTED for claim in claims]
    if not any(tested):
        return Verdict.NOT_TESTED
    return Verdict.CONSISTENT if all(tested) else Verdict.PARTLY_TESTED


def untested(claims: Iterable[Claim]) -> list[str]:
    """Name each claim that was not tested, with the reason."""
    return [f"{name_of(claim)} ({claim['reason']})" for claim in claims if claim["verdict"] == Verdict.NOT_TESTED]


def name_of(claim: Mapping[str, Any]) -> str:
    about = str(claim["about"])
    return about if about == PRIVACY else f"certificates by the {about} rule"


def _judged(about: str, status: str, findings: list[Mapping[str, Any]]) -> Claim:
    verdicts = {finding["verdict"] for finding in findings}
    verdict = next((v for v in (Verdict.REFUTED, Verdict.CONSISTENT) if v in verdicts), Verdict.NOT_TESTED)
    claim = {"about": about, "status": str(status), "verdict": str(verdict)}
    if verdict is not Verdict.NOT_TESTED:
        return claim
    reasons = [finding["details"].get("could_not_refute") or finding["statement"] for finding in findings]
    return claim | {"reason": "; ".join(reasons) or "no instrument was used on it"}


def _about_privacy(findings: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [f for f in findings if f["about"] == PRIVACY and f["instrument"] != CERTIFICATES]


def _about_kind(findings: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    return [f for f in findings if f["about"] == name and f["instrument"] == CERTIFICATES]
