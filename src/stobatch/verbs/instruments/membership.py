"""Shadow models on halves of the training data."""

from __future__ import annotations

import numpy as np
import torch

from stobatch.auditing.finding import Finding
from stobatch.auditing.membership import logit_confidence
from stobatch.auditing.membership_finding import membership_finding
from stobatch.errors import DataError
from stobatch.loading import make_network
from stobatch.methods import method_of
from stobatch.training.many import OneByOne
from stobatch.verbs.instruments.audited import Audited
from stobatch.verbs.tables import Columns, Tick


def of_membership(audited: Audited) -> list[Finding]:
    """Shadow models on random halves of the training data, and the likelihood ratio of every record's membership."""
    settings, pool = audited.settings, audited.data().train.in_memory()
    half = len(pool) // 2
    if half < 2:
        raise DataError(f"{len(pool)} records have no halves to train on.", remedy="Raise data.train_limit.")
    plan = audited.plan_for(half)

    def rows_of(start: int, count: int, tick: Tick) -> Columns:
        seeds = [audited.root.child("membership", index) for index in range(start, start + count)]
        members = torch.stack([torch.randperm(len(pool), generator=each.generator("half"))[:half] for each in seeds])
        networks = [make_network(audited.config, audited.info, each, audited.network) for each in seeds]
        models = method_of(audited.config).stack(audited.config, plan, networks, pool, members, seeds) or OneByOne(
            audited.config,
            (audited.fresh(plan, pool.take(own), each) for own, each in zip(members, seeds, strict=True)),
            count,
        )
        models.train(tick)
        logits = models.logits(pool.inputs).numpy()
        scores = logit_confidence(logits, pool.labels.expand(count, -1).numpy())
        within = torch.zeros(count, len(pool), dtype=torch.bool).scatter_(1, members, True)
        return {"member": within.tolist(), "score": scores.tolist()}

    identity = [settings.models_at_once, pool.fingerprint()]
    table = audited.table("membership", identity, settings.shadow_models, settings.models_at_once, rows_of)
    member, score = np.asarray(table["member"]), np.asarray(table["score"])
    return [membership_finding(member, score, audited.claim, audited.confidence)]
