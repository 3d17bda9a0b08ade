"""Certificates that are wrong on purpose, each by one known mistake, and benches on which the mistake shows.

An audit that finds nothing says little unless it is known to find what is there. On every bench the right certificate
is nearly tight: the decision boundary is a hyperplane, so how far a label really holds is known in closed form, and a
radius that claims too much can be broken. The sound twin sits on the same network and inputs and must pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from stobatch.attacks.expectation import Sample
from stobatch.auditing.vote_counts import VoteCounts, count, counter_of
from stobatch.bounds.certifier import BoundCertificates
from stobatch.config import CertificationConfig
from stobatch.models import ConvEncoder, Head, Layered, Network
from stobatch.published.monte_carlo import Tally
from stobatch.published.radius import published_robustness_epsilon, radius_factor
from stobatch.published.verified_inference import PublishedCertificates, VerifiedInference
from stobatch.sound.verifiers import BoundsVerifier, VotesVerifier
from stobatch.types import PAPER_RANGE, Norm
from stobatch.verifier import CertificateKind, Verifier
from stobatch.votes.counting import VoteCertificates, VoteSettings
from stobatch.votes.noise import GaussianNoise, split_generator


class SummedSizes(VerifiedInference):
    """κ + φ in place of κφ/(κ + φ): as if the noises of two passes hid a perturbation together.

    With the right sensitivities and the noise that is really drawn, so that this is the only mistake.
    """

    @property
    def kinds(self) -> tuple[CertificateKind, CertificateKind]:
        published, corrected = super().kinds
        return published, replace(corrected, name="summed sizes")

    def judge(self, tally: Tally) -> PublishedCertificates:
        verdicts, rule = super().judge(tally), self.corrected
        epsilon = published_robustness_epsilon(verdicts.score_lower, verdicts.runner_up_upper)
        kappa = radius_factor(rule.fresh_input_scale, rule.at_input.l1, epsilon)
        phi = radius_factor(rule.fresh_hidden_scale, rule.at_hidden.l1, epsilon)
        return replace(verdicts, corrected_radius=kappa + phi)


class NominalNoise(VerifiedInference):
    """The corrected rule for the noise of training, although what is drawn at inference is ψ times smaller."""

    @property
    def kinds(self) -> tuple[CertificateKind, CertificateKind]:
        published, corrected = super().kinds
        return published, replace(corrected, name="nominal noise")

    def judge(self, tally: Tally) -> PublishedCertificates:
        verdicts = super().judge(tally)
        return replace(verdicts, corrected_radius=self.config.resampling_shrinkage * verdicts.corrected_radius)


@final
class ObservedFrequency(Verifier):
    """Votes that take how often a class was named for how probable it is, without any confidence bound."""

    def __init__(self, votes: VotesVerifier) -> None:
        self.votes, self.network = votes, votes.network

    @property
    def kinds(self) -> tuple[CertificateKind, ...]:
        return (replace(self.votes.kinds[0], name="observed frequency"),)

    def samples(self) -> dict[str, Sample]:
        return self.votes.samples()

    def verify(self, inputs: Tensor, generator: torch.Generator) -> VoteCertificates:
        settings, everyone = self.votes.settings, np.arange(len(inputs))
        counter = counter_of(self.votes, inputs)
        choosing, counting = split_generator(generator)
        label = counter.votes(everyone, settings.selection_draws, choosing).argmax(1)
        top = counter.hits(everyone, label, settings.draws, counting) / settings.draws
        num_inputs = prod(inputs.shape[1:])
        return VoteCertificates(
            label.cpu().numpy(),
            abstain=top <= 0.5,
            top_lower=top,
            draws=np.full(len(inputs), settings.draws),
            range=PAPER_RANGE,
            failure_probability=settings.failure_probability,
            **{f"radius_{norm}": self.votes.noise.radius(norm, top, 1 - top, num_inputs) for norm in Norm},
        )


@count.register
def _(verifier: ObservedFrequency, points: Tensor, draws: int, generator: torch.Generator) -> VoteCounts:
    return count(verifier.votes, points, draws, generator)


@final
class EnlargedBounds(Verifier):
    """Bounds whose radius is half as large again as what was proved."""

    factor = 1.5

    def __init__(self, bounds: BoundsVerifier) -> None:
        self.bounds, self.network = bounds, bounds.network

    @property
    def kinds(self) -> tuple[CertificateKind, ...]:
        return (replace(self.bounds.kinds[0], name="enlarged bounds"),)

    def verify(self, inputs: Tensor, generator: torch.Generator) -> BoundCertificates:
        proved = self.bounds.verify(inputs, generator)
        return replace(proved, radius=self.factor * proved.radius)


@dataclass(frozen=True)
class Bench:
    """A broken verifier, its sound twin, and inputs for both; the last kind of each is the one to try."""

    broken: Verifier
    sound: Verifier
    inputs: Tensor
    reach: Tensor
    """How far each input's label really holds, in closed form."""


_NUM_INPUTS = 40


