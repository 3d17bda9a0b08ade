"""Settings with which every verb of the published mechanism takes well under a second."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SETTINGS: dict[str, Any] = {
    "data.train_limit": 120,
    "data.test_limit": 60,
    "method.batch_size": 30,
    "method.train_attack_steps": 2,
    "model.architecture": "small_cnn",
    "model.last_hidden_size": 16,
    "training.steps": 4,
    "training.learning_rate": 0.1,
    "training.monitor_every": 2,
    "certification.noise_draws": 50,
    "evaluation.attack_steps": 2,
    "evaluation.adaptive_attacks": ["fgsm", "madry"],
    "evaluation.adaptive_steps": 2,
    "evaluation.restarts": 1,
    "evaluation.noise_draws": 2,
    "evaluation.vote_attacks": ["madry"],
    "evaluation.vote_draws": 20,
    "evaluation.vote_limit": 10,
    "evaluation.num_images": 2,
    "evaluation.radii": [0.05, 0.2],
    "machine.checkpoint_every": 1,
    "machine.threads": 1,
}


def as_arguments(settings: Mapping[str, Any]) -> list[str]:
    """Of the command line."""
    return [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
