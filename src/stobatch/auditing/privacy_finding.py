"""Bounds on ε held against a claim: what the instruments that yield them have in common."""

from __future__ import annotations

from typing import Any

from stobatch.auditing.bounds import EpsilonBound
from stobatch.auditing.finding import Finding
from stobatch.privacy.guarantee import PrivacyGuarantee
from stobatch.types import Verdict


def privacy_finding(
    instrument: str,
    claim: PrivacyGuarantee,
    bounds: tuple[EpsilonBound, ...],
    *,
    tried: str,
    threat_model: str,
    attack: str,
    confidence: float,
    **details: Any,
) -> Finding:
    """Refuted where a bound lies above the claim: all bounds of a finding hold at once with its confidence."""
    best = max(bounds, key=lambda bound: bound.epsilon)
    return Finding(
        instrument=instrument,
        about="privacy",
        claim=str(claim),
        claim_status=claim.status,
        verdict=Verdict.REFUTED if best.epsilon > claim.epsilon else Verdict.CONSISTENT,
        statement=f"{tried} {said(best)}, where {claim.epsilon:.4g} is {claim.status}",
        threat_model=threat_model,
        attack=attack,
        confidence=confidence,
        details={
            "claimed_epsilon": claim.epsilon,
            "claimed_delta": claim.delta,
            "neighbours": str(claim.neighbours),
            **details,
            "bounds": [bound.to_dict() for bound in bounds],
        },
    )


def said(bound: EpsilonBound) -> str:
    """A bound in words, never without δ, confidence and what it assumes."""
    assuming = f", assuming {bound.assumes}" if bound.assumes else ""
    return f"ε ≥ {bound.epsilon:.3g} at δ = {bound.delta:g} with {100 * bound.confidence:.3g}% confidence{assuming}"
