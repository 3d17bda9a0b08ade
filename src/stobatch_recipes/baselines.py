"""What is compared with what: one recipe for each method on MNIST, for a budget and a radius.

All are evaluated the same way, under both protocols, and but for `sound` and `dp_adversarial_squashed` all train the
paper's network, normalised by groups (`published`: by reference images). Methods without privacy take no notice of the
budget. Settings of the DP-SGD family were chosen on a part of the training data that was held out (the guarantee says
so); those of other methods are the literature's, or plain ones.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
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
    MethodConfig,
    ModelConfig,
    RunConfig,
    TrainingConfig,
)
from stobatch.errors import SettingError
from stobatch.registry import METHODS
from stobatch_recipes import published as published_recipes
from stobatch_recipes import sound as sound_recipes

EVALUATION = EvaluationConfig(
    radii=(0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
    functions=("single_pass",),
    adaptive_attacks=("madry", "apgd_ce", "apgd_t", "square"),
    restarts=1,
    vote_limit=1000,
)
CERTIFICATION = CertificationConfig(noise_draws=1000)


def _mnist(
    method: MethodConfig,
    radius: float,
    training: TrainingConfig,
    *,
    architecture: str = "mnist_cnn",
    function: str = "single_pass",
) -> RunConfig:
    return RunConfig(
        method=method,
        data=DataConfig(name="mnist"),
        model=ModelConfig(architecture=architecture, normalisation="group"),
        training=training,
        certification=CERTIFICATION.replace(attack_radius=radius),
        evaluation=EVALUATION.replace(functions=(function,)),
    )


def _schedule(epsilon: float) -> tuple[dict[str, Any], TrainingConfig]:
    """Return DP-SGD's settings for a budget: the smaller it is, the fewer the steps."""
    clip_norm, decay, steps, rate = (
        (1.0, 0.98, 146, 2.0) if epsilon < 0.5 else (0.3, 0.98, 586, 3.0) if epsilon < 2 else (1.0, 0.99, 879, 2.0)
    )
    shared = {"epsilon": epsilon, "clip_norm": clip_norm, "average_decay": decay}
    return shared, TrainingConfig(steps=steps, learning_rate=rate, optimiser="sgd")


def plain(epsilon: float = 1.0, radius: float = 0.2) -> RunConfig:
    """Neither privacy nor robustness: the ceiling of clean accuracy."""
    return _mnist(PlainConfig(), radius, TrainingConfig(steps=2000, learning_rate=1e-3))


def vanilla_adversarial(epsilon: float = 1.0, radius: float = 0.2) -> RunConfig:
    """Adversarial training at the radius asked about, without privacy: the ceiling under attack."""
    return _mnist(VanillaConfig(train_attack_radius=radius), radius, TrainingConfig(steps=600, learning_rate=1e-3))


def pixeldp(epsilon: float = 1.0, radius: float = 0.2) -> RunConfig:
    """PixelDP with the paper's construction bound of 0.1; certificates, no privacy."""
    return _mnist(PixelDpConfig(), radius, TrainingConfig(steps=2000, learning_rate=1e-3), function="vote")


def dpsgd(epsilon: float = 1.0, radius: float = 0.2) -> RunConfig:
    """DP-SGD: privacy, and no defence."""
    shared, training = _schedule(epsilon)
    return _mnist(DpSgdConfig(**shared), radius, training)


def securesgd(epsilon: float = 1.0, radius: float = 0.2) -> RunConfig:
    """DP-SGD with a noise layer that is uneven, for PixelDP's construction bound."""
    shared, training = _schedule(epsilon)
    return _mnist(SecureSgdConfig(**shared), radius, training, function="vote")


def securesgd_agm(epsilon: float = 1.0, radius: float = 0.2) -> RunConfig:
    """The same with even noise, by the analytic Gaussian mechanism."""
    shared, training = _schedule(epsilon)
    return _mnist(SecureSgdAgmConfig(**shared), radius, training, function="vote")


