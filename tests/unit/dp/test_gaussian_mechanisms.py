"""The Gaussian mechanism against the definition of (ε, δ)-DP: the divergence of two densities, integrated."""

from __future__ import annotations

import itertools
from math import exp, pi, sqrt

import dp_accounting
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.stats import beta, multivariate_normal, norm
from torch import Tensor

from stobatch.dp.accounting import gaussian_epsilon
from stobatch.dp.gaussian import (
    CALIBRATIONS,
    Analytic,
    Calibration,
    Classical,
    Extended,
    gaussian_delta,
    heterogeneous_stddevs,
)
from stobatch.errors import SettingError

Floats = NDArray[np.float64]
FALSE_ALARM = 1e-9
EPSILONS = (0.05, 0.2, 0.7, 1.0, 2.0, 5.0, 10.0, 20.0)
DELTAS = (1e-10, 1e-7, 1e-5, 1e-3, 0.05, 0.3)
GRID = list(itertools.product(EPSILONS, DELTAS))
INTEGRATED = 1e-7
"""The relative error that integrals are allowed; a thousandth of the noise moves δ by ten thousand times that."""


def divergence(epsilon: float, deviations: float) -> float:
    """∫ max(0, p - e^ε q) for p = N(m, 1), q = N(0, 1): the largest P(S) - e^ε Q(S) of any event S."""

    def excess(x: float) -> float:
        return max(0.0, float(np.exp(norm.logpdf(x, deviations)) - np.exp(epsilon + norm.logpdf(x))))

    # p/q grows with x: below the crossing nothing is added, and 12 deviations beyond everything has been.
    crossing = epsilon / deviations + deviations / 2
    edges = [crossing - 5, crossing, *np.linspace(crossing, max(crossing, deviations) + 12, 6)[1:]]
    return sum(quad(excess, a, b, epsabs=0, epsrel=1e-10)[0] for a, b in itertools.pairwise(edges))


def is_private(epsilon: float, delta: float, deviations: float) -> bool:
    return divergence(epsilon, deviations) <= delta * (1 + INTEGRATED)


def valid(calibration: Calibration, epsilon: float) -> bool:
    return epsilon <= calibration.largest_epsilon


# The exact δ


@pytest.mark.parametrize(
    ("epsilon", "deviations"), list(itertools.product((0.0, *EPSILONS), (0.01, 0.03, 0.3, 1, 4, 12)))
)
def test_the_closed_form_is_the_divergence(epsilon: float, deviations: float) -> None:
    integral = divergence(epsilon, deviations)
    assert float(gaussian_delta(epsilon, deviations)) == pytest.approx(integral, rel=INTEGRATED, abs=1e-250)


def test_a_second_term_without_its_factor_is_caught() -> None:
    """The broken twin: Φ(m/2 - ε/m) - Φ(-m/2 - ε/m)."""
    wrong = norm.cdf(0.5 - 1.0) - norm.cdf(-0.5 - 1.0)
    assert abs(wrong / divergence(1.0, 1.0) - 1) > 100 * INTEGRATED


def test_limits_neither_overflow_nor_cancel() -> None:
    """Warnings are errors here. δ(0) = erf(m/√8), which is m/√(2π) for few deviations."""
    assert gaussian_delta(np.array([0.0, 1.0, 1e300]), 0.0).tolist() == [0, 0, 0]
    assert gaussian_delta(np.array([0.0, 1.0, 700.0]), np.inf).tolist() == [1, 1, 1]
    assert gaussian_delta(np.array([800.0, 1e4, 1e300]), np.array([1.0, 1.0, 1e-300])).tolist() == [0, 0, 0]
    assert float(gaussian_delta(1e4, 400.0)) == pytest.approx(1.0)
    tiny = np.geomspace(1e-200, 1e-9, 20)
    assert gaussian_delta(0.0, tiny) == pytest.approx(tiny / sqrt(2 * pi), rel=1e-12)
    assert float(gaussian_delta(1e-12, 1e-13)) == pytest.approx(1e-13 * (norm.pdf(10) - 10 * norm.sf(10)), rel=1e-9)


