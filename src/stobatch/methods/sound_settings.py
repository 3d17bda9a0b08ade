"""The sound method's settings, and the mixture of losses that they describe."""

from __future__ import annotations

from dataclasses import dataclass

from stobatch.certification import SmoothingNoise
from stobatch.methods.dpsgd_settings import DpSgdSettings, noisy_views, own_adversarial, smoothing_noise
from stobatch.objectives.private import Certified, CrossEntropy, Objective, Ramp, Reconstruction, Term
from stobatch.settings import setting


@dataclass(frozen=True)
class SoundConfig(DpSgdSettings, name="sound"):
    """Settings of the sound method. `epsilon` and `radius` are the knobs; the rest has defaults that work."""

    radius: float = setting(0.2, at_least=0, at_most=2, doc="What training aims to certify, l-infinity over [-1, 1]")
    natural_weight: float = setting(0.5, at_least=0, doc="Of cross-entropy on the examples as they are")
    certified_weight: float = setting(0.5, at_least=0, doc="Of cross-entropy on interval bounds, when fully ramped")
    adversarial_weight: float = setting(0.0, at_least=0, doc="Of cross-entropy on each example's adversarial point")
    reconstruction_weight: float = setting(0.0, at_least=0, doc="Of the paper's auto-encoder objective, per example")
    views_weight: float = setting(0.0, at_least=0, doc="Of cross-entropy on noisy views")
    num_views: int = setting(2, at_least=1, doc="Noisy views of each example, averaged inside its one contribution")
    smoothing_noise: str = setting("gaussian", choices=("gaussian", "laplace"), doc="The noise of views and of votes")
    smoothing_stddev: float = setting(0.0, at_least=0, doc="Its standard deviation over [-1, 1]; 0 for no votes")
    attack_steps: int = setting(3, at_least=1, doc="Gradient steps to each adversarial point")
    warm_up: float = setting(0.2, at_least=0, at_most=1, doc="Share of the steps on plain cross-entropy")
    ramp: float = setting(0.5, at_least=0, at_most=1, doc="Share of the steps over which radius and weights grow")

    @property
    def noise(self) -> SmoothingNoise | None:
        return smoothing_noise(self.smoothing_noise, self.smoothing_stddev)

    def objective(self, attack_chunk: int) -> Objective:
        weighted: tuple[tuple[float, Term], ...] = (
            (self.natural_weight, CrossEntropy()),
            (self.certified_weight, Certified(self.radius)),
            (self.adversarial_weight, own_adversarial(self.radius, self.attack_steps, attack_chunk)),
            (self.views_weight, noisy_views(self.smoothing_noise, self.smoothing_stddev, self.num_views)),
            (self.reconstruction_weight, Reconstruction()),
        )
        return Objective(tuple(pair for pair in weighted if pair[0]), Ramp(self.warm_up, self.ramp))
