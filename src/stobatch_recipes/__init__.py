"""Recipes: functions that return complete configurations, found by name. None carries a seed: see `--seed`."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial

from stobatch.config import RunConfig
from stobatch.errors import SettingError
from stobatch_recipes import audit, baselines, federated, paper, sound
from stobatch_recipes.demo import demo

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "demo": demo,
    "paper.demo": paper.demo,
    "paper.mnist": paper.mnist,
    "paper.cifar10": paper.cifar10,
    "paper.tiny_imagenet": paper.tiny_imagenet,
    "sound.mnist": sound.mnist,
    "sound.mnist_wide": lambda: sound.mnist(radius=0.6),
    "sound.mnist_strict": lambda: sound.mnist(epsilon=0.2),
    "sound.mnist_l2": sound.mnist_l2,
    "sound.cifar10": sound.cifar10,
    "sound.cifar10_wide": lambda: sound.cifar10(radius=16 / 255),
    "sound.cifar10_strict": lambda: sound.cifar10(epsilon=3.0),
    "sound.cifar10_strict_wide": lambda: sound.cifar10(epsilon=3.0, radius=16 / 255),
    "sound.tiny_imagenet": sound.tiny_imagenet,
    "federated.demo": federated.demo,
    "audit.published": audit.published,
    "audit.sound": audit.sound,
    "audit.sound_1": lambda: audit.sound(epsilon=1.0),
    "audit.sound_strict": lambda: audit.sound(epsilon=0.2),
    "audit.half_noise": audit.half_noise,
    "audit.shared_noise": audit.shared_noise,
    "audit.no_clipping": audit.no_clipping,
    **{
        f"baselines.{name}": partial(make, 1.0, 0.2)
        for name, make in baselines.COMPARED.items()
        # These two are what stands above.
        if name not in ("sound", "stobatch")
    },
}


def recipe(name: str) -> RunConfig:
    """The configuration that a recipe stands for."""
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=2, cutoff=0.3) or list(RECIPES)
        raise SettingError(f"there is no recipe '{name}'.", remedy=f"Nearest: {', '.join(near)}.")
    return RECIPES[name]()


__all__ = ["RECIPES", "recipe"]
