"""The sound method: DP-SGD on bounds of boxes, own adversarial points and noisy views, and certificates that hold."""

from __future__ import annotations

from stobatch.config import RunConfig
from stobatch.errors import ModelError, SettingError
from stobatch.methods.dpsgd_family import DpSgdFamily
from stobatch.methods.sound_settings import SoundConfig
from stobatch.models import Classifier, Layered, Network


class Sound(DpSgdFamily):
    """Differential privacy and certificates that hold."""

    config_class = SoundConfig

    def require_sense(self, config: RunConfig) -> None:
        method = config.method
        assert isinstance(method, SoundConfig)
        if not any((method.natural_weight, method.certified_weight, method.adversarial_weight, method.views_weight)):
            raise SettingError("no loss has a weight.", remedy="Set method.natural_weight=1, for instance.")
        if method.views_weight and not method.smoothing_stddev:
            raise SettingError(
                "noisy views have no noise.", remedy="Set method.smoothing_stddev, or method.views_weight=0."
            )

    def require_trainable(self, config: RunConfig, network: Classifier) -> None:
        method = config.method
        assert isinstance(method, SoundConfig)
        if method.certified_weight and not isinstance(network, Layered):
            raise ModelError(
                "the certified loss needs a plain stack of layers.",
                remedy="Set model.architecture to a list of layers, or method.certified_weight=0.",
            )
        if method.reconstruction_weight and not isinstance(network, Network):
            raise ModelError(
                "the reconstruction objective needs one of the paper's networks, with an encoder.",
                remedy="Set model.architecture=mnist_cnn, or method.reconstruction_weight=0.",
            )
