"""The paper's settings (Appendix P), one recipe per data set.

What Appendix P leaves open is taken from the released code: the number of steps, Adam, and the ranges of μ_t beyond
MNIST. Deviations: docs/decisions/.
"""

from __future__ import annotations

from stobatch.config import (
    AuditConfig,
    CertificationConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    RunConfig,
    TrainingConfig,
)
from stobatch.published.settings import PublishedConfig


def mnist() -> RunConfig:
    """MNIST: ε2 = 0.1, m = 2499, ξ = 1, ψ = 2, T_μ = 10, n = 2000, learning rate 1e-4."""
    return RunConfig(
        method=PublishedConfig(epsilon=1.0, schedule="iterative"),
        data=DataConfig(name="mnist"),
        model=ModelConfig(architecture="mnist_cnn"),
        training=TrainingConfig(steps=4002, learning_rate=1e-4, optimiser="adam"),
        certification=CertificationConfig(noise_draws=2000, resampling_shrinkage=2.0),
        evaluation=EvaluationConfig(radii=(0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6), attack_steps=10),
    )


def cifar10() -> RunConfig:
    """CIFAR-10: ε2 = 1 + r/3 of a total of 2 + r, m = 1851, ξ = 1.5, ψ = 10, T_μ = 3, n = 1000."""
    return RunConfig(
        method=PublishedConfig(
            epsilon=2.0,
            label_epsilon=1.0,
            budget_split="third_of_surplus",
            schedule="stochastic",
            batch_size=1851,
            adversarial_weight=1.5,
            train_attack_steps=3,
            train_attack_max_radius=0.5,
        ),
        data=DataConfig(name="cifar10", augment=True),
        model=ModelConfig(architecture="cifar10_cnn"),
        training=TrainingConfig(steps=16201, learning_rate=5e-2, optimiser="sgd"),
        certification=CertificationConfig(noise_draws=1000, resampling_shrinkage=10.0),
        evaluation=EvaluationConfig(radii=(0.05, 0.1, 0.2, 0.3, 0.4, 0.5), attack_steps=3),
    )


def tiny_imagenet() -> RunConfig:
    """Tiny ImageNet, first 30 classes: ε2 = 1, m = 4500, ξ = 1.5, ψ = 10, T_μ = 10, n = 1000."""
    return RunConfig(
        method=PublishedConfig(
            epsilon=5.0,
            label_epsilon=1.0,
            budget_split="fixed_label",
            schedule="stochastic",
            batch_size=4500,
            adversarial_weight=1.5,
            train_attack_steps=10,
            train_attack_max_radius=0.1,
        ),
        data=DataConfig(name="tiny_imagenet", num_classes=30, augment=True),
        model=ModelConfig(architecture="resnet18"),
        training=TrainingConfig(steps=3500, learning_rate=1e-2, optimiser="adam"),
        certification=CertificationConfig(noise_draws=1000, resampling_shrinkage=10.0),
        evaluation=EvaluationConfig(radii=(0.05, 0.1, 0.2, 0.3, 0.4, 0.5), attack_steps=10),
    )


def demo() -> RunConfig:
    """The published mechanism on MNIST at a claimed total of ε = 1.0, shortened to a minute."""
    full = mnist()
    return full.replace(
        method=PublishedConfig(epsilon=1.0, schedule="stochastic", train_attack_steps=3),
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
        audit=AuditConfig(num_inputs=10, attack_steps=10, restarts=1, judging_draws=500),
        machine=full.machine.replace(checkpoint_every=10),
    )
