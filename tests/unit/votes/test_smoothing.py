"""Radii of smoothed classifiers against classifiers whose true distance is known, and against the worst ones."""

from __future__ import annotations

from math import exp, log, pi, prod, sqrt

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import norm as gaussian
from torch import nn

from stobatch.errors import ModelError, SettingError
from stobatch.models import DenseEncoder
from stobatch.published.radius import CorrectedRule
from stobatch.types import PAPER_RANGE, UNIT_RANGE, Norm, Radius
from stobatch.votes.margins import gaussian_margin, hidden_shift, input_shift, pure_robustness_epsilon
from stobatch.votes.noise import (
    GaussianNoise,
    HiddenGaussian,
    HiddenLaplace,
    HiddenNoise,
    LaplaceNoise,
    SmoothingNoise,
)

Floats = NDArray[np.float64]
NORMS = list(Norm)
ORDER = {Norm.L1: 1.0, Norm.L2: 2.0, Norm.LINF: float("inf")}
DUAL = {Norm.L1: float("inf"), Norm.L2: 2.0, Norm.LINF: 1.0}
tops = st.floats(0.51, 0.9999)
sizes = st.floats(0.01, 100)
norms = st.sampled_from(NORMS)


def radius(noise: SmoothingNoise, norm: Norm, top: float, d: int, other: float | None = None) -> float:
    return float(noise.radius(norm, np.array(top), np.array(1 - top if other is None else other), d))


def dense(A: Floats) -> DenseEncoder:
    encoder = DenseEncoder((A.shape[1],), A.shape[0]).double()
    encoder.weight.data.copy_(torch.from_numpy(A))
    return encoder


def every_noise(d: int = 5, scale: float = 1.0, steepness: float = 1.0) -> list[SmoothingNoise]:
    encoder = dense(steepness * np.random.default_rng(0).normal(size=(4, d)))
    hidden = [kind(encoder, None, 0.3 * scale, 0.8 * scale) for kind in (HiddenGaussian, HiddenLaplace)]
    return [GaussianNoise(0.5 * scale), LaplaceNoise(0.7 * scale), *hidden]


KINDS = range(len(every_noise()))


# Limits on the votes


def test_the_limit_on_losses_at_unanimous_votes() -> None:
    limit = pure_robustness_epsilon(np.array([0.99735429]), np.array([0.00264571]))
    assert float(limit[0]) == pytest.approx(5.2417, abs=1e-4)


@given(st.floats(0.5, 1 - 1e-9, exclude_min=True))
def test_the_sharper_loss_limit_wins_where_two_classes_share_all_votes(top: float) -> None:
    assert -log(2 * (1 - top)) >= 0.5 * log(top / (1 - top)) - 1e-9


# Closed forms on the line and for half-spaces


@pytest.mark.parametrize("norm", NORMS)
@given(b=st.floats(0.1, 10), reach=st.floats(0.1, 15))
def test_laplace_noise_on_the_line_proves_the_whole_distance(norm: Norm, b: float, reach: float) -> None:
    """A half-line at distance t has mass 1 - ½e^{-t/b}: nothing larger than t can hold, and t is proved."""
    assert radius(LaplaceNoise(b), norm, 1 - 0.5 * exp(-reach), 1) == pytest.approx(reach * b, rel=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.floats(0.05, 5), st.floats(0.1, 3))
def test_gaussian_noise_proves_the_distance_to_a_half_space_and_never_more(
    seed: int, d: int, reach: float, sigma: float
) -> None:
    """Item 18: A is named iff w·(x + ν) < t, so p_A = Φ(t/(σ‖w‖₂)); the smoothed boundary is the same plane."""
    random = np.random.default_rng(seed)
    flattest = np.ones(d)
    for w, exact in ((random.normal(size=d), Norm.L2), (np.eye(d)[0], Norm.L1), (flattest, Norm.LINF)):
        margin = reach * sigma * np.linalg.norm(w)
        for norm in NORMS:
            distance = margin / np.linalg.norm(w, ord=DUAL[norm])
            proved = radius(GaussianNoise(sigma), norm, float(gaussian.cdf(reach)), d)
            assert proved <= distance * (1 + 1e-9)
            if norm == exact:
                assert proved == pytest.approx(distance, rel=1e-6)


