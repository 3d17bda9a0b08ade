"""Appendix O (Eq. 35, Eq. 36, Eq. 37, Eq. 38, Eq. 39, Eq. 40, Eq. 41, Eq. 42, Eq. 43): errors of the expansions."""

from __future__ import annotations

from math import e, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.published.lemmas import approximation_error_bounds
from stobatch.published.losses import taylor_corrected, taylor_loss, taylor_published

near = st.floats(-1, 1)


def cross_entropy(z: float, x: float) -> float:
    z_tensor = torch.tensor(z, dtype=torch.float64)
    return float(x * F.softplus(-z_tensor) + (1 - x) * F.softplus(z_tensor))


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_bounds_are_the_published_constants_times_inputs_and_classes(d: int, classes: int) -> None:
    first, second = approximation_error_bounds(d, classes)
    assert first == pytest.approx(d * 4 * e / (1 + e) ** 2)
    assert second == pytest.approx(classes * (e**2 + 2 * e - 1) / (e * (1 + e) ** 2))


@given(near, st.floats(0, 1))
def test_the_first_order_error_is_within_its_bound_where_the_expansion_is_meant(z: float, x: float) -> None:
    truncated = log(2) + (0.5 - x) * z
    assert abs(cross_entropy(z, x) - truncated) <= approximation_error_bounds(1, 1)[0]


@given(near, st.sampled_from([0.0, 1.0]))
def test_the_second_order_error_is_within_its_bound_where_the_expansion_is_meant(z: float, y: float) -> None:
    exact = float(F.binary_cross_entropy_with_logits(scalar(z), scalar(y)))
    assert abs(exact - float(taylor_corrected(scalar(z), scalar(y)))) <= approximation_error_bounds(1, 1)[1]


@pytest.mark.parametrize("z", [-4.0, 4.0, 40.0])
def test_beyond_it_the_first_error_exceeds_the_published_bound(z: float) -> None:
    """The minimiser of the truncation does not exist: it runs away to where the error has no bound."""
    truncated = log(2) + (0.5 - 0.3) * z
    assert abs(cross_entropy(z, 0.3) - truncated) > approximation_error_bounds(1, 1)[0]


def test_with_inputs_below_0_the_exact_objective_has_no_minimum_either() -> None:
    losses = [cross_entropy(-z, -1.0) for z in (1.0, 10.0, 100.0)]
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < -90


def test_the_printed_expansion_is_wrong_for_negative_scores() -> None:
    z, no = scalar(-2.0), scalar(0.0)
    assert float(F.softplus(z)) == pytest.approx(0.127, abs=1e-3)
    assert float(taylor_corrected(z, no)) == pytest.approx(0.193, abs=1e-3)
    assert float(taylor_published(z, no)) + log(2) == pytest.approx(-1.807, abs=1e-3)


@given(st.floats(0, 10), st.sampled_from([0.0, 1.0]))
def test_the_printed_expansion_is_right_up_to_a_constant_for_positive_scores(z: float, y: float) -> None:
    gap = taylor_corrected(scalar(z), scalar(y)) - taylor_published(scalar(z), scalar(y))
    assert float(gap) == pytest.approx(log(2))


def test_the_loss_of_an_example_is_the_sum_over_its_classes() -> None:
    scores = torch.tensor([[0.3, -0.2, 0.1]], dtype=torch.float64)
    exact = F.binary_cross_entropy_with_logits(
        scores, torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64), reduction="sum"
    )
    assert float(taylor_loss(scores, torch.tensor([1]), "corrected")) == pytest.approx(float(exact), abs=1e-4)
