"""A whole run in about a minute on two CPU cores: the sound method on MNIST, with fewer steps and a smaller network."""

from __future__ import annotations

from stobatch.config import AuditConfig, CanaryConfig, RunConfig
from stobatch_recipes import sound


def demo() -> RunConfig:
    """ε = 1 and a radius of 0.2, shortened."""
    full = sound.mnist(epsilon=1.0, radius=0.2)
    return full.replace(
        method=full.method.replace(batch_size=2048),
        model=full.model.replace(architecture="squash 3, conv 32 7/3, relu, linear"),
        training=full.training.replace(steps=150, monitor_every=10),
        certification=full.certification.replace(limit=1000),
        evaluation=full.evaluation.replace(
            radii=(0.05, 0.1, 0.2, 0.3, 0.4),
            adaptive_attacks=("fgsm", "madry", "apgd_ce", "apgd_t"),
            adaptive_steps=20,
            restarts=1,
            limit=300,
        ),
        canaries=CanaryConfig(num=5000),
        audit=AuditConfig(num_inputs=50, attack_steps=20, restarts=1),
        machine=full.machine.replace(checkpoint_every=10),
    )