def half_space_mass(margin: float, noise: Floats) -> float:
    """P(Σ Lap(sᵢ) < margin) for distinct scales sᵢ, by partial fractions of the characteristic function."""
    others = [np.delete(noise, i) for i in range(len(noise))]
    weights = np.array([prod(s**2 / (s**2 - o**2)) for s, o in zip(noise, others, strict=True)])
    return float(1 - 0.5 * (weights * np.exp(-margin / noise)).sum())


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 3), st.floats(0.05, 4), norms, st.booleans())
def test_laplace_radii_never_exceed_the_distance_to_a_half_space(
    seed: int, d: int, hidden: int, reach: float, norm: Norm, at_both: bool
) -> None:
    """A is named iff q·(A(x + ν) + ω) < t, or w·(x + ν) < t. On the line this is the worst classifier there is.

    There the noise has a log-concave density, so likelihood ratios are monotone and the worst regions are half-lines.
    """
    random = np.random.default_rng(seed)
    A, (b_x, b_h) = random.normal(size=(hidden, d)), random.uniform(0.2, 3, 2)
    q = random.normal(size=hidden)
    slope = A.T @ q
    scales = np.concatenate([np.abs(slope) * b_x, np.abs(q) * b_h]) if at_both else np.abs(slope) * b_x
    assume(len(scales) == 1 or np.diff(np.sort(scales)).min() > 1e-2 * scales.max())
    margin = reach * scales.max()
    noise = HiddenLaplace(dense(A), None, b_x, b_h) if at_both else LaplaceNoise(b_x)
    distance = margin / np.linalg.norm(slope, ord=DUAL[norm])
    assert radius(noise, norm, half_space_mass(margin, scales), d) <= distance * (1 + 1e-6)


def test_adding_up_laplace_noise_without_its_factor_is_caught() -> None:
    """The broken twin: Lap(b) taken for a Gaussian of its own deviation b√2 claims more than the distance."""
    reach, d = 0.4, 1
    top = 1 - 0.5 * exp(-reach)
    assert sqrt(2) * float(gaussian_margin(np.array(top), np.array(1 - top))) > reach
    assert radius(LaplaceNoise(1.0), Norm.L2, top, d) <= reach


# The worst classifiers: Neyman-Pearson


def kept_by_the_worst(A: Floats, sigma_x: float, sigma_h: float, top: float, moves: Floats) -> Floats:
    """The mass that the likelihood-ratio class of mass `top` at x keeps at x + a, exactly, for each a."""
    inverse = np.linalg.inv(sigma_x**2 * A @ A.T + sigma_h**2 * np.eye(len(A)))
    moved = moves @ A.T
    deviations = np.sqrt(np.einsum("ij,jk,ik->i", moved, inverse, moved))
    kept: Floats = gaussian.cdf(gaussian.ppf(top) - deviations)
    return kept


def moves_of_unit_size(norm: Norm, A: Floats, random: np.random.Generator) -> Floats:
    """Random ones, spikes, signs, and the singular directions, which are the worst in l2."""
    d = A.shape[1]
    some = np.concatenate([random.normal(size=(20, d)), np.eye(d), np.linalg.svd(A)[2]])
    moves = np.concatenate([some, np.sign(some)])
    return moves / np.linalg.norm(moves, ord=ORDER[norm], axis=1, keepdims=True)


def random_case(random: np.random.Generator) -> tuple[Floats, float, float, float]:
    A = random.normal(size=random.integers(1, 7, 2)) * random.uniform(0.1, 3)
    return A, *random.uniform(0.05, 2, 2), random.uniform(0.51, 0.9999)


def test_no_worst_classifier_flips_inside_the_radius_of_gaussian_noise_at_both_places() -> None:
    """Items 16 and 19, over 1000 random layers; in l2 the worst direction is reached exactly."""
    random = np.random.default_rng(0)
    for _ in range(1000):
        A, sigma_x, sigma_h, top = random_case(random)
        noise = HiddenGaussian(dense(A), None, sigma_x, sigma_h)
        for norm in NORMS:
            size = radius(noise, norm, top, A.shape[1])
            kept = kept_by_the_worst(A, sigma_x, sigma_h, top, size * moves_of_unit_size(norm, A, random))
            assert kept.min() >= 0.5
            if norm == Norm.L2:
                assert kept.min() == pytest.approx(0.5, abs=1e-6)


def test_in_l1_a_layer_of_one_column_is_reached_exactly_too() -> None:
    A = np.array([[3.0], [4.0]])
    noise = HiddenGaussian(dense(A), None, 0.5, 2.0)
    for norm in NORMS:
        assert radius(noise, norm, gaussian.cdf(1.0), 1) == pytest.approx(sqrt(0.5**2 + 2.0**2 / 25))