@given(st.floats(0, 50), st.floats(1e-6, 30), st.floats(1e-6, 1))
def test_delta_rises_with_the_shift_and_falls_with_epsilon(epsilon: float, deviations: float, more: float) -> None:
    here = float(gaussian_delta(epsilon, deviations))
    rounding = 1 + 1e-12
    assert 0 <= here <= 1
    assert float(gaussian_delta(epsilon, deviations * (1 + more))) * rounding >= here
    assert float(gaussian_delta(epsilon + more, deviations)) <= here * rounding


def test_arrays_are_taken_entry_by_entry() -> None:
    """Each of two values is within 1e-12 of the true one, and vector units round otherwise than scalar code."""
    epsilon, deviations = np.array(EPSILONS)[:, None], np.array([0.01, 1.0, 5.0])
    together = gaussian_delta(epsilon, deviations)
    assert together.shape == (len(EPSILONS), 3)
    apart = np.array([[float(gaussian_delta(e, m)) for m in deviations] for e in EPSILONS])
    assert together == pytest.approx(apart, rel=2e-12, abs=1e-300)


# The three theorems


@pytest.mark.parametrize("calibration", CALIBRATIONS.values(), ids=CALIBRATIONS)
def test_calibrated_noise_meets_the_definition(calibration: Calibration) -> None:
    for epsilon, delta in GRID:
        if valid(calibration, epsilon):
            assert is_private(epsilon, delta, 3.0 / calibration.stddev(epsilon, delta, sensitivity=3.0))


def test_a_thousandth_less_than_analytic_noise_fails_the_definition_everywhere() -> None:
    """Tightness; and the broken twin of the test above."""
    for epsilon, delta in GRID:
        sigma = Analytic().stddev(epsilon, delta, sensitivity=3.0)
        assert not is_private(epsilon, delta, 3.0 / (0.999 * sigma))


@given(st.floats(1e-6, 500), st.floats(1e-12, 0.99), st.floats(1e-3, 1e3))
def test_what_analytic_returns_satisfies_its_own_delta(epsilon: float, delta: float, sensitivity: float) -> None:
    sigma = Analytic().stddev(epsilon, delta, sensitivity)
    assert float(gaussian_delta(epsilon, sensitivity / sigma)) <= delta
    assert float(gaussian_delta(epsilon, sensitivity / (sigma * (1 - 1e-9)))) > delta


def test_the_classical_formula_beyond_one_fails_the_definition() -> None:
    """Why ε is capped: at ε = 10 and δ = 0.05 the formula's noise has a δ of 0.21."""
    formula = sqrt(2 * np.log(1.25 / 0.05)) / 10
    assert divergence(10.0, 1 / formula) > 0.2
    with pytest.raises(SettingError, match=r"epsilon=10 is outside the classical theorem.* at most 1\."):
        Classical().stddev(10.0, 0.05, sensitivity=1.0)
    assert Classical().deviations(10.0, 0.05) == Classical().deviations(1.0, 0.05)


def test_the_older_theorems_never_ask_for_less_noise_than_the_exact_one() -> None:
    for older, (epsilon, delta) in itertools.product((Classical(), Extended()), GRID):
        if valid(older, epsilon):
            assert older.stddev(epsilon, delta, 1.0) >= Analytic().stddev(epsilon, delta, 1.0)


def test_the_extended_theorem_without_epsilon_under_its_root_fails_the_definition() -> None:
    """A broken twin: σ = √(2s) Δ/ε; the other factor is what carries the theorem beyond ε = 1."""
    epsilon, delta = 20.0, 0.05
    s = np.log(sqrt(2 / pi) / delta)
    assert not is_private(epsilon, delta, epsilon / sqrt(2 * s))
    assert is_private(epsilon, delta, float(Extended().deviations(epsilon, delta)))


def test_published_formulas_are_what_the_classes_compute() -> None:
    """Dwork and Roth, and Phan et al. as printed, at Δ = 2."""
    assert Classical().stddev(0.5, 1e-5, 2.0) == pytest.approx(2 * sqrt(2 * np.log(1.25e5)) / 0.5)
    s = np.log(sqrt(2 / pi) / 1e-5)
    printed = sqrt(2) * 2 / (2 * 4) * (sqrt(s) + sqrt(s + 4))
    assert Extended().stddev(4.0, 1e-5, 2.0) == pytest.approx(printed)


