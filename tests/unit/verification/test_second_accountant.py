"""The second accountant brackets what is known in closed form and what the first one says, and catches a wrong one."""

from __future__ import annotations

import pytest

from stobatch.dp.accounting import PoissonGaussian, gaussian_epsilon
from stobatch.verification.second_accountant import bracket

MECHANISMS = [
    (0.01, 1.0, 1_000, 1e-5),
    (1 / 6, 2.0, 6, 1e-5),
    (0.04, 2.6, 240, 1e-5),
    (0.5, 30.0, 1000, 1e-7),
    (0.2, 0.3, 3, 1e-5),
    (0.03, 20.0, 10, 1e-5),
]


@pytest.mark.parametrize(("noise", "releases", "delta"), [(10.0, 10, 1e-5), (1.0, 1, 1e-6), (3.0, 100, 1e-8)])
def test_without_sampling_the_closed_form_lies_in_the_bracket(noise: float, releases: int, delta: float) -> None:
    found, exact = bracket(1.0, noise, releases, delta), gaussian_epsilon(noise, releases, delta)
    assert found is not None
    assert found.low <= exact <= found.high
    assert found.high - found.low < 0.006 * exact


@pytest.mark.parametrize(("rate", "noise", "steps", "delta"), MECHANISMS)
def test_the_first_accountant_lies_in_the_bracket(rate: float, noise: float, steps: int, delta: float) -> None:
    """The first never undercounts, and is tight to a thousandth of itself."""
    found, first = bracket(rate, noise, steps, delta), PoissonGaussian(rate, noise, steps).epsilon(delta)
    assert found is not None
    assert found.low <= first <= found.high * 1.002
    assert found.high - found.low < 0.01 * first


@pytest.mark.parametrize(("rate", "noise", "steps", "delta"), MECHANISMS)
def test_an_accountant_that_is_wrong_by_two_percent_is_caught(
    rate: float, noise: float, steps: int, delta: float
) -> None:
    """The broken twins: two steps in a hundred not counted, or noise that is a fiftieth larger than it is."""
    found = bracket(rate, noise, steps, delta)
    assert found is not None
    assert PoissonGaussian(rate, 1.02 * noise, steps).epsilon(delta) < found.low
    if steps >= 100:
        assert PoissonGaussian(rate, noise, round(0.95 * steps)).epsilon(delta) < found.low


def test_a_delta_below_what_float64_can_tell_is_left_alone() -> None:
    assert bracket(0.01, 1.0, 1000, 1e-13) is None
