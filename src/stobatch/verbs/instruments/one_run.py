"""The canaries that a run was trained with."""

from __future__ import annotations

import torch

from stobatch.auditing.finding import Finding
from stobatch.auditing.neighbours import require_relation
from stobatch.auditing.one_run import input_scores, one_run_finding, require_planted
from stobatch.errors import RunError
from stobatch.files import PRIVATE, read_tensors
from stobatch.verbs.instruments.audited import Audited, require_claim
from stobatch.verbs.planting import CANARY_SCORES, planted_in


def of_one_run(audited: Audited) -> list[Finding]:
    """The canaries that were planted in this very training."""
    model, config, claim = audited.trained(), audited.config, audited.claim
    require_claim(audited)
    relation = require_relation(audited.settings.neighbours, claim.neighbours)
    unknown = audited.plan.curve is None
    require_planted(audited.run, config.canaries, claim, audited.confidence, any_mechanism=unknown)
    canaries = planted_in(config, audited.info, model.network, audited.seeds)
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
    finding = one_run_finding(
        scores, canaries.included, claim, audited.plan.curve,
        kind=config.canaries.kind, confidence=audited.confidence,
    )  # fmt: skip
    return [finding]
