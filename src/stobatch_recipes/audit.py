"""Small settings for audits that train thousands of models: what is audited is the mechanism, not the accuracy."""

from __future__ import annotations

from stobatch.baselines.controls import HalfNoiseConfig, NoClippingConfig, SharedNoiseConfig
from stobatch.config import AuditConfig, DataConfig, MethodConfig, ModelConfig, RunConfig, TrainingConfig
from stobatch.published.settings import PublishedConfig
from stobatch.sound.settings import SoundConfig


def published(epsilon: float = 0.2) -> RunConfig:
    """Algorithm 1 on 40 small digits: two batches of 20, four 3x3 maps, Δ_R = 162; by default a claimed ε of 0.2."""
    return RunConfig(
        method=PublishedConfig(
            epsilon=epsilon,
            label_epsilon=epsilon / 2,
            batch_size=20,
            schedule="iterative",
            attack_ensemble=("ifgsm",),
            train_attack_steps=1,
            train_attack_max_radius=0.1,
        ),
        data=DataConfig(name="small_digits", train_limit=40, test_limit=100),
        model=ModelConfig(architecture="small_cnn", last_hidden_size=64),
        training=TrainingConfig(steps=100, learning_rate=0.01, optimiser="adam"),
        audit=AuditConfig(instruments=("many_runs",), trainings=6000),
    )


def sound(epsilon: float = 3.0, *, like: type[SoundConfig] = SoundConfig) -> RunConfig:
    """The sound method on 64 small digits, half of them in a step on average, audited step by step."""
    method: MethodConfig = like(
        epsilon=epsilon,
        batch_size=32,
        clip_norm=0.5,
        average_decay=0.0,
        natural_weight=1.0,
        certified_weight=0.0,
        tuned_on_private_data=False,
    )
    return RunConfig(
        method=method,
        data=DataConfig(name="small_digits", train_limit=64, test_limit=100),
        model=ModelConfig(architecture="linear"),
        training=TrainingConfig(steps=12, learning_rate=0.5, optimiser="sgd"),
        # A smaller ε takes more trainings to be seen at all.
        audit=AuditConfig(
            instruments=("many_runs",), trainings=4000 if epsilon > 1 else 20_000, canary="gradient", view="steps"
        ),
    )


def sound_1() -> RunConfig:
    """The sound method's audit at ε = 1."""
    return sound(epsilon=1.0)


def sound_strict() -> RunConfig:
    """The sound method's audit at ε = 0.2."""
    return sound(epsilon=0.2)


def half_noise() -> RunConfig:
    """A broken control: the sound method with half the noise that it claims. An audit must refute it."""
    return sound(like=HalfNoiseConfig)


def shared_noise() -> RunConfig:
    """A broken control: the sound method with one draw of noise for all steps. An audit must refute it."""
    return sound(like=SharedNoiseConfig)


def no_clipping() -> RunConfig:
    """A broken control: the sound method without clipping. An audit must refute it."""
    return sound(like=NoClippingConfig)
