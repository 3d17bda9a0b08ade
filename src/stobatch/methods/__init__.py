"""Training methods: the only room that knows their names."""

from __future__ import annotations

from stobatch.config import RunConfig
from stobatch.methods.adlm import AdLm
from stobatch.methods.adlm_settings import AdLmConfig
from stobatch.methods.base import Method
from stobatch.methods.controls import CONTROLS
from stobatch.methods.dpsgd import (
    DpAdversarial,
    DpAdversarialConfig,
    DpSgd,
    DpSgdConfig,
    DpSmoothing,
    DpSmoothingConfig,
)
from stobatch.methods.pixeldp import PixelDp, PixelDpConfig
from stobatch.methods.plain import Plain, PlainConfig
from stobatch.methods.securesgd import SecureSgd, SecureSgdAgm, SecureSgdAgmConfig, SecureSgdConfig
from stobatch.methods.sound import Sound
from stobatch.methods.sound_settings import SoundConfig
from stobatch.methods.stobatch import StoBatch
from stobatch.methods.stobatch_settings import StoBatchConfig
from stobatch.methods.vanilla import VanillaAdversarialTraining, VanillaConfig

METHODS: dict[str, Method] = {
    method.config_class.name: method
    for method in (
        *(Sound(), StoBatch(), VanillaAdversarialTraining()),
        *(Plain(), PixelDp(), AdLm()),
        *(DpSgd(), DpAdversarial(), DpSmoothing(), SecureSgd(), SecureSgdAgm()),
        *CONTROLS,
    )
}


def method_of(config: RunConfig) -> Method:
    """The method that a configuration names."""
    return METHODS[config.method.name]


__all__ = [
    "METHODS",
    "AdLmConfig",
    "DpAdversarialConfig",
    "DpSgdConfig",
    "DpSmoothingConfig",
    "Method",
    "PixelDpConfig",
    "PlainConfig",
    "SecureSgdAgmConfig",
    "SecureSgdConfig",
    "Sound",
    "SoundConfig",
    "StoBatch",
    "StoBatchConfig",
    "VanillaAdversarialTraining",
    "VanillaConfig",
    "method_of",
]
