"""The corrected rule that stands beside Eq. 13: trade-offs, monotony, and classifiers whose true distance is known."""

from __future__ import annotations

from math import exp, pi, prod, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import norm as gaussian

from stobatch.models import DenseEncoder
from stobatch.published.radius import CorrectedRule
from stobatch.types import Norm
from stobatch.votes.margins import Shift, gaussian_margin, hidden_shift, input_shift, pure_robustness_epsilon

scales = st.floats(0.01, 100)
shifts = st.builds(Shift, st.floats(0.1, 100), st.floats(0.1, 100))
rules = st.builds(CorrectedRule, scales, scales, shifts, shifts)
tops = st.floats(0.51, 0.9999)


def radius(rule: CorrectedRule, top: float, other: float | None = None) -> float:
    return float(rule.radius(np.array(top), np.array(1 - top if other is None else other)))


def test_laplace_trade_offs_lie_above_gaussian_ones() -> None:
    """f_ε >= G_μ with μ = 2Φ⁻¹(e^ε/(1+e^ε)) <= √(π/2) ε: why Lap(b) counts as a Gaussian of deviation b√(2/π)."""
    levels = np.linspace(0, 1, 20_001)
    for epsilon in (1e-3, 0.05, 0.3, 1.0, 2.0, 5.0):
        laplace_side = np.maximum.reduce([0 * levels, 1 - exp(epsilon) * levels, exp(-epsilon) * (1 - levels)])
        mu = 2 * gaussian.ppf(exp(epsilon) / (1 + exp(epsilon)))
        gaussian_side = gaussian.cdf(gaussian.ppf(1 - levels) - mu)
        assert (laplace_side >= gaussian_side - 1e-12).all()
        assert mu <= sqrt(pi / 2) * epsilon * (1 + 1e-12)
        kink = 1 / (1 + exp(epsilon))
        assert gaussian.cdf(gaussian.ppf(1 - kink) - mu) == pytest.approx(kink)
        assert (laplace_side < gaussian.cdf(gaussian.ppf(1 - levels) - 0.9 * mu) - 1e-6).any()


@given(rules, tops, st.floats(1, 10))
def test_more_noise_never_lowers_the_radius(rule: CorrectedRule, top: float, more: float) -> None:
    louder = CorrectedRule(rule.fresh_input_scale * more, rule.fresh_hidden_scale, rule.at_input, rule.at_hidden)
    assert radius(louder, top) >= radius(rule, top) * (1 - 1e-12)


@given(rules, tops, st.floats(1, 10))
def test_a_larger_operator_never_raises_the_radius(rule: CorrectedRule, top: float, more: float) -> None:
    steeper = Shift(rule.at_hidden.l1 * more, rule.at_hidden.l2 * more)
    other = CorrectedRule(rule.fresh_input_scale, rule.fresh_hidden_scale, rule.at_input, steeper)
    assert radius(other, top) <= radius(rule, top) * (1 + 1e-12)


@given(rules, tops, tops)
def test_more_votes_never_lower_the_radius(rule: CorrectedRule, first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert radius(rule, low) <= radius(rule, high) * (1 + 1e-12)


@given(rules, tops, st.floats(1, 100))
def test_fresh_noise_psi_times_smaller_proves_a_radius_psi_times_smaller(
    rule: CorrectedRule, top: float, psi: float
) -> None:
    quiet = CorrectedRule(rule.fresh_input_scale / psi, rule.fresh_hidden_scale / psi, rule.at_input, rule.at_hidden)
    assert radius(quiet, top) == pytest.approx(radius(rule, top) / psi)


@given(rules, st.floats(0, 1), st.floats(0, 1))
def test_without_a_positive_margin_nothing_is_proved(rule: CorrectedRule, first: float, second: float) -> None:
    assert radius(rule, min(first, second), max(first, second)) == 0


@given(rules, tops)
def test_two_noises_prove_no_more_than_either_alone(rule: CorrectedRule, top: float) -> None:
    still = Shift(0.0, 0.0)
    singles = [
        radius(CorrectedRule(rule.fresh_input_scale, rule.fresh_hidden_scale, *layers), top)
        for layers in ((rule.at_input, still), (still, rule.at_hidden))
    ]
    assert radius(rule, top) <= min(singles) * (1 + 1e-12)


def test_pixels_in_0_to_1_have_half_the_radius() -> None:
    """Halving the range halves distances; the noise has to be halved with it, and the radius follows."""
    shift = input_shift(Norm.LINF, 784)
    wide, narrow = (CorrectedRule(b, 1.0, shift, Shift(0.0, 0.0)) for b in (2.0, 1.0))
    assert radius(wide, 0.99) == pytest.approx(2 * radius(narrow, 0.99))


@pytest.mark.parametrize(("d", "expected"), [(1, 5.242), (25, 0.4450), (784, 0.0795)])
def test_radii_of_unanimous_votes_by_input_size(d: int, expected: float) -> None:
    rule = CorrectedRule(1.0, 1.0, input_shift(Norm.LINF, d), Shift(0.0, 0.0))
    assert radius(rule, 0.99735429) == pytest.approx(expected, rel=2e-3)


def half_space_mass(margin: float, noise: NDArray[np.float64]) -> float:
    """P(Σ Lap(sᵢ) < margin) for distinct scales sᵢ, by partial fractions of the characteristic function."""
    others = [np.delete(noise, i) for i in range(len(noise))]
    weights = np.array([prod(s**2 / (s**2 - o**2)) for s, o in zip(noise, others, strict=True)])
    return float(1 - 0.5 * (weights * np.exp(-margin / noise)).sum())


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 3), st.floats(0.05, 4), st.sampled_from(list(Norm)))
def test_the_radius_never_exceeds_the_distance_to_a_half_space(
    seed: int, d: int, beta: int, reach: float, norm: Norm
) -> None:
    """A is named iff w·(x + ν) + q·(Ax + ω) < t: symmetric noise, so the smoothed boundary is known."""
    random = np.random.default_rng(seed)
    encoder = DenseEncoder((d,), beta).double()
    encoder.weight.data.copy_(torch.from_numpy(random.normal(size=(beta, d))))
    A = encoder.weight.detach().numpy()
    b_x, b_h = random.uniform(0.2, 3, 2)
    w, q = random.normal(size=d), random.normal(size=beta) * random.integers(0, 2)
    noise = np.concatenate([np.abs(w) * b_x, np.abs(q) * b_h])
    noise = noise[noise > 0]
    gaps = np.diff(np.sort(noise)) / noise.max()
    if len(noise) > 1 and gaps.min() < 1e-2:
        return
    margin, slope = reach * noise.max(), w + A.T @ q
    top = half_space_mass(margin, noise)
    dual = {Norm.L1: float("inf"), Norm.L2: 2, Norm.LINF: 1}[norm]
    distance = margin / np.linalg.norm(slope, ord=dual)
    rule = CorrectedRule(b_x, b_h, input_shift(norm, d), hidden_shift(norm, encoder))
    assert radius(rule, top) <= distance * (1 + 1e-6)


