"""From a margin to a radius: as published (Corollary 1, Eq. 13), and corrected.

Both rules see the same votes. The published one mixes units, counts one map of many and ignores that the fresh noise
is ψ times smaller than the noise it calculates with; the corrected one does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi, prod, sqrt

import numpy as np

from stobatch.certification.composition import (
    gaussian_margin,
    published_robustness_epsilon,
    pure_robustness_epsilon,
)
from stobatch.certification.confidence import Floats
from stobatch.models import AffineEncoder
from stobatch.paper import implements
from stobatch.types import Norm

LAPLACE_AS_GAUSSIAN = sqrt(2 / pi)
"""Lap(b) noise hides a shift at least as well as Gaussian noise of standard deviation b √(2/π)."""


def radius_factor(noise_scale: float, attack_sensitivity: float, robustness_epsilon: Floats) -> Floats:
    """κ (input) or φ (hidden): the applied noise in units of the robustness noise Δ_r/ε_r."""
    return noise_scale * robustness_epsilon / attack_sensitivity


@implements(
    *("Corollary 1", "Eq. 34"),
    verdict="correct algebra for two independent passes; the sensitivities put into it are not.",
)
def composed_radius(input_radius_factor: Floats, hidden_radius_factor: Floats) -> Floats:
    """κφ/(κ + φ), and 0 where both are 0."""
    total = input_radius_factor + hidden_radius_factor
    return np.divide(input_radius_factor * hidden_radius_factor, total, out=np.zeros_like(total), where=total > 0)


@dataclass(frozen=True)
class PublishedRule:
    """Eq. 13 with the paper's sensitivities: Δ_r^x = μ d and Δ_r^h = β ‖θ1‖∞.

    The noise scales are the nominal ones, Δ_R/(mε1) and 2Δ_R/(mε1), whatever ψ is.
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
        """(κφ/(κ+φ))_max; the paper calls an input robust when this is at least the attack radius."""
        epsilon = published_robustness_epsilon(score_lower, runner_up_upper)
        kappa = radius_factor(self.input_noise_scale, attack_radius * self.num_inputs, epsilon)
        phi = radius_factor(self.hidden_noise_scale, self.hidden_attack_sensitivity, epsilon)
        return composed_radius(kappa, phi)

    def largest_attack(self, score_lower: Floats, runner_up_upper: Floats) -> Floats:
        """The largest attack radius that passes the rule: its radius falls as the attack grows, so they cross once."""
        noise = self.input_noise_scale * published_robustness_epsilon(score_lower, runner_up_upper)
        # κφ/(κ+φ) = b ε_r / (μ d + (b/b_h) Δ_h) >= μ  is a quadratic in μ.
        half = self.hidden_attack_sensitivity * self.input_noise_scale / self.hidden_noise_scale
        size: Floats = (-half + np.sqrt(half**2 + 4 * self.num_inputs * noise)) / (2 * self.num_inputs)
        return size


@dataclass(frozen=True)
class Shift:
    """How far a unit-radius perturbation can move a layer, in l1 and in l2."""

    l1: float
    l2: float


def input_shift(norm: Norm, num_inputs: int) -> Shift:
    """Of the input itself: ‖α‖₁ and ‖α‖₂ for a perturbation of size 1 in the given norm."""
    return {
        Norm.L1: Shift(1.0, 1.0),
        Norm.L2: Shift(sqrt(num_inputs), 1.0),
        Norm.LINF: Shift(float(num_inputs), sqrt(num_inputs)),
    }[norm]


def hidden_shift(norm: Norm, encoder: AffineEncoder) -> Shift:
    """Of h = Ax: ‖Aα‖₁ and ‖Aα‖₂, every map and position counted."""
    norms = encoder.operator_norms()
    num_inputs, num_hidden = prod(encoder.input_shape), prod(encoder.hidden_shape)
    return {
        Norm.L1: Shift(norms.l1_to_l1, norms.l1_to_l2),
        Norm.L2: Shift(sqrt(num_hidden) * norms.l2_to_l2, norms.l2_to_l2),
        Norm.LINF: Shift(norms.linf_to_l1, sqrt(num_inputs) * norms.l2_to_l2),
    }[norm]


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
