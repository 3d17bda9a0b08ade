"""When noise in several layers makes a prediction robust (Lemmas 1 and 5, Theorem 5), and the sharper conditions.

A scoring function under ε-DP noise cannot change its expected scores by more than e^ε. The published rule asks for
a margin of e^{2ε}; the exact trade-off between the two hypotheses asks for less.
"""

from __future__ import annotations

from math import exp

import numpy as np
from scipy.stats import norm
from torch import Tensor

from stobatch.certification.confidence import Floats
from stobatch.errors import UnitError
from stobatch.paper import implements


def check_probabilities(*values: Floats) -> None:
    """Raise unless all are probabilities: a bound outside of [0, 1] would prove any radius, and NaN none."""
    for each in values:
        if not bool(((np.asarray(each) >= 0) & (np.asarray(each) <= 1)).all()):
            raise UnitError(
                "a bound on a probability is outside of [0, 1] or not a number.",
                why="No radius follows from it.",
                remedy="Give shares of draws or scores in [0, 1], as confidence.clopper_pearson does.",
            )


@implements(
    *("Lemma 1", "Eq. 2", "Eq. 3", "Eq. 4", "Eq. 10"),
    verdict="holds (PixelDP) for noise that is fresh at every invocation and scaled to the true sensitivity.",
)
def is_robust(score_lower: float, runner_up_upper: float, robustness_epsilon: float, delta: float = 0.0) -> bool:
    """Ê_lb > e^{2ε_r} max Ê_ub + (1 + e^{ε_r}) δ_r: no perturbation in the unit ball changes the prediction."""
    needed = exp(2 * robustness_epsilon) * runner_up_upper + (1 + exp(robustness_epsilon)) * delta
    return score_lower > needed


@implements("Lemma 5", verdict="holds for separate passes with independent fresh noise: the tuple is (Σ ε_s)-DP.")
def composed_epsilon(epsilons: tuple[float, ...]) -> float:
    """Σ ε_s, what bounds the expected value of any bounded function of S independent mechanisms."""
    return sum(epsilons)


@implements("Eq. 11", verdict="a definition; the product stays in [0, 1].")
def product_score(*scores: Tensor) -> Tensor:
    """f(M_1, ..., M_S | x): the product of the scores of S separately randomised passes."""
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
    """The largest Σ ε_s for which Ê_lb > e^{2 Σ ε_s} max Ê_ub: half the log-ratio, at least 0."""
    check_probabilities(score_lower, runner_up_upper)
    tiny = np.finfo(np.float64).tiny
    ratio = np.log(np.maximum(score_lower, tiny)) - np.log(np.maximum(runner_up_upper, tiny))
    return np.maximum(0.5 * ratio, 0.0)


def pure_robustness_epsilon(score_lower: Floats, runner_up_upper: Floats) -> Floats:
    """L* = max(½ ln(p_A/p_B), -ln(1 - p_A + p_B)): the exact limit for every pure-DP smoothing with p_A + p_B <= 1.

    **Guarantee.** For any ε-DP smoothing with ε < L*, expected score A stays above expected score B: the trade-off
    function of ε-DP gives E_A >= f(1 - p_A) and E_B <= 1 - f(p_B), and f(1 - p_A) + f(p_B) > 1 iff ε < L*.
    """
    check_probabilities(score_lower, runner_up_upper)
    gap = np.clip(1 - score_lower + runner_up_upper, np.finfo(np.float64).tiny, 1.0)
    sharper = np.where(score_lower > runner_up_upper, -np.log(gap), 0.0)
    return np.maximum(published_robustness_epsilon(score_lower, runner_up_upper), sharper)


def gaussian_margin(score_lower: Floats, runner_up_upper: Floats) -> Floats:
    """Z = ½ (Φ⁻¹(p_A) - Φ⁻¹(p_B)): the exact limit on the shift, in standard deviations, for Gaussian smoothing."""
    check_probabilities(score_lower, runner_up_upper)
    edge = np.finfo(np.float64).eps
    lower, upper = np.clip(score_lower, edge, 1 - edge), np.clip(runner_up_upper, edge, 1 - edge)
    margin: Floats = np.maximum(0.5 * (norm.ppf(lower) - norm.ppf(upper)), 0.0)
    return margin
