"""Corollary 1 (Eq. 34): κφ/(κ + φ) is where the two losses ε_r/κ and ε_r/φ add up to ε_r."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stobatch.published.radius import composed_epsilon, composed_radius, radius_factor

factors = st.floats(1e-6, 1e6)


def compose(kappa: float, phi: float) -> float:
    return float(composed_radius(np.array(kappa), np.array(phi)))


@given(factors, factors, st.floats(1e-3, 10))
def test_at_the_composed_radius_the_losses_spend_exactly_the_robustness_epsilon(k: float, p: float, e: float) -> None:
    radius = compose(k, p)
    assert composed_epsilon((radius * e / k, radius * e / p)) == pytest.approx(e)


@given(factors, factors)
def test_it_is_symmetric_and_smaller_than_either_factor(kappa: float, phi: float) -> None:
    radius = compose(kappa, phi)
    assert radius == pytest.approx(compose(phi, kappa))
    assert min(kappa, phi) / 2 * (1 - 1e-9) <= radius <= min(kappa, phi)


@given(factors)
def test_half_of_equal_factors_and_nothing_without_noise(kappa: float) -> None:
    assert compose(kappa, kappa) == pytest.approx(kappa / 2)
    assert compose(kappa, 0.0) == compose(0.0, 0.0) == 0.0


@given(factors, st.floats(1e-3, 1e3), st.floats(1e-3, 10))
def test_a_factor_is_the_noise_over_the_robustness_noise(scale: float, sensitivity: float, epsilon: float) -> None:
    assert float(radius_factor(scale, sensitivity, np.array(epsilon))) == pytest.approx(scale / (sensitivity / epsilon))
