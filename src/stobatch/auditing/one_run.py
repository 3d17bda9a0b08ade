"""The audit of one training: canaries were planted by secret coins, and their scores should say little about them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stobatch.auditing.families import PoissonGaussianFamily
from stobatch.auditing.finding import Finding
from stobatch.auditing.one_run_bounds import GUESSED_SHARES, one_run_bounds, require_enough_canaries
from stobatch.auditing.privacy_finding import privacy_finding
from stobatch.config import CanaryConfig
from stobatch.data import DatasetInfo, Examples
from stobatch.errors import RunError, SettingError
from stobatch.privacy.accounting import PoissonGaussian
from stobatch.privacy.canaries import GradientCanaries, Planted, coins
from stobatch.privacy.guarantee import PrivacyGuarantee
from stobatch.runs import Run
from stobatch.seeds import Seeds
from stobatch.types import Neighbours

THREATS = {
    "gradient": "the attacker sees every noisy step, and knows where each canary pulls",
    "input": "the attacker queries the trained model at every canary",
}
ATTACKS = {
    "gradient": "the sum over all steps of what stands at the canary's coordinate, with the sign of the step",
    "input": "the model's scores at the canary: its label against the label it would have instead, or against all",
}


def planted(config: CanaryConfig, info: DatasetInfo, num_parameters: int, seeds: Seeds) -> Planted:
    """The run's canaries and their coins, from its own seeds: secret where those are, and never written down."""
    included = coins(config.num, seeds.wide_generator("canaries", "coins"))
    if config.kind == "gradient":
        stream = seeds.wide_generator("canaries", "places")
        return Planted(included, GradientCanaries.draw(config.num, num_parameters, stream))
    stream = seeds.wide_generator("canaries", "images")
    images = torch.from_numpy(stream.random((config.num, *info.input_shape), dtype=np.float32)).round() * 2 - 1
    labels = torch.from_numpy(stream.integers(info.num_classes, size=config.num))
    return Planted(included, inputs=images, labels=labels)


def replacing(records: Examples, canaries: Planted) -> Examples:
    """For replace-one neighbours: canaries take the place of the last records, with their label or the next one."""
    assert canaries.inputs is not None
    assert canaries.labels is not None
    kept = len(records) - len(canaries.labels)
    if kept < 1:
        raise SettingError(
            f"{len(canaries.labels)} input canaries leave none of {len(records)} records.",
            why="Where neighbours have one size, each canary takes the place of a record.",
            remedy=f"Plant at most {len(records) // 2}: canaries.num.",
        )
    labels = torch.where(canaries.included, canaries.labels, (canaries.labels + 1) % records.num_classes)
    first = records.take(slice(kept))
    return Examples(torch.cat([first.inputs, canaries.inputs]), torch.cat([first.labels, labels]), records.num_classes)


def input_scores(logits: Tensor, canaries: Planted, relation: Neighbours) -> NDArray[np.float64]:
    """How much the model prefers each canary's label."""
    assert canaries.labels is not None
    scores = logits.double().cpu()
    own = scores.gather(1, canaries.labels[:, None])[:, 0]
    if relation is Neighbours.REPLACE_ONE:
        found = own - scores.gather(1, ((canaries.labels + 1) % scores.shape[1])[:, None])[:, 0]
    else:
        found = own - scores.logsumexp(1)
    values: NDArray[np.float64] = found.numpy()
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
) -> Finding:
    """Bounds from the canaries' scores, held against the claim; how each single canary fared is not told."""
    family = None if curve is None else PoissonGaussianFamily(curve.sampling_rate, curve.steps)
    bounds = one_run_bounds(scores, included.numpy(), delta=guarantee.delta, confidence=confidence, family=family)
    return privacy_finding(
        "one_run",
        guarantee,
        bounds,
        tried=f"{len(scores)} {kind} canaries in the training itself:",
        threat_model=THREATS[kind],
        attack=ATTACKS[kind],
        confidence=confidence,
        canaries=len(scores),
        kind=kind,
    )