@given(st.floats(0.1, 10), st.floats(0.1, 15))
def test_it_reaches_that_distance_on_the_line(scale: float, distance_in_scales: float) -> None:
    rule = CorrectedRule(scale, 1.0, input_shift(Norm.LINF, 1), Shift(0.0, 0.0))
    found = radius(rule, 1 - 0.5 * exp(-distance_in_scales))
    assert found == pytest.approx(distance_in_scales * scale, rel=1e-6)


@pytest.mark.parametrize("ignored", [2.0, 10.0])
def test_ignoring_psi_would_exceed_it(ignored: float) -> None:
    """The broken twin, and the published habit: the nominal noise b where b/ψ is applied."""
    applied, distance = 1.0, 0.7
    rule = CorrectedRule(ignored * applied, 1.0, input_shift(Norm.LINF, 1), Shift(0.0, 0.0))
    assert radius(rule, 1 - 0.5 * exp(-distance / applied)) > distance


@pytest.mark.parametrize(("d", "exact"), [(1, 5.242), (25, 0.6127)])
def test_the_worst_classifier_keeps_its_label_inside_the_radius(d: int, exact: float) -> None:
    """Neyman-Pearson: A is where the likelihood ratio against x + r is smallest.

    200,000 draws estimate A's mass to within 0.7% but for a chance of 1e-9; the masses below are further from 1/2.
    """
    top, draws = 0.99735429, 200_000
    noise = np.random.default_rng(0).laplace(size=(draws, d))
    rule = CorrectedRule(1.0, 1.0, input_shift(Norm.LINF, d), Shift(0.0, 0.0))

    def kept(size: float) -> float:
        loss = (np.abs(noise) - np.abs(noise - size)).sum(1)
        edge = np.quantile(loss, top, method="inverted_cdf")
        shifted = noise + size
        moved = (np.abs(shifted) - np.abs(shifted - size)).sum(1)
        # The atom of the loss at its edge is split so that A has exactly mass p_A at x.
        below, at = (loss < edge - 1e-9).mean(), (np.abs(loss - edge) <= 1e-9).mean()
        share = (top - below) / at
        return float((moved < edge - 1e-9).mean() + share * (np.abs(moved - edge) <= 1e-9).mean())

    assert radius(rule, top) <= exact * (1 + 1e-3)
    assert kept(radius(rule, top) * 0.9) > 0.507
    assert kept(exact * 1.1) < 0.493


def test_the_two_limits_take_turns() -> None:
    """On the line pure DP proves more, in many dimensions Gaussian DP: the rule takes the larger one."""
    top, other = np.array(0.99), np.array(0.01)
    for d, pure_wins in ((1, True), (784, False)):
        pure = pure_robustness_epsilon(top, other) / d
        squares = sqrt(2 / pi) * gaussian_margin(top, other) / sqrt(d)
        assert bool(pure > squares) == pure_wins
        rule = CorrectedRule(1.0, 1.0, input_shift(Norm.LINF, d), Shift(0.0, 0.0))
        assert radius(rule, 0.99) == pytest.approx(max(float(pure), float(squares)))