@pytest.mark.parametrize(
    "mistake", ["l2 for linf", "forgotten runner-up", "largest weight for the norm", "sum of both"]
)
def test_wrong_rules_are_violated(mistake: str) -> None:
    """The broken twins of the test above have to fail on it."""
    random, flips = np.random.default_rng(0), 0
    for _ in range(200):
        A, sigma_x, sigma_h, top = random_case(random)
        d, steepest = A.shape[1], np.linalg.norm(A, 2)
        effective, z = sqrt(sigma_x**2 + (sigma_h / steepest) ** 2), gaussian.ppf(top)
        norm, size = {
            "l2 for linf": (Norm.LINF, effective * z),
            "forgotten runner-up": (Norm.L2, effective * (z + 1)),
            "largest weight for the norm": (Norm.L2, z * sqrt(sigma_x**2 + (sigma_h / np.abs(A).max()) ** 2)),
            "sum of both": (Norm.L2, z * (sigma_x + sigma_h / steepest)),
        }[mistake]
        kept = kept_by_the_worst(A, sigma_x, sigma_h, top, size * moves_of_unit_size(norm, A, random))
        flips += bool(kept.min() < 0.5 - 1e-6) and d > 0
    assert flips > 50


@pytest.mark.parametrize(("d", "exact"), [(1, 5.242), (25, 0.6127)])
def test_the_worst_classifier_under_laplace_noise_keeps_its_label_inside_the_radius(d: int, exact: float) -> None:
    """Item 14: 200,000 draws give its mass to 0.7% but for a chance of 1e-9; the masses below are further from 1/2."""
    top, random = 0.99735429, np.random.default_rng(0)
    noise = random.laplace(size=(200_000, d))
    proved = radius(LaplaceNoise(1.0), Norm.LINF, top, d)

    def kept(size: float) -> float:
        loss, moved = ((np.abs(v) - np.abs(v - size)).sum(1) for v in (noise, noise + size))
        edge = np.quantile(loss, top, method="inverted_cdf")
        # The atom of the loss at its edge is split so that A has exactly mass p_A at x.
        share = (top - (loss < edge - 1e-9).mean()) / (np.abs(loss - edge) <= 1e-9).mean()
        return float((moved < edge - 1e-9).mean() + share * (np.abs(moved - edge) <= 1e-9).mean())

    assert proved <= exact * (1 + 1e-3)
    assert kept(0.9 * proved) > 0.507
    assert kept(1.1 * exact) < 0.493


# Monotony, limits, combinations


@pytest.mark.parametrize("kind", KINDS)
@given(tops, tops, norms, st.integers(1, 5), st.floats(1, 10))
def test_radii_grow_with_votes_and_noise_and_shrink_with_the_runner_up(
    kind: int, first: float, second: float, norm: Norm, d: int, more: float
) -> None:
    noise, (low, high) = every_noise(d)[kind], sorted((first, second))
    rounding = 1 + 1e-9
    assert radius(noise, norm, low, d) <= radius(noise, norm, high, d) * rounding
    assert radius(noise, norm, high, d, other=(1 - high) / 2) * rounding >= radius(noise, norm, high, d)
    louder = radius(every_noise(d, scale=more)[kind], norm, high, d)
    assert louder == pytest.approx(more * radius(noise, norm, high, d))
    steeper = radius(every_noise(d, steepness=more)[kind], norm, high, d)
    assert steeper <= radius(noise, norm, high, d) * rounding


@pytest.mark.parametrize("kind", KINDS)
@given(st.floats(0, 1), st.floats(0, 1), norms)
def test_without_a_positive_margin_nothing_is_proved(kind: int, first: float, second: float, norm: Norm) -> None:
    assert radius(every_noise()[kind], norm, min(first, second), 5, other=max(first, second)) == 0


@pytest.mark.parametrize("noise", [GaussianNoise(1.0), LaplaceNoise(1.0)])
def test_more_inputs_never_raise_a_radius(noise: SmoothingNoise) -> None:
    for norm in NORMS:
        found = [radius(noise, norm, 0.99, d) for d in (1, 2, 25, 784, 3072)]
        assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", NORMS)
def test_the_needed_votes_are_the_fewest(kind: int, norm: Norm) -> None:
    noise = every_noise()[kind]
    for size in (0.01, 0.1, 0.5):
        needed = noise.required_top_probability(size, norm, 5)
        if needed < 1:
            assert radius(noise, norm, needed, 5) >= size > radius(noise, norm, needed - 1e-9, 5)
    assert noise.required_top_probability(1e6, norm, 5) == 1
    assert 0.5 < noise.required_top_probability(0.0, norm, 5) < 0.5 + 1e-12


