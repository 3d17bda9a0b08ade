"""DP-SGD (Abadi et al., 2016), and what became of it: adversarial training and smoothing inside the clipped gradient.

The released comparisons clip the mean gradient of a batch, tensor by tensor, and leave biases alone; that bounds
nothing that one example adds. Here each example's whole gradient is clipped (`dpsgd_trainable`).
"""

from __future__ import annotations

from stobatch.settings import setting
from stobatch.sound.losses import CrossEntropy, Objective, Ramp
from stobatch.sound.method import DpSgdFamily
from stobatch.sound.settings import DpSgdSettings, adversarial_term, noisy_views, smoothing_noise
from stobatch.votes.noise import SmoothingNoise

_AT_ONCE = Ramp(0.0, 0.0)


class DpSgdConfig(DpSgdSettings, name="dpsgd"):
    """Cross-entropy, and nothing else."""

    def objective(self, attack_chunk: int) -> Objective:
        return Objective(((1.0, CrossEntropy()),), _AT_ONCE)


class DpAdversarialConfig(DpSgdSettings, name="dp_adversarial"):
    """Adversarial training: each example's own attack, inside its clipped gradient (Bu et al., 2022)."""

    radius: float = setting(0.2, at_least=0, at_most=2, doc="Of the training attack, l-infinity over [-1, 1]")
    natural_weight: float = setting(0.5, at_least=0, at_most=1, doc="Of the examples as they are; attacks get the rest")
    attack_steps: int = setting(3, at_least=1, doc="Gradient steps to each adversarial point")
    warm_up: float = setting(
        0.1,
        at_least=0,
        at_most=1,
        doc="Share of the steps without attacks; training.warm_up is of the learning rate",
    )
    ramp: float = setting(0.3, at_least=0, at_most=1, doc="Share of the steps over which the attacks grow")

    def objective(self, attack_chunk: int) -> Objective:
        natural = (self.natural_weight, CrossEntropy())
        attacked = (1 - self.natural_weight, adversarial_term(self.radius, self.attack_steps, attack_chunk))
        return Objective((natural, attacked), Ramp(self.warm_up, self.ramp))


class DpSmoothingConfig(DpSgdSettings, name="dp_smoothing"):
    """Noisy views, averaged before clipping, for a classifier that votes under the same noise (Wu et al., 2024)."""

    smoothing_noise: str = setting("gaussian", choices=("gaussian", "laplace"), doc="The noise of views and of votes")
    smoothing_stddev: float = setting(0.5, above=0, doc="Its standard deviation over [-1, 1]")
    num_views: int = setting(4, at_least=1, doc="Noisy views of each example, K, averaged inside its one contribution")

    @property
    def noise(self) -> SmoothingNoise | None:
        return smoothing_noise(self.smoothing_noise, self.smoothing_stddev)

    def objective(self, attack_chunk: int) -> Objective:
        views = noisy_views(self.smoothing_noise, self.smoothing_stddev, self.num_views)
        return Objective(((1.0, views),), _AT_ONCE)


class DpSgd(DpSgdFamily):
    """Privacy alone."""

    config_class = DpSgdConfig


class DpAdversarial(DpSgdFamily):
    """Privacy, and robustness by experiment; with a list of layers also what its bounds prove."""

    config_class = DpAdversarialConfig


class DpSmoothing(DpSgdFamily):
    """Privacy, and votes with certificates."""

    config_class = DpSmoothingConfig
