"""The sound method's settings, and the mixture of losses that they describe."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
from torch import Tensor

from stobatch.attacks import Ball, craft, paper_ensemble
from stobatch.certification import GaussianNoise, LaplaceNoise, SmoothingNoise
from stobatch.config import MethodConfig
from stobatch.models import Classifier
from stobatch.objectives.private import (
    Adversarial,
    Certified,
    Coins,
    CrossEntropy,
    NoisyViews,
    Objective,
    Ramp,
    Reconstruction,
    Term,
)
from stobatch.settings import setting
from stobatch.types import PAPER_RANGE, Norm, Radius


@dataclass(frozen=True)
class SoundConfig(MethodConfig, name="sound"):
    """Settings of the sound method. `epsilon` and `radius` are the knobs; the rest has defaults that work."""

    epsilon: float = setting(1.0, above=0, doc="The privacy budget ε that training must not exceed")
    delta: float = setting(1e-5, above=0, below=1, doc="The δ of the budget; below one over the number of examples")
    radius: float = setting(0.2, at_least=0, at_most=2, doc="What training aims to certify, l-infinity over [-1, 1]")
    expected_batch_size: int = setting(4096, at_least=1, doc="Examples that a Poisson sample has on average")
    clip_norm: float = setting(1.0, above=0, doc="The norm C that each example's gradient is clipped to")
    momentum: float = setting(0.0, at_least=0, below=1, doc="Of the descent")
    average_decay: float = setting(0.99, at_least=0, below=1, doc="Of the moving average that becomes the model")
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
    tuned_on_private_data: bool = setting(
        True, doc="Whether these settings were chosen by looking at the training data; said in the guarantee"
    )

    @property
    def noise(self) -> SmoothingNoise | None:
        """What votes are taken under."""
        if not self.smoothing_stddev:
            return None
        gaussian = self.smoothing_noise == "gaussian"
        return GaussianNoise(self.smoothing_stddev) if gaussian else LaplaceNoise(self.smoothing_stddev / sqrt(2))

    def objective(self, attack_chunk: int) -> Objective:
        """The mixture of losses that these settings describe."""
        weighted: tuple[tuple[float, Term], ...] = (
            (self.natural_weight, CrossEntropy()),
            (self.certified_weight, Certified(self.radius)),
            (self.adversarial_weight, Adversarial(self.radius, partial(_attacked, self.attack_steps, attack_chunk))),
            (self.views_weight, NoisyViews(partial(view_noise, self), self.num_views)),
            (self.reconstruction_weight, Reconstruction()),
        )
        return Objective(tuple(pair for pair in weighted if pair[0]), Ramp(self.warm_up, self.ramp))


def view_noise(config: SoundConfig, shape: tuple[int, ...], coins: Coins) -> Tensor:
    """Noise for views, from normal numbers: a Laplace number is a normal one with an exponential variance."""
    normal = coins(shape) * config.smoothing_stddev
    if config.smoothing_noise == "gaussian":
        return normal
    # √E with E exponential of mean 1: half the squared length of a normal vector in the plane.
    return normal * ((coins(shape).square() + coins(shape).square()) / 2).sqrt()


def _attacked(steps: int, chunk: int, network: Classifier, inputs: Tensor, labels: Tensor, radius: float) -> Tensor:
    """Each example's own adversarial point; the starting point is the example, so that nothing is drawn."""
    if not len(inputs) or not radius:
        return inputs
    ball = Ball.around(inputs, Radius(radius, Norm.LINF, PAPER_RANGE))

    def scores(points: Tensor) -> Tensor:
        """The network's; an example whose gradient is no number stays where it is, and stops nobody else."""
        watched = points.clone()
        watched.register_hook(lambda gradient: gradient.sign().nan_to_num())  # type: ignore[no-untyped-call]
        found: Tensor = network(watched)
        return found

    return craft(scores, ball, paper_ensemble(("ifgsm",), steps), torch.Generator(), labels=labels, chunk=chunk)