@pytest.mark.parametrize("kind", [HiddenGaussian, HiddenLaplace])
@given(seed=st.integers(0, 2**32 - 1), at_input=sizes, at_hidden=sizes, top=tops, norm=norms)
@settings(deadline=None)
def test_one_pass_proves_at_least_each_noise_alone_and_two_passes_at_most(
    kind: type[HiddenNoise], seed: int, at_input: float, at_hidden: float, top: float, norm: Norm
) -> None:
    """Item 16. Alone: with the other noise made too small to matter."""
    d, encoder = 3, dense(np.random.default_rng(seed).normal(size=(4, 3)))
    both = radius(kind(encoder, None, at_input, at_hidden), norm, top, d)
    alone = [
        radius(kind(encoder, None, *noise), norm, top, d)
        for noise in ((at_input, at_hidden * 1e-9), (at_input * 1e-9, at_hidden))
    ]
    assert both >= max(alone) * (1 - 1e-6)
    if kind is HiddenLaplace:
        shifts = input_shift(norm, d), hidden_shift(norm, encoder)
        two_passes = CorrectedRule(at_input, at_hidden, *shifts).radius(np.array(top), np.array(1 - top))
        assert float(two_passes) <= min(alone) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("hidden", "plain"), [(HiddenGaussian, GaussianNoise), (HiddenLaplace, LaplaceNoise)], ids=["gaussian", "laplace"]
)
@pytest.mark.parametrize("norm", NORMS)
def test_limits_of_vanishing_noise_and_of_a_vanishing_layer(
    hidden: type[HiddenNoise], plain: type[GaussianNoise] | type[LaplaceNoise], norm: Norm
) -> None:
    encoder = dense(np.random.default_rng(1).normal(size=(4, 6)))
    alone = radius(plain(0.7), norm, 0.9, 6)
    assert radius(hidden(encoder, None, 0.7, 1e-9), norm, 0.9, 6) == pytest.approx(alone)
    growing = [radius(hidden(dense(c * np.ones((2, 6))), None, 0.7, 1.0), norm, 0.9, 6) for c in (1, 1e-2, 1e-4, 0)]
    assert growing == sorted(growing)
    assert growing[2] > 100 * alone
    assert np.isfinite(growing[3])


def test_laplace_noise_at_both_places_proves_more_than_the_better_place_alone() -> None:
    """Losses and deviations are both at least those of either place; deviations add up in squares."""
    encoder = dense(np.random.default_rng(2).normal(size=(30, 20)) / 20)
    singles = [radius(HiddenLaplace(encoder, None, *b), Norm.LINF, 0.997, 20) for b in ((1, 1e-9), (1e-9, 1))]
    assert radius(HiddenLaplace(encoder, None, 1, 1), Norm.LINF, 0.997, 20) > 1.05 * max(singles)


def test_the_two_measures_take_turns_under_laplace_noise() -> None:
    noise = LaplaceNoise(1.0)
    z, loss = float(gaussian.ppf(0.99)), -log(2 * 0.01)
    assert radius(noise, Norm.L1, 0.99, 784) == pytest.approx(loss)
    assert radius(noise, Norm.L2, 0.99, 784) == pytest.approx(sqrt(2 / pi) * z)
    assert radius(noise, Norm.LINF, 0.99, 784) == pytest.approx(sqrt(2 / pi) * z / 28)
    assert radius(noise, Norm.LINF, 0.99, 2) == pytest.approx(max(loss / 2, sqrt(1 / pi) * z))


# The first layer


@pytest.mark.parametrize("kind", [HiddenGaussian, HiddenLaplace])
@pytest.mark.parametrize("norm", NORMS)
def test_a_convolution_counts_as_its_matrix(kind: type[HiddenNoise], norm: Norm) -> None:
    """Item 17; and no direction that power iteration finds is steeper than the bound."""
    torch.manual_seed(0)
    conv, shape = nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 6, 6)
    with torch.no_grad():
        basis = torch.eye(72).reshape(72, *shape)
        A = (conv(basis) - conv(torch.zeros(1, *shape))).flatten(1).t().contiguous()
    matrix = nn.Linear(72, len(A))
    matrix.weight.data.copy_(A)
    noises = [kind.behind(layer, s, at_input=0.2, at_hidden=0.6) for layer, s in ((conv, shape), (matrix, (72,)))]
    assert radius(noises[0], norm, 0.95, 72) == pytest.approx(radius(noises[1], norm, 0.95, 72), rel=1e-5)
    bound, vector = noises[0].encoder.operator_norms().l2_to_l2, torch.randn(72)
    for _ in range(30):
        vector = nn.functional.normalize(A.t() @ (A @ vector), dim=0)
        assert float((A @ vector).norm()) <= bound * (1 + 1e-6)


