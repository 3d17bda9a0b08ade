"""Recipes: functions that return complete configurations, found by name. None carries a seed: see `--seed`.

Another package adds its own under the entry point group `stobatch.recipes`; one that is not installed is named by its
place, as in `recipe("my_package.my_module:my_recipe")`.
"""

from __future__ import annotations

from collections.abc import Callable

from stobatch.config import RunConfig
from stobatch.errors import SettingError, StobatchError
from stobatch.registry import Registry, one_line, read_location

_IN_THIS_PACKAGE = {
    "": ("demo",),
    "sound": (
        *("mnist", "mnist_near", "mnist_middle", "mnist_wide", "mnist_wide_pooled"),
        *("mnist_strict", "mnist_strict_pooled"),
        *("mnist_primed", "mnist_primed_strict", "mnist_primed_wide"),
        *("mnist_l2", "mnist_l2_scattering", "mnist_scattering"),
        *("fashion_mnist", "fashion_mnist_near", "fashion_mnist_wide"),
        *("cifar10", "cifar10_wide", "cifar10_strict", "cifar10_strict_wide", "tiny_imagenet"),
        *("cifar10_scattering", "cifar10_scattering_strict", "cifar10_smoothed", "cifar10_smoothed_strict"),
        *("cifar10_scattering_linf", "cifar10_scattering_strict_wide", "tiny_imagenet_smoothed"),
    ),
    "published": ("demo", "mnist", "cifar10", "tiny_imagenet"),
    "federated": ("demo",),
    "audit": ("published", "sound", "sound_1", "sound_strict", "half_noise", "shared_noise", "no_clipping"),
    # The published mechanism and the sound method stand above.
    "baselines": (
        *("plain", "vanilla_adversarial", "pixeldp", "dpsgd", "adlm", "securesgd", "securesgd_agm"),
        *("dp_adversarial", "dp_adversarial_squashed", "dp_smoothing"),
    ),
}
"""The functions of each module; `demo` has one of its own."""

RECIPES = Registry(
    "recipe",
    "stobatch.recipes",
    {
        ".".join(filter(None, (module, name))): f"stobatch_recipes.{module or name}:{name}"
        for module, names in _IN_THIS_PACKAGE.items()
        for name in names
    },
    aliases={f"paper.{name}": f"published.{name}" for name in _IN_THIS_PACKAGE["published"]},
)


def recipe(name: str) -> RunConfig:
    """Return the configuration that a recipe stands for, by its name or as `package.module:function`.

    >>> recipe("stobatch_recipes.sound:mnist_wide") == recipe("sound.mnist_wide")
    True
    """
    make = _function(name) if ":" in name else RECIPES.require(name)
    try:
        config = make()
    except StobatchError:
        raise
    except Exception as error:
        raise SettingError(
            f"the recipe '{name}' fails with {one_line(error)}.", remedy="Call the function in Python to see where."
        ) from error
    if not isinstance(config, RunConfig):
        raise SettingError(
            f"the recipe '{name}' returns {type(config).__name__}.", remedy="Let it return a stobatch.RunConfig."
        )
    return config


def _function(location: str) -> Callable[[], RunConfig]:
    """Return what a user named by its place, or raise an error in one line."""
    try:
        function: object = read_location(location)
    except (Exception, SystemExit) as error:
        raise SettingError(
            f"the recipe '{location}' cannot be read: {one_line(error)}.",
            remedy="Write package.module:function, of a module that Python finds (PYTHONPATH).",
        ) from error
    if not callable(function):
        raise SettingError(
            f"the recipe '{location}' is not a function.", remedy="Name a function that returns a stobatch.RunConfig."
        )
    return function


__all__ = ["RECIPES", "recipe"]
