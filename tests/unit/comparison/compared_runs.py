"""Rows of a comparison that take a second each to train, certify and attack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stobatch.config import RunConfig
from stobatch_recipes.baselines import rows

RADII = (0.2, 0.05)
NAMES = ("sound ε=3", "published ε=3", "vanilla_adversarial")
SETTINGS: dict[str, Any] = {
    "data.train_limit": 120,
    "data.test_limit": 40,
    "model.last_hidden_size": 16,
    "training.steps": 3,
    "training.monitor_every": 3,
    "certification.noise_draws": 30,
    "certification.attack_radius": RADII[0],
    "evaluation.radii": list(RADII),
    "evaluation.attack_steps": 1,
    "evaluation.adaptive_attacks": ["fgsm", "madry"],
    "evaluation.adaptive_steps": 1,
    "evaluation.restarts": 1,
    "evaluation.noise_draws": 1,
    "evaluation.vote_attacks": ["madry"],
    "evaluation.vote_draws": 10,
    "evaluation.vote_limit": 10,
    "evaluation.num_images": 0,
    "machine.checkpoint_every": 1,
    "machine.threads": 1,
}
OWN: dict[str, dict[str, Any]] = {
    "sound": {
        "method.expected_batch_size": 30,
        "method.delta": 1e-3,
        "model.architecture": "squash 3, conv 4 7/5, relu, linear",
        "training.learning_rate": 1.0,
    },
    "published": {"method.batch_size": 30, "method.train_attack_steps": 1},
    "vanilla_adversarial": {"method.batch_size": 30, "method.train_attack_steps": 1},
}


def small(*names: str, **changes: Any) -> dict[str, RunConfig]:
    """The comparison's own recipes, small; with `evaluation__limit=5` more is changed in all of them."""
    more = {key.replace("__", "."): value for key, value in changes.items()}
    made = rows(list(OWN), [3.0], RADII[0])
    return {
        name: config.override_all({**SETTINGS, **OWN[config.method.title], **more})
        for name, config in made.items()
        if not names or name in names
    }


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of the runs with the moment it was written and its content."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}
