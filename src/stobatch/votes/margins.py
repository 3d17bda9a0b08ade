"""From class probabilities to the shift that the top class withstands, and how far a perturbation shifts a layer.

Noise hides a shift in the sense of pure DP (ε, limit L*) or of Gaussian DP (standard deviations, limit Z). Both limits
are exact for p_A + p_B <= 1: for every larger shift some classifier with these probabilities changes its class.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi, prod, sqrt

import numpy as np
from scipy.special import ndtri

from stobatch.errors import UnitError
from stobatch.models import AffineEncoder
from stobatch.types import Norm
from stobatch.votes.confidence import Floats


def check_probabilities(*values: Floats) -> None:
    """Raise unless all values are in [0, 1]: a bound outside would prove wrong radii."""
    for value in values:
        if not bool(((np.asarray(value) >= 0) & (np.asarray(value) <= 1)).all()):
            raise UnitError(
                "a bound on a probability is outside [0, 1] or NaN.",
                why="No radius follows from it.",
                remedy="Give shares of draws or scores in [0, 1], as confidence.clopper_pearson does.",
            )


def half_log_ratio(score_lower: Floats, runner_up_upper: Floats) -> Floats:
    """Return ½ ln(p_A/p_B), at least 0: the largest ε for which p_A > e^{2ε} p_B."""
    check_probabilities(score_lower, runner_up_upper)
    tiny = np.finfo(np.float64).tiny
    ratio = np.log(np.maximum(score_lower, tiny)) - np.log(np.maximum(runner_up_upper, tiny))
    return np.maximum(0.5 * ratio, 0.0)


def pure_robustness_epsilon(score_lower: Floats, runner_up_upper: Floats) -> Floats:
    """Return L* = max(½ ln(p_A/p_B), -ln(1 - p_A + p_B)), the exact limit of pure-DP smoothing with p_A + p_B <= 1.

    **Guarantee.** For any ε-DP smoothing with ε < L*, expected score A stays above expected score B: the trade-off
    function of ε-DP gives E_A >= f(1 - p_A) and E_B <= 1 - f(p_B), and f(1 - p_A) + f(p_B) > 1 iff ε < L*.
    """
    check_probabilities(score_lower, runner_up_upper)
    gap = np.clip(1 - score_lower + runner_up_upper, np.finfo(np.float64).tiny, 1.0)
    sharper = np.where(score_lower > runner_up_upper, -np.log(gap), 0.0)
    return np.maximum(half_log_ratio(score_lower, runner_up_upper), sharper)


def gaussian_margin(score_lower: Floats, runner_up_upper: Floats) -> Floats:
    """Return Z = ½ (Φ⁻¹(p_A) - Φ⁻¹(p_B)), the exact limit of Gaussian smoothing, in standard deviations."""
    check_probabilities(score_lower, runner_up_upper)
    # Φ⁻¹ is infinite at 0 and 1. Clipping p_A = 1 down and p_B = 0 up lowers Z; for p_A = 0 or p_B = 1 Z stays 0.
    edge = np.finfo(np.float64).eps
    lower, upper = np.clip(score_lower, edge, 1 - edge), np.clip(runner_up_upper, edge, 1 - edge)
    margin: Floats = np.maximum(0.5 * (ndtri(lower) - ndtri(upper)), 0.0)
    return margin


LAPLACE_AS_GAUSSIAN = sqrt(2 / pi)
"""Lap(b) noise hides a shift at least as well as Gaussian noise of standard deviation b √(2/π)."""


@dataclass(frozen=True)
class Shift:
    """How far a unit-radius perturbation can move a layer, in l1 and in l2."""

    l1: float
    l2: float


def input_shift(norm: Norm, num_inputs: int) -> Shift:
    """Return the largest ‖a‖₁ and ‖a‖₂ of an input perturbation a of size 1 in the given norm."""
    return {
        Norm.L1: Shift(1.0, 1.0),
        Norm.L2: Shift(sqrt(num_inputs), 1.0),
        Norm.LINF: Shift(float(num_inputs), sqrt(num_inputs)),
    }[norm]


def hidden_shift(norm: Norm, encoder: AffineEncoder) -> Shift:
    """Return bounds on ‖Aa‖₁ and ‖Aa‖₂ for ‖a‖ <= 1 and the encoder h = Ax, over all maps and positions."""
    norms = encoder.operator_norms()
    num_inputs, num_hidden = prod(encoder.input_shape), prod(encoder.hidden_shape)
    return {
        Norm.L1: Shift(norms.l1_to_l1, norms.l1_to_l2),
        Norm.L2: Shift(sqrt(num_hidden) * norms.l2_to_l2, norms.l2_to_l2),
        Norm.LINF: Shift(norms.linf_to_l1, sqrt(num_inputs) * norms.l2_to_l2),
    }[norm]
