"""From scores to a radius (Lemmas 1 and 5, Theorem 5, Corollary 1, Eq. 13): as published, and corrected.

Both rules see the same votes. The published one mixes units, counts one map of many and ignores that the fresh noise
is ψ times smaller than the noise it calculates with; the corrected one does not. The published condition asks for a
margin of e^{2ε}; the exact trade-off between the two hypotheses (`votes.margins`) asks for less.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, prod, sqrt

import numpy as np
from torch import Tensor

from stobatch.models import AffineEncoder
from stobatch.paper import implements
from stobatch.votes.confidence import Floats
from stobatch.votes.margins import (
    LAPLACE_AS_GAUSSIAN,
    Shift,
    gaussian_margin,
    half_log_ratio,
    pure_robustness_epsilon,
)


@implements(
    *("Lemma 1", "Eq. 2", "Eq. 3", "Eq. 4", "Eq. 10"),
    verdict="holds (PixelDP) for noise that is fresh at every invocation and scaled to the true sensitivity.",
)
def is_robust(score_lower: float, runner_up_upper: float, robustness_epsilon: float, delta: float = 0.0) -> bool:
    """Return Ê_lb > e^{2ε_r} max Ê_ub + (1 + e^{ε_r}) δ_r: no perturbation in the unit ball changes the prediction."""
    needed = exp(2 * robustness_epsilon) * runner_up_upper + (1 + exp(robustness_epsilon)) * delta
    return score_lower > needed


@implements("Lemma 5", verdict="holds for separate passes with independent fresh noise: the tuple is (Σ ε_s)-DP.")
def composed_epsilon(epsilons: tuple[float, ...]) -> float:
    """Return Σ ε_s, what bounds the expected value of any bounded function of S independent mechanisms."""
    return sum(epsilons)


@implements("Eq. 11", verdict="a definition; the product stays in [0, 1].")
def product_score(*scores: Tensor) -> Tensor:
    """Return f(M_1, ..., M_S | x): the product of the scores of S separately randomised passes."""
    product = scores[0]
    for score in scores[1:]:
        product = product * score
    return product


@implements(
    *("Theorem 5", "Eq. 12", "Eq. 32", "Eq. 33"),
    verdict="holds in form, for the true expectations; with expected products the composed radius lies between the "
    "two single ones, so composing never helps there.",
)
def published_robustness_epsilon(score_lower: Floats, runner_up_upper: Floats) -> Floats:
    """Return the largest Σ ε_s for which Ê_lb > e^{2 Σ ε_s} max Ê_ub: half the log-ratio, at least 0."""
    return half_log_ratio(score_lower, runner_up_upper)


def radius_factor(noise_scale: float, attack_sensitivity: float, robustness_epsilon: Floats) -> Floats:
    """Return κ (input) or φ (hidden): the applied noise in units of the robustness noise Δ_r/ε_r."""
    return noise_scale * robustness_epsilon / attack_sensitivity


@implements(
    *("Corollary 1", "Eq. 34"),
    verdict="correct algebra for two independent passes; the sensitivities put into it are not.",
)
def composed_radius(input_radius_factor: Floats, hidden_radius_factor: Floats) -> Floats:
    """Return κφ/(κ + φ), and 0 where both are 0."""
    total = input_radius_factor + hidden_radius_factor
    return np.divide(input_radius_factor * hidden_radius_factor, total, out=np.zeros_like(total), where=total > 0)


@dataclass(frozen=True)
class PublishedRule:
    """Eq. 13 with the paper's sensitivities: Δ_r^x = μ d and Δ_r^h = β ‖θ1‖∞.

    The noise scales are the nominal ones, Δ_R/(mε1) and 2Δ_R/(mε1), for any ψ.
    """

    input_noise_scale: float
    hidden_noise_scale: float
    num_inputs: int
    hidden_attack_sensitivity: float

    @classmethod
    def of(cls, encoder: AffineEncoder, input_noise_scale: float, hidden_noise_scale: float) -> PublishedRule:
        sensitivity = encoder.neurons_per_map * encoder.max_row_norm()
        return cls(input_noise_scale, hidden_noise_scale, prod(encoder.input_shape), sensitivity)

    @implements(
        "Eq. 13",
        verdict="unsound: Δ_r^x is for a ball of size μ and Δ_r^h for a ball of size 1, one map of many is counted, "
        "and the noise is ψ times smaller than assumed; a counterexample is in the tests.",
    )
    def radius(self, score_lower: Floats, runner_up_upper: Floats, attack_radius: float) -> Floats:
        """Return (κφ/(κ+φ))_max; the paper calls an input robust when this is at least the attack radius."""
        epsilon = published_robustness_epsilon(score_lower, runner_up_upper)
        kappa = radius_factor(self.input_noise_scale, attack_radius * self.num_inputs, epsilon)
        phi = radius_factor(self.hidden_noise_scale, self.hidden_attack_sensitivity, epsilon)
        return composed_radius(kappa, phi)

    def largest_attack(self, score_lower: Floats, runner_up_upper: Floats) -> Floats:
        """Return the largest attack radius that passes the rule: its radius falls as the attack grows."""
        noise = self.input_noise_scale * published_robustness_epsilon(score_lower, runner_up_upper)
        # κφ/(κ+φ) = b ε_r / (μ d + (b/b_h) Δ_h) >= μ  is a quadratic in μ.
        half = self.hidden_attack_sensitivity * self.input_noise_scale / self.hidden_noise_scale
        size: Floats = (-half + np.sqrt(half**2 + 4 * self.num_inputs * noise)) / (2 * self.num_inputs)
        return size


@dataclass(frozen=True)
class CorrectedRule:
    """The radius that the same votes really prove, for two passes with fresh Laplace noise.

    **Guarantee.** With p_A a lower bound on the expected score of A and p_B an upper bound on every other, no
    perturbation up to the radius changes the class with the largest expected score. Two proofs, the larger
    radius counts: pure DP (losses add up linearly, limit L*), and Gaussian DP (each Lap(b) coordinate is at least as
    private as a Gaussian of deviation b√(2/π), so shifts add up in squares, limit Z). The scales are those of the
    fresh noise alone: the fixed part χ1, χ2 is a constant and hides nothing.
    """

    fresh_input_scale: float
    fresh_hidden_scale: float
    at_input: Shift
    at_hidden: Shift

    def radius(self, score_lower: Floats, runner_up_upper: Floats) -> Floats:
        b_x, b_h = self.fresh_input_scale, self.fresh_hidden_scale
        pure = pure_robustness_epsilon(score_lower, runner_up_upper) / (
            self.at_input.l1 / b_x + self.at_hidden.l1 / b_h
        )
        deviation = sqrt((self.at_input.l2 / b_x) ** 2 + (self.at_hidden.l2 / b_h) ** 2)
        gaussian = LAPLACE_AS_GAUSSIAN * gaussian_margin(score_lower, runner_up_upper) / deviation
        # The theorem is about perturbations strictly inside; the last billionth keeps the closed ball inside, too.
        return np.where(score_lower > runner_up_upper, (1 - 1e-9) * np.maximum(pure, gaussian), 0.0)
