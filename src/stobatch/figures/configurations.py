"""Which configuration stands for a method in a figure: its recipe, the figure's budget, and how it is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stobatch.comparison.plan import own_changes
from stobatch.config import DataConfig, ModelConfig, RunConfig
from stobatch.errors import SettingError
from stobatch.figures.catalogue import METHODS, OURS, PaperFigure
from stobatch.methods import method_of
from stobatch.pretraining.pretrain import BATCH_SIZE, STEPS
from stobatch_recipes import baselines, published, sound

_OTHER_DATA = {
    "cifar10": (DataConfig(name="cifar10"), ModelConfig(architecture="cifar10_cnn", normalisation="group")),
    "tiny_imagenet": (
        DataConfig(name="tiny_imagenet", num_classes=30),
        ModelConfig(architecture="resnet18", normalisation="group"),
    ),
}
"""The paper's networks, on which its baselines are trained, too; what else they need is MNIST's."""
_AIMS = {"mnist": (0.2, 0.6), "cifar10": (4 / 255, 16 / 255), "tiny_imagenet": (4 / 255, 16 / 255)}
"""Radii that `sound` and `sound_wide` are trained for."""
_MEASURED: dict[str, Any] = {
    "evaluation.adaptive_attacks": ("madry", "apgd_ce", "apgd_t"),
    "evaluation.restarts": 1,
    "evaluation.limit": 1000,
    "evaluation.vote_limit": 200,
    "evaluation.noise_draws": 8,
    "evaluation.num_images": 0,
    "certification.limit": 1000,
}
_SMOKE: dict[str, Any] = {
    "data.train_limit": 300,
    "data.test_limit": 12,
    "data.augment": False,
    "training.steps": 3,
    "training.monitor_every": 3,
    "training.monitor_examples": 12,
    "method.batch_size": 60,
    "method.delta": 1e-3,
    "method.train_attack_steps": 1,
    "method.relevance_steps": 1,
    "method.relevance_batch_size": 60,
    "certification.noise_draws": 20,
    "certification.selection_draws": 10,
    "evaluation.adaptive_attacks": ("madry",),
    "evaluation.adaptive_steps": 2,
    "evaluation.vote_attacks": ("madry",),
    "evaluation.noise_draws": 1,
    "evaluation.vote_draws": 20,
    "evaluation.vote_limit": 4,
}
"""A few steps on a few images: everything runs, nothing is learnt."""
_SMOKE_OURS = {"model.architecture": "squash 2, conv 4 5/3, relu, linear"}
_SMOKE_NETWORK = {"model.architecture": "small_cnn"}
_SMOKE_STEPS = (2, 4)
_MEASURING = ("machine.", "evaluation.", "certification.", "audit.")
"""Settings that change no training."""
_START = "start="
"""Of a change that is no setting: the public images that a training starts from, pretrained on them."""
_SHORTER_STEPS = 0.1
"""Of the recipe's learning rate, from a public start: a large first step would throw away what it knows."""
_ELSEWHERE = {
    "seed": "--seeds",
    "method.name": "--methods",
    "method.epsilon": "--epsilon",
    "method.total_epsilon": "--epsilon",
    "evaluation.radii": "another figure",
    "evaluation.attack_steps": "another figure",
    "data.name": "another figure",
}