@pytest.mark.parametrize("layer", [nn.Conv2d(1, 3, 3), nn.Conv2d(1, 3, 3, bias=False), nn.Linear(36, 7)])
def test_what_is_seen_is_the_layer_with_its_bias_and_noise_passes_through_it(layer: nn.Conv2d | nn.Linear) -> None:
    """In float64, so that a layer's weights are seen to be copied without rounding."""
    layer = layer.double()
    noise = HiddenGaussian.behind(layer, (1, 6, 6), at_input=0.5, at_hidden=1e-12)
    inputs = torch.rand(3, 1, 6, 6, dtype=torch.float64)
    as_taken = (lambda v: v.flatten(1)) if isinstance(layer, nn.Linear) else (lambda v: v)
    assert torch.allclose(noise.noise_free(inputs), layer(as_taken(inputs)), atol=1e-12)
    drawn = noise.draw((3, 1, 6, 6), torch.Generator().manual_seed(4))
    at_input = 0.5 * torch.randn(3, 1, 6, 6, generator=torch.Generator().manual_seed(4)).double()
    assert torch.allclose(noise.noise_free(inputs) + drawn, layer(as_taken(inputs + at_input)), atol=1e-6)


def test_training_on_does_not_change_what_was_certified() -> None:
    layer = nn.Linear(4, 3)
    noise = HiddenGaussian.behind(layer, (4,), at_input=0.5, at_hidden=1.0)
    seen = noise.noise_free(torch.ones(1, 4))
    with torch.no_grad():
        layer.weight.mul_(10)
        layer.bias.mul_(10)
    assert torch.equal(noise.noise_free(torch.ones(1, 4)), seen)


@pytest.mark.parametrize("noise", every_noise(), ids=lambda noise: type(noise).__name__)
def test_noise_has_the_size_it_says(noise: SmoothingNoise) -> None:
    """The mean square of 200,000 draws: within 5% but for a chance below 1e-9 (fourth moments at most 24 b⁴)."""
    drawn = noise.draw((200_000, 5), torch.Generator().manual_seed(0)).double()
    if isinstance(noise, HiddenNoise):
        A, unit = noise.encoder.weight.detach().double(), 2.0 if isinstance(noise, HiddenLaplace) else 1.0
        expected = unit * (noise.at_input**2 * A.square().sum(1) + noise.at_hidden**2)
    elif isinstance(noise, LaplaceNoise):
        expected = torch.full((5,), 2 * noise.scale**2).double()
    else:
        assert isinstance(noise, GaussianNoise)
        expected = torch.full((5,), noise.stddev**2).double()
    assert torch.allclose(drawn.square().mean(0), expected, rtol=0.05)


# Units and errors


@pytest.mark.parametrize("kind", range(2))
def test_pixels_in_0_to_1_have_half_the_radius(kind: int) -> None:
    """Item 20: the same noise, measured on pixels in [0, 1], is half as large, and so is what it proves."""
    wide, narrow = every_noise(scale=2.0)[kind], every_noise(scale=1.0)[kind]
    found = Radius(radius(wide, Norm.L2, 0.9, 5), Norm.L2, PAPER_RANGE)
    assert found.to(UNIT_RANGE).size == pytest.approx(radius(narrow, Norm.L2, 0.9, 5))


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan"), float("inf")])
def test_noise_without_a_size_is_refused(size: float) -> None:
    for make in (GaussianNoise, LaplaceNoise, lambda v: HiddenGaussian(dense(np.ones((2, 2))), None, 1.0, v)):
        with pytest.raises(SettingError, match="above 0"):
            make(size)


def test_inputs_of_another_size_than_the_layer_are_refused() -> None:
    noise = HiddenGaussian.behind(nn.Linear(4, 3), (4,), at_input=1.0, at_hidden=1.0)
    with pytest.raises(ModelError, match="takes 4 values, the inputs have 5"):
        noise.radius(Norm.L2, np.array([0.9]), np.array([0.1]), 5)
    with pytest.raises(ModelError, match="Give the shape of one input"):
        HiddenGaussian.behind(nn.Linear(4, 3), (5,), at_input=1.0, at_hidden=1.0)