def test_outside_oracles_agree() -> None:
    """Google's exact calibration, and this library's own accountant, which solves for ε instead."""
    for epsilon, delta in GRID:
        sigma = Analytic().stddev(epsilon, delta, sensitivity=1.0)
        assert sigma == pytest.approx(dp_accounting.get_sigma_gaussian(epsilon, delta), rel=1e-6)
        assert gaussian_epsilon(sigma, releases=1, delta=delta) == pytest.approx(epsilon, rel=1e-6)
        assert gaussian_epsilon(sigma, releases=1, delta=delta) <= epsilon * (1 + 1e-9)


@pytest.mark.parametrize("calibration", CALIBRATIONS.values(), ids=CALIBRATIONS)
def test_deviations_are_taken_entry_by_entry_and_grow_with_both(calibration: Calibration) -> None:
    epsilon, delta = np.linspace(0, 0.99, 12)[:, None], np.array(DELTAS)
    found = calibration.deviations(epsilon, delta)
    for (i, one), (j, other) in itertools.product(enumerate(epsilon[:, 0]), enumerate(DELTAS)):
        assert found[i, j] == pytest.approx(float(calibration.deviations(float(one), other)), rel=1e-11)
        if one > 0:
            assert 1 / found[i, j] == pytest.approx(calibration.stddev(float(one), other, 1.0), rel=1e-11)
    assert (np.diff(found, axis=0) > 0).all()
    assert (np.diff(found, axis=1)[1:] > 0).all()


@pytest.mark.parametrize("calibration", CALIBRATIONS.values(), ids=CALIBRATIONS)
def test_what_no_theorem_is_about_is_refused(calibration: Calibration) -> None:
    for epsilon in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(SettingError, match="above 0"):
            calibration.stddev(epsilon, 1e-5, 1.0)
    for delta in (0.0, 1.0, float("nan")):
        with pytest.raises(SettingError, match="delta"):
            calibration.stddev(0.5, delta, 1.0)
    for sensitivity in (0.0, float("nan"), float("inf")):
        with pytest.raises(SettingError, match="sensitivity"):
            calibration.stddev(0.5, 1e-5, sensitivity)
    for epsilons in ([1.0, -1.0], [float("nan")], [float("inf")]):
        with pytest.raises(SettingError, match="negative, infinite or NaN"):
            calibration.deviations(np.array(epsilons), 1e-5)


def test_a_delta_beyond_the_extended_theorem_is_refused() -> None:
    assert Extended().stddev(1.0, 0.79, 1.0) > 0
    with pytest.raises(SettingError, match=r"delta=0.8 is outside the extended theorem.*below 0.7979"):
        Extended().stddev(1.0, 0.8, 1.0)


# Noise spread unevenly

SHIFT = np.array([0.3, -1.0, 0.6])
SHARES = torch.tensor([0.1, 0.7, 0.2])


def divergence_in_space(epsilon: float, shift: Floats, stddev: Floats, points: int) -> float:
    """∫ max(0, p - e^ε q) over a grid of midpoints in 2 or 3 dimensions, 8 deviations around both densities."""
    axes = []
    for move, size in zip(shift, stddev, strict=True):
        edges = np.linspace(min(move, 0) - 8 * size, max(move, 0) + 8 * size, points + 1)
        axes.append((edges[1:] + edges[:-1]) / 2)
    cell = np.prod([axis[1] - axis[0] for axis in axes])
    places = np.stack(np.meshgrid(*axes, indexing="ij"), -1)
    p, q = (multivariate_normal(mean, np.diag(stddev**2)).pdf(places) for mean in (shift, np.zeros(len(shift))))
    return float(np.maximum(p - exp(epsilon) * q, 0).sum() * cell)


def whitened(shift: Floats, shares: Tensor) -> float:
    """‖shift/√(K r)‖₂, by hand."""
    r = shares.double().numpy() / shares.double().numpy().sum()
    return float(np.linalg.norm(shift / np.sqrt(len(r) * r)))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.2, 0.05), (1.0, 1e-3), (3.0, 0.3)])
