"""What the published proof says is released: perturbed tuples, perturbed label coefficients, and a step on θ1.

The paper adds one draw of noise to everything. A constant that is added to all records moves the data set as a whole,
so every difference of two records is released as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.dp.noise import laplace
from stobatch.methods import Release, Tuples
from stobatch.models.affine import DenseEncoder
from stobatch.published.losses import reconstruction_gradient
from stobatch.published.plan import PublishedPlan
from stobatch.seeds import Seeds

_HIDDEN = 32
"""Neurons of the dense encoder whose step is looked at."""


def _further(found: Tensor, first: Tensor, second: Tensor) -> float:
    """Return how much nearer to the second than to the first."""
    return float((found - first).norm() - (found - second).norm())


@final
@dataclass(frozen=True)
class PerturbedInputs(Release):
    """x̄ = x + χ1/m, from which Algorithm 1 trains and crafts."""

    plan: PublishedPlan
    name = "perturbed inputs"
    source = "Lemma 3"
    attack = "the difference of two perturbed inputs, in which the noise cancels"

    def score(self, own: Tuples, pair: tuple[Tuples, Tuples], seeds: Seeds) -> float:
        noise = laplace(tuple(own.inputs.shape[1:]), self.plan.input_noise_scale, seeds.generator("noise", "input"))
        released = own.inputs + noise
        first, second = (tuples.inputs[-1] - tuples.inputs[0] for tuples in pair)
        return _further(released[-1] - released[0], first, second)


@final
@dataclass(frozen=True)
class LabelCoefficients(Release):
    """Σ h y_k + χ3 for each class k, for hidden values h that the proof calls public already."""

    plan: PublishedPlan
    name = "label coefficients"
    source = "Theorem 3"
    attack = "the difference of two classes' coefficients, in which the shared noise cancels"

    def score(self, own: Tuples, pair: tuple[Tuples, Tuples], seeds: Seeds) -> float:
        size, classes = self.plan.last_hidden_size, self.plan.num_classes
        hidden = torch.rand(len(own.labels), size, generator=torch.Generator().manual_seed(0)) * 2 - 1

        def coefficients(labels: Tensor) -> Tensor:
            return F.one_hot(labels, classes).float().t() @ hidden / self.plan.batch_size

        noise = laplace((size,), self.plan.label_noise_scale, seeds.generator("noise", "label"))
        released = coefficients(own.labels) + noise
        one, other = (int(tuples.labels[-1]) for tuples in pair)
        first, second = (coefficients(tuples.labels) for tuples in pair)
        return _further(released[other] - released[one], first[other] - first[one], second[other] - second[one])


@final
@dataclass(frozen=True)
class EncoderStep(Release):
    """∇R̄ of one batch at public first weights, for a dense encoder: the setting in which the paper proves Theorem 1.

    It equals -Cθ1 + uwᵀ, with C the scatter matrix of the raw batch and all the noise in u and w. So for the data that
    were used, and for no others, adding Cθ1 leaves a matrix of rank one.
    """

    plan: PublishedPlan
    name = "a step on θ1"
    source = "Theorem 1"
    attack = "a rank test: all noise lies in a matrix of rank one"

    def score(self, own: Tuples, pair: tuple[Tuples, Tuples], seeds: Seeds) -> float:
        shape = tuple(own.inputs.shape[1:])
        encoder = DenseEncoder(shape, _HIDDEN).double()
        encoder.weight.data = torch.randn(
            encoder.weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        encoder.limit_columns(self.plan.encoder_norm_bound)
        plan = replace(
            self.plan, inputs_per_neuron=prod(shape), neurons_per_map=_HIDDEN, batch_size=len(own.inputs),
            num_examples=len(own.inputs),
        )  # fmt: skip
        shift = laplace(shape, plan.input_noise_scale, seeds.generator("noise", "input")).double()
        hidden_shift = laplace((_HIDDEN,), plan.hidden_noise_scale, seeds.generator("noise", "hidden")).double()
        with torch.no_grad():
            noisy = own.inputs.double() + shift
            gradient = reconstruction_gradient(encoder, noisy, encoder(noisy) + hidden_shift)
            first, second = (self._second_singular(gradient, encoder, tuples) for tuples in pair)
        return first - second

    @staticmethod
    def _second_singular(gradient: Tensor, encoder: DenseEncoder, tuples: Tuples) -> float:
        flat = tuples.inputs.double().flatten(1)
        centred = flat - flat.mean(0)
        return float(torch.linalg.svdvals(gradient + encoder.weight @ (centred.t() @ centred))[1])
