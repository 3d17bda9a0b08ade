"""Settings of DP-SGD methods, of the sound method, and the objectives that they describe."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from math import sqrt
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from stobatch.attacks import Ball, craft, paper_ensemble
from stobatch.config import MethodConfig
from stobatch.models import Classifier
from stobatch.models.validators import keeps_nothing
from stobatch.settings import setting
from stobatch.sound.losses import (
    CCIBP,
    IBP,
    SABR,
    VIEWS,
    Adversarial,
    CrossEntropy,
    Margin,
    NoisyViews,
    NormalSampler,
    Objective,
    Ramp,
    RandomViews,
    Reconstruction,
    Term,
)
from stobatch.types import PAPER_RANGE, Norm, Radius
from stobatch.votes.noise import GaussianNoise, LaplaceNoise, SmoothingNoise

BOX_LOSSES = ("box", "sabr", "cc_ibp", "mtl_ibp")


class DpSgdSettings(MethodConfig):
    """Privacy budget, sampling and optimiser of DP-SGD; subclasses add the losses."""

    epsilon: float = setting(1.0, above=0, doc="The privacy budget ε that training must not exceed")
    delta: float = setting(1e-5, above=0, below=1, doc="The δ of the budget; below one over the number of examples")
    batch_size: int = setting(
        4096, at_least=1, doc="Examples that a Poisson sample has on average", stored="expected_batch_size"
    )
    clip_norm: float = setting(1.0, above=0, doc="The norm C that each example's gradient is clipped to")
    momentum: float = setting(0.0, at_least=0, below=1, doc="Of the descent")
    average_decay: float = setting(0.99, at_least=0, below=1, doc="Of the moving average that becomes the model")
    tuned_on_private_data: bool = setting(
        True, doc="Whether these settings were chosen by looking at the training data; said in the guarantee"
    )

    spare_steps: int = setting(
        0,
        at_least=0,
        doc="Steps that may be made again within ε after a crash on a GPU, or on another machine: noise is chosen for "
        "as many more",
        added_later=True,
    )

    noise_multiplier: float | None = setting(
        None,
        at_least=0.1,
        at_most=1e4,
        doc="The noise's standard deviation over clip_norm, σ; unset, the smallest within epsilon. Given, ε follows "
        "from it, and more than epsilon is refused",
        added_later=True,
    )

    records_per_person: int = setting(
        4,
        at_least=1,
        at_most=1024,
        doc="Of data whose records have persons: how many records of a person a step draws at most; batch_size then "
        "counts persons",
        added_later=True,
    )

    augmentations: tuple[str, ...] | None = setting(
        None,
        choices=VIEWS,
        doc="What each view of an example is made by, anew in every step: a random shift, a mirror image, "
        "noise; unset, the example as it is",
        added_later=True,
    )
    augmented_views: int = setting(
        1,
        at_least=1,
        at_most=1024,
        doc="Such views of each example, averaged inside its one contribution",
        added_later=True,
    )
    crop_shift: int = setting(
        2, at_least=0, doc="Of augmentations=crop: pixels by which a view is moved at most", added_later=True
    )
    augmentation_stddev: float = setting(
        0.1, at_least=0, doc="Of augmentations=noise: its standard deviation over [-1, 1]", added_later=True
    )
    class_weights: tuple[Annotated[float, Field(gt=0)], ...] | None = setting(
        None,
        doc="Weights of the classes in the loss, in their order, before clipping; public numbers, never counted in the "
        "training data. Unset, all alike",
        added_later=True,
    )

    @property
    def random_views(self) -> RandomViews:
        """Return the random views of each example, drawn before everything else in a step."""
        return RandomViews(self.augmentations or (), self.augmented_views, self.crop_shift, self.augmentation_stddev)

    @abstractmethod
    def objective(self, attack_chunk: int) -> Objective:
        """Return the weighted losses of these settings; attacks pass at most `attack_chunk` rows at once."""

    @property
    def noise(self) -> SmoothingNoise | None:
        """Return the input noise of votes; None where the method has no votes."""
        return None


def smoothing_noise(kind: str, stddev: float) -> SmoothingNoise | None:
    """Return noise of the given kind and standard deviation; None for 0."""
    if not stddev:
        return None
    return GaussianNoise(stddev) if kind == "gaussian" else LaplaceNoise(stddev / sqrt(2))


def noisy_views(kind: str, stddev: float, num_views: int, radius: float = 0.0, steps: int = 1) -> NoisyViews:
    """Return the loss on noisy views of each example, moved adversarially if there is a radius."""
    return NoisyViews(partial(view_noise, kind, stddev), num_views, radius, steps)


def view_noise(kind: str, stddev: float, shape: tuple[int, ...], normal: NormalSampler) -> Tensor:
    """Return Gaussian or Laplace noise of this standard deviation for views."""
    gaussian = normal(shape) * stddev
    if kind == "gaussian":
        return gaussian
    # A Laplace number is a normal one with an exponential variance E, and E of mean 1 is (Z₁² + Z₂²)/2.
    return gaussian * ((normal(shape).square() + normal(shape).square()) / 2).sqrt()


def adversarial_term(radius: float, steps: int, attack_chunk: int) -> Adversarial:
    """Return the loss at each example's own adversarial point."""
    return Adversarial(radius, partial(_craft_points, steps, attack_chunk))