def adlm(epsilon: float = 1.0, radius: float = 0.2) -> RunConfig:
    """The adaptive Laplace mechanism: a claimed budget, of which the relevance estimation is proved.

    The last hidden layer has 25 neurons, as published: the noise on the loss grows with their number's square.
    """
    config = _mnist(AdLmConfig(epsilon=epsilon), radius, TrainingConfig(steps=1000, learning_rate=1e-3))
    return config.override("model.last_hidden_size", 25)


def dp_adversarial(epsilon: float = 1.0, radius: float = 0.2) -> RunConfig:
    """DP adversarial training of the paper's network."""
    shared, training = _schedule(epsilon)
    method = DpAdversarialConfig(**shared, radius=round(0.75 * radius, 6), natural_weight=0.7, warm_up=0.0)
    return _mnist(method, radius, training)


def dp_adversarial_squashed(epsilon: float = 1.0, radius: float = 0.2) -> RunConfig:
    """DP adversarial training of two convolutions behind a squashed input, which an attacker can use less of."""
    shared, training = _schedule(epsilon)
    method = DpAdversarialConfig(**shared | {"batch_size": 8192}, radius=radius, natural_weight=0.8, warm_up=0.0)
    layers = "squash 2, conv 32 5/2+2, relu, conv 64 4/2, relu, linear"
    training = training.replace(steps=round(0.75 * training.steps), learning_rate=4.0)
    return _mnist(method, radius, training, architecture=layers)


def dp_smoothing(epsilon: float = 1.0, radius: float = 0.2) -> RunConfig:
    """DP-SGD on noisy views, for a vote under Gaussian noise; made for l2, so that l-infinity radii are small."""
    shared, training = _schedule(epsilon)
    return _mnist(DpSmoothingConfig(**shared), radius, training, function="vote")


def sound(epsilon: float = 1.0, radius: float = 0.2) -> RunConfig:
    """DP-SGD with bounds in the loss: a proved budget and proved radii."""
    config = sound_recipes.mnist(epsilon, radius)
    return config.replace(evaluation=EVALUATION)


def published(epsilon: float = 1.0, radius: float = 0.2) -> RunConfig:
    """The paper's mechanism with Appendix P's settings: a claimed budget, for any radius."""
    config = published_recipes.mnist().override_all({"method.epsilon": epsilon, "certification.attack_radius": radius})
    return config.replace(evaluation=EVALUATION.replace(functions=("single_pass", "vote")))


COMPARED: dict[str, Callable[[float, float], RunConfig]] = {
    make.__name__: make
    for make in (
        *(plain, vanilla_adversarial, pixeldp),
        *(dpsgd, adlm, securesgd, securesgd_agm, published),
        *(dp_adversarial, dp_adversarial_squashed, dp_smoothing, sound),
    )
}
"""From a budget and a radius to a configuration, by name: ceilings, the paper's rows, what a user has today."""


def compared(name: str) -> Callable[[float, float], RunConfig]:
    """Return the recipe of a method in a comparison; the name in files is accepted, too."""
    name = METHODS.shown(name)
    if name not in COMPARED:
        near = get_close_matches(name, COMPARED, n=2)
        remedy = f"Nearest: {', '.join(near)}." if near else f"There are {', '.join(COMPARED)}."
        raise SettingError(f"there is no method '{name}' to compare.", remedy=remedy)
    return COMPARED[name]


def rows(names: list[str], epsilons: list[float], radius: float) -> dict[str, RunConfig]:
    """Return a row for each method and budget, named after both; a method that ignores the budget has one row.

    >>> list(rows(["sound", "vanilla_adversarial"], [0.5, 1.0], 0.2))
    ['sound ε=0.5', 'sound ε=1', 'vanilla_adversarial']
    """
    configs: dict[str, RunConfig] = {}
    for name in dict.fromkeys(METHODS.shown(name) for name in names):
        make = compared(name)
        for epsilon in epsilons:
            config = make(epsilon, radius)
            configs[f"{name} ε={epsilon:g}" if config != make(2 * epsilon, radius) else name] = config
    return configs
