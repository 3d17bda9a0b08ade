"""A whole run in about two minutes on two CPU cores: the paper's MNIST recipe with fewer steps and draws."""

from __future__ import annotations

from stobatch.config import RunConfig
from stobatch.methods import StoBatchConfig
from stobatch_recipes import paper


def demo() -> RunConfig:
    """The published mechanism at a claimed total of ε = 1.0, shortened; seeded, so that everyone sees the same."""
    full = paper.mnist()
    return full.replace(
        method=StoBatchConfig(total_epsilon=1.0, schedule="stochastic", train_attack_steps=3),
        training=full.training.replace(steps=60, learning_rate=1e-3, monitor_every=10),
        certification=full.certification.replace(noise_draws=500, resampling_shrinkage=10.0, limit=500),
        evaluation=full.evaluation.replace(
            radii=(0.01, 0.05, 0.1, 0.2, 0.4),
            adaptive_attacks=("fgsm", "ifgsm", "madry", "apgd_ce"),
            adaptive_steps=20,
            restarts=1,
            limit=200,
            vote_attacks=("madry",),
            noise_draws=4,
            vote_draws=100,
            vote_limit=40,
        ),
        machine=full.machine.replace(checkpoint_every=10),
        seed=1,
    )
