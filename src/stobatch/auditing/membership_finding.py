"""What membership inference says about a claim."""

from __future__ import annotations

from math import exp

import numpy as np
from numpy.typing import NDArray

from stobatch.auditing.families import MOST_EPSILON
from stobatch.auditing.finding import Finding
from stobatch.auditing.membership import infer, targets_needed
from stobatch.auditing.privacy_finding import said
from stobatch.privacy.guarantee import PrivacyGuarantee
from stobatch.types import Neighbours, Status, Verdict


def membership_finding(
    member: NDArray[np.bool_], scores: NDArray[np.float64], claim: PrivacyGuarantee, confidence: float
) -> Finding:
    """From which model was trained on which record, and how sure each is of each.

    Models are trained on halves of one size, so the bound is for replacing a record. A claim for adding or removing
    one is one for replacing it with 2ε and (1 + e^ε)δ: one record is removed, then another added.
    """
    epsilon, delta = claim.epsilon, claim.delta
    if claim.status is Status.NONE:
        epsilon, delta = float("inf"), 0.0
    elif claim.neighbours is Neighbours.ADD_REMOVE:
        epsilon, delta = 2 * epsilon, (1 + exp(epsilon)) * delta
    result = infer(member, scores, delta=delta, confidence=confidence)
    low, high = result.auroc_interval
    rates = ", ".join(
        f"{measured[0]:.2%} at a false-positive rate of {rate:g}" for rate, measured in result.tpr_at.items()
    )
    against, needed, powerless = "nothing is claimed", None, "nothing is claimed"
    if claim.status is not Status.NONE:
        needed = targets_needed(min(epsilon, MOST_EPSILON), delta=delta, confidence=confidence)
        too_few = result.num_targets < needed
        powerless = f"fewer than {needed} attacked models can never refute it" if too_few else ""
        reach = f", which fewer than {needed} attacked models can never refute" if too_few else ""
        against = f"{epsilon:.4g} is {claim.status} for replacing one{reach}"
    refuted = result.epsilon_bound.epsilon > epsilon
    return Finding(
        instrument="membership",
        about="privacy",
        claim=str(claim),
        claim_status=claim.status,
        verdict=Verdict.REFUTED if refuted else Verdict.NOT_TESTED if powerless else Verdict.CONSISTENT,
        statement=f"members are told from others with an AUROC of {result.auroc:.3f} ({low:.3f} to {high:.3f}); true "
        f"positives: {rates}; {said(result.epsilon_bound)}, where {against}",
        threat_model="the attacker queries the trained model, and trains models of its own on records like these",
        attack=f"likelihood ratio with {result.num_shadows} shadow models on {result.num_targets} others",
        confidence=confidence,
        details={
            **result.to_dict(),
            "claimed_epsilon": None if claim.status is Status.NONE else epsilon,
            "claimed_delta": delta,
            "targets_needed": needed,
            "could_not_refute": None if refuted else powerless or None,
            "neighbours": str(Neighbours.REPLACE_ONE),
        },
    )