def _craft_points(steps: int, chunk: int, network: Classifier, inputs: Tensor, labels: Tensor, radius: float) -> Tensor:
    """Return each example's own adversarial point by I-FGSM from the example itself, without random numbers."""
    if not len(inputs) or not radius:
        return inputs
    ball = Ball.around(inputs, Radius(radius, Norm.LINF, PAPER_RANGE))

    def scores(points: Tensor) -> Tensor:
        """Return the network's scores; an example with a NaN gradient stays where it is, and stops no other."""
        leaf = points.clone()
        leaf.register_hook(lambda gradient: gradient.sign().nan_to_num())  # type: ignore[no-untyped-call]
        logits: Tensor = network(leaf)
        return logits

    return craft(
        *(scores, ball, paper_ensemble(("ifgsm",), steps), torch.Generator()),
        labels=labels, chunk=chunk, concurrent=keeps_nothing(network),
    )  # fmt: skip


class SoundConfig(DpSgdSettings, name="sound"):
    """Settings of the sound method. Choose `epsilon` and `radius`; the rest has working defaults."""

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
    warm_up: float = setting(
        0.2,
        at_least=0,
        at_most=1,
        doc="Share of the steps on plain cross-entropy; training.warm_up is of the learning rate",
    )
    ramp: float = setting(0.5, at_least=0, at_most=1, doc="Share of the steps over which radius and weights grow")
    box_loss: str = setting(
        "box",
        choices=BOX_LOSSES,
        doc="What certified_weight is the weight of: the worst in the example's box; or less, by box_share: a smaller "
        "box around its own adversarial point (sabr), scores between that point's and the worst (cc_ibp), or the two "
        "losses (mtl_ibp)",
        added_later=True,
    )
    box_share: float = setting(
        0.5,
        above=0,
        at_most=1,
        doc="Of the other losses than `box`: how much of the box there is, in its radius (sabr), the scores (cc_ibp) "
        "or the weights (mtl_ibp); 1 is `box`, near 0 is the adversarial point alone",
        added_later=True,
    )
    margin_weight: float = setting(
        0.0,
        at_least=0,
        doc="Of cross-entropy on features of `scatter` that are moved against the example by radius, which is l2 then",
        added_later=True,
    )

    views_radius: float = setting(
        0.0,
        at_least=0,
        doc="Of noisy views: how far in l2 they are moved against the example first, all alike, by attack_steps steps",
        added_later=True,
    )

    @property
    def noise(self) -> SmoothingNoise | None:
        return smoothing_noise(self.smoothing_noise, self.smoothing_stddev)

    def objective(self, attack_chunk: int) -> Objective:
        weighted: tuple[tuple[float, Term], ...] = (
            (self.natural_weight, CrossEntropy()),
            *self._certified(attack_chunk),
            (self.adversarial_weight, adversarial_term(self.radius, self.attack_steps, attack_chunk)),
            (self.views_weight, self._views()),
            (self.reconstruction_weight, Reconstruction()),
            (self.margin_weight, Margin(self.radius)),
        )
        return Objective(tuple(pair for pair in weighted if pair[0]), Ramp(self.warm_up, self.ramp))

    def _views(self) -> NoisyViews:
        noise = self.smoothing_noise, self.smoothing_stddev
        return noisy_views(*noise, self.num_views, self.views_radius, self.attack_steps)

    def _certified(self, attack_chunk: int) -> Iterator[tuple[float, Term]]:
        """Yield the weighted terms that share certified_weight."""
        weight, share, box = self.certified_weight, self.box_share, IBP(self.radius)
        attacked = adversarial_term(self.radius, self.attack_steps, attack_chunk)
        if self.box_loss == "mtl_ibp":
            yield weight * share, box
            yield weight * (1 - share), attacked
        elif self.box_loss == "box":
            yield weight, box
        else:
            kind = SABR if self.box_loss == "sabr" else CCIBP
            yield weight, kind(self.radius, share, attacked.attack)
