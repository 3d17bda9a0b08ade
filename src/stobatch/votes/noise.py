"""Smoothing noise at the input, or at the first layer too, and the radii that it proves for any classifier behind it.

The classifier behind the noise computes from noisy values only, which is post-processing. So a radius is a product: how
large a perturbation the noise hides per unit of a privacy measure (`RadiusFactors`), times how much of that measure the
class probabilities withstand (`votes.margins`). There are two measures, and the larger radius counts:

- **pure DP**: Lap(b) noise shifted by a is at ε = ‖a‖₁/b; the top class withstands ε up to L*;
- **Gaussian DP**: N(0, σ²) noise shifted by a is ‖a‖₂/σ standard deviations away, Lap(b) noise at most as far as a
  Gaussian with σ = b√(2/π); the top class withstands Z standard deviations.

All noise belongs to one forward pass. For products of two passes see `published.radius.CorrectedRule`: an attacker who
observes two passes learns more, so they prove less than one pass with the same noise at both places.
Proofs: docs/guarantees/votes.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import hypot, isfinite, log, prod
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from stobatch.attacks.expectation import Sample
from stobatch.dp.noise import laplace
from stobatch.errors import ModelError, SettingError
from stobatch.models import AffineEncoder, Classifier, from_layers
from stobatch.types import Norm
from stobatch.votes.confidence import Floats
from stobatch.votes.margins import (
    LAPLACE_AS_GAUSSIAN,
    Shift,
    gaussian_margin,
    hidden_shift,
    input_shift,
    pure_robustness_epsilon,
)

_INSIDE = 1 - 1e-9
"""The theorems hold strictly inside the radius; shrinking it by a billionth makes them hold on the closed ball."""
_REFINEMENTS = 9


@dataclass(frozen=True)
class RadiusFactors:
    """Size of a perturbation per unit of pure-DP ε, and per Gaussian standard deviation, that it costs at most."""

    per_epsilon: float
    per_deviation: float


class SmoothingNoise(ABC):
    """Fresh noise for every forward pass, at the input or behind the first affine layer.

    **Guarantee.** Let p_A be at most the probability that the classifier behind the noise predicts A, and p_B at least
    that of every other class. Within `radius` of the input A stays the most probable class. Noise, inputs and radii
    are all in the units of the input.
    """

    def noise_free(self, inputs: Tensor) -> Tensor:
        """Return the values that noise is added to: the inputs, or the first layer's outputs."""
        return inputs

    @abstractmethod
    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return independent draws to add to `noise_free`; `shape` is the number of draws, then the input's shape."""

    @abstractmethod
    def factors(self, norm: Norm, num_inputs: int) -> RadiusFactors:
        """Return the factors for perturbations in this norm; 0 where a measure does not apply."""

    def radius(self, norm: Norm, top_lower: Floats, runner_up_upper: Floats, num_inputs: int) -> Floats:
        """Return the largest radius that is proved, and 0 where p_A <= p_B."""
        factors = self.factors(norm, num_inputs)
        by_epsilon = factors.per_epsilon * pure_robustness_epsilon(top_lower, runner_up_upper)
        by_deviation = factors.per_deviation * gaussian_margin(top_lower, runner_up_upper)
        return np.where(top_lower > runner_up_upper, _INSIDE * np.maximum(by_epsilon, by_deviation), 0.0)

    def required_top_probability(self, size: float, norm: Norm, num_inputs: int) -> float:
        """Return the smallest p_A above 1/2 that proves a radius of `size` with p_B = 1 - p_A; 1 where none does."""
        # The radius increases with p_A: each round narrows [low, high] to one of 63 cells, and `high` always suffices.
        low, high = 0.5, 1.0
        for _ in range(_REFINEMENTS):
            tops = np.linspace(low, high, 64)[1:]
            enough = (tops > 0.5) & (self.radius(norm, tops, 1 - tops, num_inputs) >= size)
            if not enough.any():
                return high
            first = int(enough.argmax())
            low, high = (float(tops[first - 1]) if first else low), float(tops[first])
        return high