@pytest.mark.parametrize("dimensions", [2, 3])
def test_uneven_noise_for_the_divided_map_meets_the_definition_and_is_tight(
    dimensions: int, epsilon: float, delta: float
) -> None:
    """Grids of 600² and 130³ points give integrals of this kind to 1%; 3% of the noise moves δ by more than that."""
    shift, shares, points = SHIFT[:dimensions], SHARES[:dimensions], {2: 600, 3: 130}[dimensions]
    sigma = Analytic().stddev(epsilon, delta, whitened(shift, shares))
    for factor, holds in ((1.0, True), (0.97, False)):
        found = divergence_in_space(epsilon, shift, heterogeneous_stddevs(factor * sigma, shares).numpy(), points)
        assert (found <= 1.01 * delta) == holds
    assert divergence_in_space(epsilon, shift, heterogeneous_stddevs(sigma, shares).numpy(), points) > 0.98 * delta


def test_even_shares_are_ordinary_noise_and_the_total_stays() -> None:
    assert torch.allclose(heterogeneous_stddevs(0.7, torch.full((2, 3, 3), 4.0)), torch.tensor(0.7).double())
    uneven = heterogeneous_stddevs(0.7, SHARES)
    assert float(uneven.square().sum()) == pytest.approx(3 * 0.7**2)
    assert torch.allclose(uneven.square() / uneven.square().sum(), SHARES.double())
    assert torch.equal(uneven, heterogeneous_stddevs(0.7, SHARES.clone().requires_grad_()))


@pytest.mark.parametrize("share", [0.0, -0.1, float("nan"), float("inf")])
def test_shares_that_leave_a_coordinate_bare_are_refused(share: float) -> None:
    with pytest.raises(SettingError, match="Give every coordinate a number above 0"):
        heterogeneous_stddevs(1.0, torch.tensor([0.5, share]))
    with pytest.raises(SettingError, match="Give every coordinate"):
        heterogeneous_stddevs(1.0, torch.ones(0))
    with pytest.raises(SettingError, match="not a positive number"):
        heterogeneous_stddevs(share, torch.ones(2))


DRAWS, EPSILON, DELTA = 200_000, 1.0, 0.05
LITTLE_WHERE_IT_MOVES = torch.tensor([0.7, 0.1, 0.2])


def least_delta(sensitivity: float) -> float:
    """A lower bound on the δ of drawn noise, which fails with probability `FALSE_ALARM`.

    The event is a half-space, the worst of all for two Gaussians of one covariance; its two masses are counted and
    bounded by Clopper and Pearson at half the rate each.
    """
    sizes = heterogeneous_stddevs(Analytic().stddev(EPSILON, DELTA, sensitivity), LITTLE_WHERE_IT_MOVES)
    generator, shift = torch.Generator().manual_seed(0), torch.from_numpy(SHIFT)
    moved, unmoved = (torch.randn(DRAWS, 3, generator=generator, dtype=torch.float64) * sizes for _ in range(2))
    losses = [((x * shift - shift.square() / 2) / sizes.square()).sum(1) for x in (moved + shift, unmoved)]
    often, seldom = (int((loss > EPSILON).sum()) for loss in losses)
    lower = beta.ppf(FALSE_ALARM / 2, often, DRAWS - often + 1)
    upper = beta.isf(FALSE_ALARM / 2, seldom + 1, DRAWS - seldom)
    return float(lower - exp(EPSILON) * upper)


def test_drawn_uneven_noise_keeps_its_promise() -> None:
    """False alarm: 1e-9. The noise is not so large either that the promise would be empty."""
    assert 0.7 * DELTA < least_delta(whitened(SHIFT, LITTLE_WHERE_IT_MOVES)) <= DELTA


def test_forgetting_the_shares_in_the_sensitivity_is_caught() -> None:
    """The broken twin: calibrated to how far the map moves, not to how far the divided map does."""
    assert least_delta(float(np.linalg.norm(SHIFT))) > 2 * DELTA
