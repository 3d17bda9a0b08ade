"""The audit of one training: canaries were planted by secret coins, and their scores should say little about them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stobatch.auditing.lower_bounds import privacy_finding
from stobatch.auditing.neighbours import require_relation
from stobatch.auditing.one_run_bounds import GUESSED_SHARES, one_run_bounds, require_enough_canaries
from stobatch.auditing.subject import Audited, require_claim
from stobatch.auditing.tradeoff_curves import PoissonGaussianFamily
from stobatch.config import CanaryConfig
from stobatch.dp.accounting import PoissonGaussian
from stobatch.dp.canaries import CANARY_SCORES, Canaries, draw_run_canaries
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.errors import RunError
from stobatch.files import PRIVATE, read_tensors
from stobatch.results import Finding
from stobatch.runs import Run
from stobatch.types import Neighbours

THREATS = {
    "gradient": "the attacker sees every noisy step, and knows where each canary pulls",
    "input": "the attacker queries the trained model at every canary",
}
ATTACKS = {
    "gradient": "the sum over all steps of what stands at the canary's coordinate, with the sign of the step",
    "input": "the model's scores at the canary: its label against the label it would have instead, or against all",
}


def input_scores(logits: Tensor, canaries: Canaries, relation: Neighbours) -> NDArray[np.float64]:
    """Return how much the model prefers each canary's label."""
    assert canaries.labels is not None
    scores = logits.double().cpu()
    own = scores.gather(1, canaries.labels[:, None])[:, 0]
    if relation is Neighbours.REPLACE_ONE:
        margins = own - scores.gather(1, ((canaries.labels + 1) % scores.shape[1])[:, None])[:, 0]
    else:
        margins = own - scores.logsumexp(1)
    values: NDArray[np.float64] = margins.numpy()
    return values


def require_planted(
    run: Run, config: CanaryConfig, guarantee: PrivacyGuarantee, confidence: float, *, any_mechanism: bool
) -> None:
    """Raise unless there are canaries, and as many as it takes to show the claimed ε, or with a known curve any."""
    if not config.num:
        raise RunError(
            f"{run.path} was trained without canaries, so it cannot be audited in one run.",
            remedy="Train another run with canaries.num=1000 (`--set canaries.num=1000`), or audit with many_runs.",
        )
    epsilon, tests = (guarantee.epsilon, 1) if any_mechanism else (0.0, 2)
    require_enough_canaries(
        config.num, epsilon, delta=guarantee.delta, confidence=confidence, tests=tests * len(GUESSED_SHARES)
    )


def one_run_finding(
    scores: NDArray[np.float64],
    included: Tensor,
    guarantee: PrivacyGuarantee,
    curve: PoissonGaussian | None,
    *,
    kind: str,
    confidence: float,
    called: str = "canaries",
) -> Finding:
    """Return the bounds from the canaries' scores, held against the claim; no single canary's outcome is reported."""
    family = None if curve is None else PoissonGaussianFamily(curve.sampling_rate, curve.steps)
    bounds = one_run_bounds(scores, included.numpy(), delta=guarantee.delta, confidence=confidence, family=family)
    return privacy_finding(
        "one_run",
        guarantee,
        bounds,
        tried=f"{len(scores)} {kind} {called} in the training itself:",
        threat_model=THREATS[kind],
        attack=ATTACKS[kind],
        confidence=confidence,
        canaries=len(scores),
        kind=kind,
    )


def _require_secrets(audited: Audited) -> None:
    """Raise where the owner's folder is not here: canaries drawn from other seeds are not those of the training."""
    seeds = ("seeds.json",) if audited.config.seed is None else ()
    scores = (CANARY_SCORES,) if audited.config.canaries.kind == "gradient" else ()
    for path in (audited.run.path / PRIVATE / name for name in (*seeds, *scores)):
        if not path.exists():
            raise RunError(
                f"{path} is not there.",
                why="Which canaries were in the training is a secret of its owner, who does not publish private/.",
                remedy="Audit where the owner keeps the run, or with what needs no secret: audit.instruments=release.",
            )


def of_one_run(audited: Audited) -> list[Finding]:
    """Bound ε by the canaries that were planted in this very training."""
    model, config, claim = audited.trained(), audited.config, audited.claim
    require_claim(audited)
    relation = require_relation(audited.settings.neighbours, claim.neighbours)
    unknown = audited.plan.curve is None
    require_planted(audited.run, config.canaries, claim, audited.confidence, any_mechanism=unknown)
    _require_secrets(audited)
    canaries = draw_run_canaries(config, audited.info, model.network, audited.plan.parts, audited.seeds)
    if config.canaries.kind == "gradient":
        tensors, metadata = read_tensors(audited.run.path / PRIVATE / CANARY_SCORES)
        if metadata.get("config_hash") != config.training_hash or len(tensors["canary_sums"]) != config.canaries.num:
            raise RunError(
                f"the canaries' scores in {audited.run.path} belong to another training.",
                remedy="Restore them, or train again.",
            )
        scores = tensors["canary_sums"].numpy()
    else:
        assert canaries.inputs is not None
        inputs = canaries.inputs.to(model.network.device, model.network.dtype)
        with torch.no_grad():
            logits = torch.cat([model.network(part) for part in torch.split(inputs, 500)])
        scores = input_scores(logits, canaries, relation)
    persons = audited.info.num_persons is not None
    called = f"canary persons of {audited.canary_records} records" if persons else "canaries"
    finding = one_run_finding(
        scores, canaries.included, claim, audited.plan.curve,
        kind=config.canaries.kind, confidence=audited.confidence, called=called,
    )  # fmt: skip
    return [finding]