@dataclass(frozen=True)
class GaussianNoise(SmoothingNoise):
    """N(0, stddev²) on every input value: radius σZ in l2, exact for half-spaces (Cohen et al., 2019).

    >>> noise = GaussianNoise(0.5)
    >>> float(noise.radius(Norm.L2, np.array(0.99865), np.array(0.00135), 784).round(3))
    1.5
    """

    stddev: float

    def __post_init__(self) -> None:
        _require_positive(stddev=self.stddev)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator) * self.stddev

    def factors(self, norm: Norm, num_inputs: int) -> RadiusFactors:
        return RadiusFactors(0.0, self.stddev / input_shift(norm, num_inputs).l2)


@dataclass(frozen=True)
class LaplaceNoise(SmoothingNoise):
    """Lap(scale) on every input value: radius b L* in l1 (Teng et al., 2020), b √(2/π) Z in l2."""

    scale: float

    def __post_init__(self) -> None:
        _require_positive(scale=self.scale)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return laplace(shape, self.scale, generator)

    def factors(self, norm: Norm, num_inputs: int) -> RadiusFactors:
        shift = input_shift(norm, num_inputs)
        return RadiusFactors(self.scale / shift.l1, LAPLACE_AS_GAUSSIAN * self.scale / shift.l2)