def summed_sizes_bench(seed: int) -> Bench:
    """Return a bench with one input value, where the losses of Laplace noise are exact.

    The vote is the sign of 2x + ν + ω, so a label holds up to |x|. With all the draws in the world κ + φ would be 1.7
    to 2 times that.
    """
    network, generator = _averaging(side=1, weight=1.0), torch.Generator().manual_seed(seed)
    config = CertificationConfig(noise_draws=400, resampling_shrinkage=1.0, failure_probability=0.01)
    values = _on_either_side(0.05, 0.25, generator)
    return Bench(
        SummedSizes(network, config, input_noise_scale=0.1, hidden_noise_scale=0.2),
        VerifiedInference(network, config, input_noise_scale=0.1, hidden_noise_scale=0.2),
        values.reshape(-1, 1, 1, 1),
        values.abs(),
    )


def nominal_noise_bench(seed: int) -> Bench:
    """Return a bench with the sign of the mean of 16 values, a hidden neuron each: a label holds up to |mean|.

    With all the draws in the world the right radius would be 0.56 of that; the broken one is ψ = 4 times as large.
    """
    network, generator = _averaging(side=4, weight=2.0), torch.Generator().manual_seed(seed)
    config = CertificationConfig(noise_draws=400, resampling_shrinkage=4.0, failure_probability=0.01)
    mean = _on_either_side(0.02, 0.05, generator)
    pattern = torch.rand(_NUM_INPUTS, 1, 4, 4, generator=generator)
    return Bench(
        NominalNoise(network, config, input_noise_scale=0.4, hidden_noise_scale=0.8),
        VerifiedInference(network, config, input_noise_scale=0.4, hidden_noise_scale=0.8),
        pattern - pattern.mean((1, 2, 3), keepdim=True) + mean.reshape(-1, 1, 1, 1),
        mean.abs(),
    )


def observed_frequency_bench(seed: int) -> Bench:
    """Return a bench with a linear classifier, Gaussian noise, 60 draws: in l2 a label holds as far as p_A proves."""
    stddev, generator = 0.5, torch.Generator().manual_seed(seed)
    normal = nn.functional.normalize(torch.randn(16, generator=generator), dim=0)
    network = _linear(4 * torch.stack([normal, -normal]))
    settings = VoteSettings(failure_probability=0.001, selection_draws=50, draws=60)
    along = _on_either_side(0.4 * stddev, 1.4 * stddev, generator)
    across = 0.2 * torch.rand(_NUM_INPUTS, 16, generator=generator)
    inputs = across + torch.outer(along - across @ normal, normal)
    votes = VotesVerifier(network, network, GaussianNoise(stddev), Norm.L2, (), settings, stop_early=False)
    return Bench(ObservedFrequency(votes), votes, inputs, along.abs())


def enlarged_bounds_bench(seed: int) -> Bench:
    """Return a bench with a linear classifier of three classes: bounds are exact up to the 10% between radii."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 16, generator=generator)
    network = _linear(weight)
    inputs = 0.8 * (2 * torch.rand(_NUM_INPUTS, 16, generator=generator) - 1)
    bounds = BoundsVerifier(network, Norm.LINF, [0.005 * 1.1**i for i in range(45)], memory_mb=64)
    scores = inputs @ weight.T
    lead = scores.amax(1, keepdim=True) - scores
    slope = (weight[scores.argmax(1)].unsqueeze(1) - weight).abs().sum(2)
    return Bench(EnlargedBounds(bounds), bounds, inputs, torch.where(slope > 0, lead / slope, torch.inf).amin(1))


CONTROLS: dict[str, Callable[[int], Bench]] = {
    "summed sizes": summed_sizes_bench,
    "nominal noise": nominal_noise_bench,
    "observed frequency": observed_frequency_bench,
    "enlarged bounds": enlarged_bounds_bench,
}
"""Makes the bench of each mistake from a seed."""


def _on_either_side(nearest: float, furthest: float, generator: torch.Generator) -> Tensor:
    """Draw distances to the boundary, with the sign of the side."""
    side = 2.0 * torch.randint(0, 2, (_NUM_INPUTS,), generator=generator) - 1
    return side * (nearest + (furthest - nearest) * torch.rand(_NUM_INPUTS, generator=generator))


def _averaging(side: int, weight: float) -> Network:
    """Return a network of two classes by the sign of the mean: every hidden neuron is one input value, scaled."""
    encoder = ConvEncoder((1, side, side), 1, 1, stride=1, padding=0)
    encoder.weight.data.fill_(weight)
    output = nn.Linear(1, 2, bias=False)
    output.weight.data.copy_(torch.tensor([[5.0], [-5.0]]))
    mean = nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(1))
    return Network(encoder, Head(nn.Identity(), mean, output)).requires_grad_(False)


def _linear(weight: Tensor) -> Layered:
    classes, values = weight.shape
    layer = nn.Linear(values, classes)
    layer.weight.data.copy_(weight)
    layer.bias.data.zero_()
    return Layered([layer], (values,)).requires_grad_(False)
