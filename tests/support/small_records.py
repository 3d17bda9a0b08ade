"""A few records of two classes and settings of the sound method with which a training takes a tenth of a second."""

from __future__ import annotations

from typing import Any

import torch

from stobatch.config import RunConfig
from stobatch.data import Dataset, from_tensors
from stobatch_recipes import recipe

SETTINGS: dict[str, Any] = {
    "data.name": "tensors",
    "model.architecture": "linear",
    "method.batch_size": 16,
    "method.delta": 1e-3,
    "method.certified_weight": 0.0,
    "method.natural_weight": 1.0,
    "training.steps": 4,
    "training.monitor_every": 1,
    "machine.checkpoint_every": 2,
    "machine.threads": 1,
}


def small_config(**changes: Any) -> RunConfig:
    """Settings for `small_records`; keys of changes have two underscores for the dot."""
    return recipe("sound.mnist").override_all(
        SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    )


def small_records(first: int = 0, count: int = 64, name: str = "tensors") -> Dataset:
    """Records from a long list, from `first` on: two calls share those that lie in both ranges."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(400, 1, 4, 4, generator=generator) * 2 - 1
    labels = (inputs.mean((1, 2, 3)) > 0).long()
    own, test = slice(first, first + count), slice(360, 400)
    return from_tensors(inputs[own], labels[own], inputs[test], labels[test], num_classes=2, name=name)