@dataclass(frozen=True, eq=False)
class HiddenNoise(SmoothingNoise, ABC):
    """Noise at the input and, in the same pass, at the first hidden layer: the classifier gets A(x + ν) + ω + const.

    The layer is copied, so that later training cannot change the weights that a certificate is about.

    **Guarantee.** A perturbation a is a shift of (ν, ω) by (b, A(a - b)) for any b, since the classifier depends on
    Aν + ω alone. The best b for squares gives (n_x r and n_h r bound ‖a‖₂ and ‖Aa‖₂):

        min_b ‖b‖²/σ_x² + ‖A(a - b)‖²/σ_h²  =  Σ_k a_k² s_k²/(σ_x² s_k² + σ_h²)     (in A's singular directions)
                                            <= 1/(σ_x²/‖a‖² + σ_h²/‖Aa‖²)           (concave in s_k²: Jensen)

    so both noises act like one with variance (σ_x/n_x)² + (σ_h/n_h)². In l2 that is σ_x² + σ_h²/‖A‖₂², which is tight.
    ‖A‖ enters as an upper bound over all maps and positions (`AffineEncoder.operator_norms`).
    """

    encoder: AffineEncoder
    bias: Tensor | None
    at_input: float
    at_hidden: float

    def __post_init__(self) -> None:
        _require_positive(at_input=self.at_input, at_hidden=self.at_hidden)
        object.__setattr__(self, "encoder", self.encoder.copy().requires_grad_(False))

    @classmethod
    def behind(
        cls, layer: nn.Conv2d | nn.Linear, input_shape: tuple[int, ...], *, at_input: float, at_hidden: float
    ) -> Self:
        """Return the noise for a classifier that starts with `layer`; `SmoothedClassifier` takes what follows it."""
        # The adapter checks the layer and computes its norms; the mean and the last layer only complete a network.
        mean = nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(1))
        encoder = from_layers(layer, mean, nn.Linear(1, 1), input_shape).encoder.to(layer.weight)
        encoder.weight.data.copy_(layer.weight.data)
        positions = [1] * (len(encoder.hidden_shape) - 1)
        bias = None if layer.bias is None else layer.bias.detach().clone().reshape(-1, *positions)
        return cls(encoder, bias, at_input, at_hidden)

    def noise_free(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(inputs)
        return hidden if self.bias is None else hidden + self.bias

    @torch.no_grad()
    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        weight = self.encoder.weight
        at_input = self._unit_noise(shape, generator).mul_(self.at_input).to(weight)
        at_hidden = self._unit_noise((shape[0], *self.encoder.hidden_shape), generator).mul_(self.at_hidden).to(weight)
        encoded: Tensor = self.encoder(at_input)
        return encoded + at_hidden

    @abstractmethod
    def _unit_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return noise of scale 1."""

    @cached_property
    def _hidden_shifts(self) -> dict[Norm, Shift]:
        return {norm: hidden_shift(norm, self.encoder) for norm in Norm}

    def _shifts(self, norm: Norm, num_inputs: int) -> tuple[Shift, Shift]:
        if num_inputs != prod(self.encoder.input_shape):
            raise ModelError(
                f"the first layer takes {prod(self.encoder.input_shape)} values, the inputs have {num_inputs}.",
                remedy="Give inputs of the shape that the noise was made for.",
            )
        at_input, at_hidden = input_shift(norm, num_inputs), self._hidden_shifts[norm]
        return at_input, Shift(max(at_hidden.l1, _TINY), max(at_hidden.l2, _TINY))

    def _deviations(self, at_input: Shift, at_hidden: Shift) -> float:
        return hypot(self.at_input / at_input.l2, self.at_hidden / at_hidden.l2)


_TINY = 1e-150
"""Replaces a norm of 0: a layer of zero weights hides every perturbation."""


class HiddenGaussian(HiddenNoise):
    """Gaussian noise at both places of one pass: radius Z √(σ_x² + σ_h²/‖A‖₂²) in l2."""

    def _unit_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator)

    def factors(self, norm: Norm, num_inputs: int) -> RadiusFactors:
        return RadiusFactors(0.0, self._deviations(*self._shifts(norm, num_inputs)))


class HiddenLaplace(HiddenNoise):
    """Laplace noise at both places of one pass.

    Gaussian DP: variances add as for Gaussian noise, with σ = √(2/π) b at each place. Pure DP: coordinate i of the
    perturbation may be shifted at the place where it costs less, 1/b_x or c_i/b_h per unit with c_i the l1 norm of A's
    column i; or all of it at one place.
    """

    def _unit_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return laplace(shape, 1.0, generator)

    def factors(self, norm: Norm, num_inputs: int) -> RadiusFactors:
        at_input, at_hidden = self._shifts(norm, num_inputs)
        costs = np.minimum(1 / self.at_input, self._column_sums / self.at_hidden)
        # max ⟨costs, |a|⟩ over ‖a‖ <= 1 is the dual norm of the costs.
        largest = {Norm.L1: costs.max(), Norm.L2: np.linalg.norm(costs), Norm.LINF: costs.sum()}[norm]
        per_epsilon = max(1 / max(float(largest), _TINY), self.at_input / at_input.l1, self.at_hidden / at_hidden.l1)
        return RadiusFactors(per_epsilon, LAPLACE_AS_GAUSSIAN * self._deviations(at_input, at_hidden))

    @cached_property
    @torch.no_grad()
    def _column_sums(self) -> Floats:
        """Return ‖A e_i‖₁ for every input value i, over all maps and positions."""
        absolute = self.encoder.absolute().double().cpu()
        sums: Floats = absolute.decode(torch.ones(1, *self.encoder.hidden_shape, dtype=torch.float64)).flatten().numpy()
        return sums


def _require_positive(**sizes: float) -> None:
    for name, size in sizes.items():
        if not (isfinite(size) and size > 0):
            raise SettingError(
                f"{name}={size} is not a positive number.",
                why="Without noise nothing is proved.",
                remedy="Use a number above 0.",
            )


Streams = tuple[torch.Generator, torch.Generator]


def split_generator(generator: torch.Generator) -> Streams:
    """Return two independent streams, so that draws of one do not depend on how many the other has made."""
    seeds = torch.randint(2**62, (2,), generator=generator).tolist()
    return torch.Generator().manual_seed(seeds[0]), torch.Generator().manual_seed(seeds[1])


SHARPNESS = 4.0
"""The factor on the logits that makes an attacker's soft votes approximate hard ones."""


def vote_samples(
    network: Classifier, behind_noise: Callable[[Tensor], Tensor], noise: SmoothingNoise
) -> dict[str, Sample]:
    """Return two differentiable surrogates of a vote, for attackers: log mean probabilities over fresh noise.

    "score" averages plain probabilities. "vote" averages sharpened ones: each draw gives nearly all of its weight to
    the predicted class, as in the count.
    """

    def averaged(sharpness: float) -> Sample:
        def sample(draws: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
            shifts = noise.draw((draws, *network.input_shape), generator).to(network.device)

            def scores(points: Tensor) -> Tensor:
                noisy = (noise.noise_free(points).unsqueeze(0) + shifts.unsqueeze(1)).flatten(0, 1)
                logs = (sharpness * behind_noise(noisy)).log_softmax(1).reshape(draws, len(points), -1)
                return logs.logsumexp(0) - log(draws)

            return scores

        return sample

    return {"score": averaged(1.0), "vote": averaged(SHARPNESS)}
