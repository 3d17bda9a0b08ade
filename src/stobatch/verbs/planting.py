"""Canaries of a run, for its training and for the audit afterwards."""

from __future__ import annotations

from stobatch.auditing.one_run import planted
from stobatch.config import RunConfig
from stobatch.data import DatasetInfo
from stobatch.models import Classifier
from stobatch.privacy.canaries import Planted
from stobatch.seeds import Seeds

CANARY_SCORES = "canary_scores.safetensors"
"""In the private folder: what the steps showed of each canary."""


def planted_in(config: RunConfig, info: DatasetInfo, network: Classifier, seeds: Seeds) -> Planted:
    return planted(config.canaries, info, sum(p.numel() for p in network.parameters()), seeds)
