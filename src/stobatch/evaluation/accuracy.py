"""Conventional and certified accuracy, from per-example records alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stobatch.evaluation.statistics import Proportion, proportion

Columns = dict[str, list[Any]]


def certified_accuracy(records: Columns, radii: Sequence[float]) -> dict[str, dict[float, Proportion]]:
    """Correct *and* robust at each radius, on clean inputs, for the published and the corrected rule.

    The published rule depends on the attack size it is asked about, so its column is the largest size that passes.
    """
    correct = np.asarray(records["prediction"]) == np.asarray(records["label"])
    columns = {"published": "published_largest_attack", "corrected": "corrected_radius"}
    return {
        kind: {radius: proportion(correct & (np.asarray(records[column]) >= radius)) for radius in radii}
        for kind, column in columns.items()
    }


def verified_accuracy(records: Columns) -> dict[str, Proportion]:
    """Of verified inference on clean inputs: how often it is right, and how often it abstains."""
    right = np.asarray(records["prediction"]) == np.asarray(records["label"])
    abstain = np.asarray(records["abstain"], dtype=bool)
    return {"correct": proportion(right), "correct_without_abstaining": proportion(right & ~abstain),
            "abstained": proportion(abstain)}  # fmt: skip


def attacked_column(attack: str, radius: float) -> str:
    return f"{attack}@{radius:g}"


def conventional_accuracy(
    records: Columns, attacks: Sequence[str], radii: Sequence[float]
) -> dict[float, dict[str, Proportion]]:
    """Accuracy at each radius under each attack, and under the worst of them for each example."""
    label = np.asarray(records["label"])
    scores: dict[float, dict[str, Proportion]] = {}
    for radius in radii:
        hits = {name: np.asarray(records[attacked_column(name, radius)]) == label for name in attacks}
        worst = np.logical_and.reduce(list(hits.values()))
        scores[radius] = {name: proportion(hit) for name, hit in hits.items()} | {"worst": proportion(worst)}
    return scores