def in_smoke(figure: PaperFigure) -> PaperFigure:
    """Return the figure with the ends of its axes and one seed."""

    def ends(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(dict.fromkeys((values[0], values[-1])))

    steps = figure.steps if len(figure.steps) == 1 else _SMOKE_STEPS
    return replace(
        figure, epsilons=ends(figure.epsilons), radii=ends(figure.radii), steps=ends(steps), seeds=figure.seeds[:1]
    )


def pretraining(scale: str) -> tuple[int, int]:
    """Return steps and batch size of a public start."""
    return (3, 60) if scale == "smoke" else (STEPS, BATCH_SIZE)


def require_changes(changes: Mapping[str, Any]) -> None:
    """Refuse what decides which figure it is."""
    for key in changes:
        if key in _ELSEWHERE:
            raise SettingError(
                f"--set {key} is not for a figure.",
                why="It decides what a curve or an axis of the figure means.",
                remedy=f"Use {_ELSEWHERE[key]}.",
            )


def training_changes(changes: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the changes that make it another training, as records name them.

    >>> training_changes({"machine.threads": 1, "training.optimiser": "adam", "data.augment": False})
    ('data.augment=false', 'training.optimiser=adam')
    """
    own = {key: value for key, value in changes.items() if not key.startswith(_MEASURING)}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in own.items()}
    return tuple(sorted(f"{key}={text}" for key, text in texts.items()))


def with_start(changes: tuple[str, ...], start: str | None) -> tuple[str, ...]:
    """Return changes of a recipe with the images that it starts from.

    >>> with_start(("training.optimiser=adam",), "cifar10")
    ('start=cifar10', 'training.optimiser=adam')
    """
    return changes if start is None else tuple(sorted((f"{_START}{start}", *changes)))


def split_start(changes: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
    """Return changes that are settings, and what the training starts from.

    >>> split_start(("start=cifar10", "training.optimiser=adam"))
    (('training.optimiser=adam',), 'cifar10')
    """
    start = next((change.removeprefix(_START) for change in changes if change.startswith(_START)), None)
    return tuple(change for change in changes if not change.startswith(_START)), start


def can_start(figure: PaperFigure, method: str) -> bool:
    """Return whether a method may begin with public weights."""
    made = method_of(recipe_of(figure, method, None))
    return made.trains_parts or made.takes_prior


def configuration(
    figure: PaperFigure, method: str, epsilon: float | None, seed: int, scale: str, start: str | None = None
) -> RunConfig:
    """Return what is trained for a curve, and how it is measured."""
    config = recipe_of(figure, method, epsilon, start).override_all(
        {
            **_MEASURED,
            "evaluation.radii": figure.radii,
            "evaluation.attack_steps": figure.steps[0],
            "evaluation.protocols": ("adaptive",) if method in OURS else ("published", "adaptive"),
            "evaluation.functions": _functions(figure, method),
        }
    )
    if scale == "smoke":
        network = _SMOKE_OURS if method in OURS else _SMOKE_NETWORK if figure.data != "mnist" else {}
        config = config.override_all(own_changes(config, _SMOKE | network))
    return config.replace(seed=seed)


def _functions(figure: PaperFigure, method: str) -> tuple[str, ...]:
    """What is attacked: votes are certified, and the published mechanism's conventional accuracy is of one pass."""
    if not METHODS[method].votes:
        return ("single_pass",)
    if method != "published":
        return ("vote",)
    return tuple({"conventional": "single_pass", "certified": "vote"}[kind] for kind in figure.kinds)


def recipe_of(figure: PaperFigure, method: str, epsilon: float | None, start: str | None = None) -> RunConfig:
    """Return the configuration that stands for a method in a figure at a budget; it does not say what it starts from.

    From a public start the sound method has its whole box from the beginning: pretraining has been through the ramp.
    """
    data, budget = figure.data, epsilon or 1.0
    if method in OURS:
        make = {"mnist": sound.mnist, "cifar10": sound.cifar10, "tiny_imagenet": sound.tiny_imagenet}[data]
        config = make(budget, _AIMS[data][OURS.index(method)])
        if start is None:
            return config
        rate = round(_SHORTER_STEPS * config.training.learning_rate, 6)
        return config.override_all({"method.warm_up": 0.0, "method.ramp": 0.0, "training.learning_rate": rate})
    if method == "published":
        recipes = {"mnist": published.mnist, "cifar10": published.cifar10, "tiny_imagenet": published.tiny_imagenet}
        config = recipes[data]().override("method.epsilon", budget)
        own = figure.train_attack_steps
        return config if own is None else config.override("method.train_attack_steps", own)
    config = baselines.compared(method)(budget, 0.2)
    if data == "mnist":
        return config
    examples, network = _OTHER_DATA[data]
    config = config.replace(data=examples, model=network.replace(last_hidden_size=config.model.last_hidden_size))
    # Their settings were chosen on MNIST.
    return config.override_all(own_changes(config, {"method.tuned_on_private_data": False}))
