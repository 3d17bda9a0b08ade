"""One small, whole training for each method: what the suite runs. Whoever adds a method adds an entry here.

A method of another package is put on the bench by the name of a recipe, which says its settings, for 300 examples:

    STOBATCH_CONFORMANCE=my_recipe python -m pytest tests/system/conformance

An entry is a complete `RunConfig` with a seed. `small` fills in all but the method's own settings; what a member of the
DP-SGD family needs for so few examples stands in `PRIVATE`.
"""

from __future__ import annotations

import os
from typing import Any

from stobatch.baselines.adlm_plan import AdLmConfig
from stobatch.baselines.dpsgd import DpAdversarialConfig, DpSgdConfig, DpSmoothingConfig
from stobatch.baselines.pixeldp import PixelDpConfig
from stobatch.baselines.plain import PlainConfig
from stobatch.baselines.securesgd import SecureSgdAgmConfig, SecureSgdConfig
from stobatch.baselines.vanilla import VanillaConfig
from stobatch.config import (
    CertificationConfig,
    DataConfig,
    EvaluationConfig,
    MachineConfig,
    MethodConfig,
    ModelConfig,
    RunConfig,
    TrainingConfig,
)
from stobatch.published.settings import PublishedConfig
from stobatch.sound.settings import SoundConfig
from stobatch_recipes import recipe

EXEMPT = {
    "control_half_noise": "broken on purpose: audits have to catch it",
    "control_shared_noise": "broken on purpose: audits have to catch it",
    "control_no_clipping": "broken on purpose: audits have to catch it",
    "control_split_persons": "broken on purpose: audits have to catch it",
    "control_record_clipping": "broken on purpose: audits have to catch it",
    "federated": "trained between parties by `stobatch federate`, never in one place",
}
"""Registered methods that the suite leaves out, and why."""

LAYERS = "conv 3 3/2, relu, linear"
PAPER_NETWORK = "small_cnn"
PRIVATE: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-3, "batch_size": 30, "clip_norm": 0.5}
"""A tenth of the examples in a step, so that twelve steps tell a sample from a batch that is always the same."""


def small(
    method: MethodConfig,
    architecture: str = LAYERS,
    *,
    optimiser: str = "sgd",
    learning_rate: float = 0.1,
) -> RunConfig:
    """Twelve steps on 300 small digits, checkpoints in between, and the cheapest certificates and attacks there are."""
    return RunConfig(
        method=method,
        data=DataConfig(name="small_digits", train_limit=300, test_limit=12),
        model=ModelConfig(architecture=architecture, last_hidden_size=8),
        training=TrainingConfig(
            steps=12, learning_rate=learning_rate, optimiser=optimiser, monitor_every=6, monitor_examples=12
        ),
        certification=CertificationConfig(noise_draws=20, selection_draws=5),
        evaluation=EvaluationConfig(
            radii=(0.05, 0.2),
            attacks=("fgsm",),
            attack_steps=1,
            adaptive_attacks=("fgsm", "madry"),
            adaptive_steps=2,
            restarts=1,
            vote_attacks=("ifgsm",),
            noise_draws=2,
            vote_draws=10,
            vote_limit=4,
            num_images=2,
        ),
        machine=MachineConfig(threads=1, checkpoint_every=5),
        seed=4,
    )


SMALL: dict[str, RunConfig] = {
    "sound": small(SoundConfig(**PRIVATE, warm_up=0.0)),
    "published": small(
        PublishedConfig(epsilon=200.0, label_epsilon=100.0, batch_size=30, train_attack_steps=1),
        PAPER_NETWORK,
        optimiser="adam",
        learning_rate=0.01,
    ),
    "vanilla_adversarial": small(
        VanillaConfig(batch_size=30, train_attack_steps=1), PAPER_NETWORK, optimiser="adam", learning_rate=0.01
    ),
    "plain": small(PlainConfig(batch_size=30)),
    "adlm": small(
        AdLmConfig(
            epsilon=30.0,
            delta=1e-3,
            batch_size=30,
            relevance_steps=0,
            relevance_batch_size=150,
            relevance_clip_norm=0.5,
        ),
        PAPER_NETWORK,
        optimiser="adam",
        learning_rate=0.01,
    ),
    "pixeldp": small(PixelDpConfig(batch_size=30), PAPER_NETWORK),
    "dpsgd": small(DpSgdConfig(**PRIVATE)),
    "dp_adversarial": small(DpAdversarialConfig(**PRIVATE, attack_steps=1, warm_up=0.0)),
    "dp_smoothing": small(DpSmoothingConfig(**PRIVATE, num_views=2)),
    "securesgd": small(SecureSgdConfig(**PRIVATE), PAPER_NETWORK),
    "securesgd_agm": small(SecureSgdAgmConfig(**PRIVATE), PAPER_NETWORK),
}
if "STOBATCH_CONFORMANCE" in os.environ:
    given = recipe(os.environ["STOBATCH_CONFORMANCE"])
    layers = PAPER_NETWORK if given.model.layers is None else LAYERS
    descent = {"optimiser": given.training.optimiser, "learning_rate": given.training.learning_rate}
    SMALL = {given.method.title: small(given.method, layers, **descent)}
