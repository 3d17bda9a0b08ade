"""Parties of unequal sizes train one model. Small enough for a minute on two CPU cores."""

from __future__ import annotations

from stobatch.config import DataConfig, RunConfig
from stobatch.federated import FederatedConfig
from stobatch.sound.settings import SoundConfig
from stobatch_recipes import sound


def demo() -> RunConfig:
    """12,000 MNIST records with three parties, ε = 3 each; the smallest takes part in half of the rounds."""
    full = sound.mnist(epsilon=3.0, radius=0.1)
    shared = {name: getattr(full.method, name) for name in SoundConfig.model_fields}
    parties = ("north:7000:700", "east:3500:500", "south:1500:300:20")
    return full.replace(
        method=FederatedConfig(**shared | {"delta": 1e-5, "average_decay": 0.9}, parties=parties),
        data=DataConfig(name="mnist", train_limit=12_000),
        model=full.model.replace(architecture="squash 3, conv 16 7/4, relu, linear"),
        training=full.training.replace(steps=40, learning_rate=4.0, monitor_every=10),
        certification=full.certification.replace(limit=1000),
        evaluation=full.evaluation.replace(
            radii=(0.05, 0.1, 0.2), adaptive_attacks=("fgsm", "madry"), adaptive_steps=20, restarts=1, limit=300
        ),
    )
