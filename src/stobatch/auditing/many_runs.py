"""The audit by many trainings: half of the models see one data set, half its neighbour; an attacker tells them apart.

What the attacker sees is part of the finding. `final` is the trained model, queried at the canary: the least that a
deployment gives away. `steps` is every noisy step, which is what the proof of DP-SGD speaks about; there the attacker
subtracts what the other records are expected to add, and sums up the likelihood ratios of the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log1p
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stobatch.auditing.bounds import two_sided_bounds
from stobatch.auditing.families import PoissonGaussianFamily
from stobatch.auditing.finding import Finding
from stobatch.auditing.neighbours import Pair
from stobatch.auditing.privacy_finding import privacy_finding
from stobatch.privacy.accounting import PoissonGaussian
from stobatch.privacy.guarantee import PrivacyGuarantee
from stobatch.training import Trainable
from stobatch.training.engines import Gradients

Floats = NDArray[np.float64]

THREATS = {
    "final": "the attacker knows both data sets and queries the trained model at the canary; weights stay hidden",
    "steps": "the attacker knows both data sets and sees every noisy step of the training",
}
ATTACKS = {
    ("final", "input"): "the trained model's scores at the canary: of its label against the label it has instead, or "
    "against all others",
    ("steps", "input"): "the likelihood ratio of each step along the canary's own clipped gradient",
    ("steps", "gradient"): "the likelihood ratio of each step in the canary's coordinate, with the sign of the step",
}


def final_scores(logits: Tensor, pair: Pair) -> Floats:
    """How much each model prefers the canary's label: [models, 1, classes] to [models]."""
    (label,) = pair.canary[1].tolist()
    at = logits[:, 0].double()
    scores = at[:, label] - at[:, pair.instead] if pair.instead is not None else at.log_softmax(1)[:, label]
    found: Floats = scores.detach().numpy()
    return found


@dataclass
class StepAttack:
    """Sums the likelihood ratios that each released step gives the presence of the canary.

    In units of the bound on one example, a step without the canary is N(0, σ²) along its contribution; with it, a step
    that has sampled it is N(1, σ²). Both hold once the other records' expected part is subtracted.
    """

    curve: PoissonGaussian
    contribution: Callable[[int, Trainable], Gradients]
    others: tuple[Tensor, Tensor]
    total: float = 0.0

    def see(self, step: int, trainable: Trainable, released: Gradients) -> None:
        unit, q, variance = trainable.unit, self.curve.sampling_rate, self.curve.noise_multiplier**2
        along = self.contribution(step, trainable)
        rest = trainable.contributions(*self.others, step)
        shares = [(released[name] - q * rest[name]).double().mul(value.double()).sum() for name, value in along.items()]
        seen = sum(float(share) for share in shares) / unit**2
        power = sum(float(value.double().square().sum()) for value in along.values()) / unit**2
        exponent = (seen - power / 2) / variance
        # log(1 - q + q e^x) without overflow.
        self.total += exponent + log1p((1 - q) * np.expm1(-exponent)) if exponent > 0 else log1p(q * np.expm1(exponent))


def many_runs_finding(
    without: Floats,
    with_: Floats,
    guarantee: PrivacyGuarantee,
    curve: PoissonGaussian | None,
    *,
    view: str,
    canary: str,
    confidence: float,
    pair: Pair,
) -> Finding:
    """Bounds from the scores of both sides, held against the claim."""
    family = None if curve is None else PoissonGaussianFamily(curve.sampling_rate, curve.steps)
    # A likelihood ratio decides at 0; other scores have no natural threshold, and choose one on half of the models.
    threshold = 0.0 if view == "steps" else None
    bounds = two_sided_bounds(
        without, with_, delta=guarantee.delta, confidence=confidence, family=family, threshold=threshold
    )
    return privacy_finding(
        "many_runs",
        guarantee,
        bounds,
        tried=f"{len(without)} + {len(with_)} models trained on two {pair.relation} neighbours:",
        threat_model=THREATS[view],
        attack=ATTACKS[view, canary],
        confidence=confidence,
        records=pair.size,
        trainings=len(without) + len(with_),
        canaries=1,
        histogram=histogram(without, with_),
    )


def histogram(without: Floats, with_: Floats, bins: int = 40) -> dict[str, Any]:
    """How the scores of both sides spread, for a picture."""
    both = np.concatenate([without, with_])
    low, high = np.quantile(both[np.isfinite(both)], [0.001, 0.999])
    edges = np.linspace(low, high if high > low else low + 1, bins + 1)
    counts = [np.histogram(np.clip(side, edges[0], edges[-1]), edges)[0].tolist() for side in (without, with_)]
    return {"edges": edges.tolist(), "without": counts[0], "with": counts[1]}
