"""Appendix B (Eq. 14): the functional mechanism. It holds; the guarantee needs no trust in the rows."""

from __future__ import annotations

from math import exp

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stobatch.dp.noise import laplace
from stobatch.published.lemmas import functional_mechanism


def centre(rows: Tensor, largest: float) -> Tensor:
    """The sum before noise: with a vanishing scale nothing is left to see of the noise."""
    return functional_mechanism(rows, largest, 1e15, torch.Generator().manual_seed(0))


def random_rows(seed: int, size: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(5, 4, generator=generator, dtype=torch.float64)


@given(st.integers(0, 2**31), st.floats(1e-3, 1e12), st.floats(1e-2, 10))
def test_one_row_changes_the_sum_by_at_most_the_sensitivity(seed: int, size: float, largest: float) -> None:
    rows = random_rows(seed, size)
    other = rows.clone()
    other[-1] = random_rows(seed + 1, size)[0]
    change = float((centre(rows, largest) - centre(other, largest)).abs().sum())
    assert change <= 2 * largest * (1 + 1e-9)


def test_the_sensitivity_is_reached_by_opposite_rows() -> None:
    row = torch.tensor([[3.0, 0.0]], dtype=torch.float64)
    assert float((centre(row, 1.5) - centre(-row, 1.5)).abs().sum()) == pytest.approx(3.0)


@given(st.integers(0, 2**31), st.floats(1e-3, 0.2))
def test_rows_within_the_bound_are_released_as_they_are(seed: int, size: float) -> None:
    rows = random_rows(seed, 1.0)
    rows = size * rows / rows.abs().sum(1, keepdim=True)
    assert torch.allclose(centre(rows, 0.2), rows.sum(0), atol=1e-9)


@given(st.integers(0, 2**31), st.floats(0.1, 10), st.floats(0.1, 5))
def test_every_entry_gets_its_own_laplace_draw_of_scale_sensitivity_over_epsilon(
    seed: int, epsilon: float, largest: float
) -> None:
    rows = random_rows(seed, 0.01)
    released = functional_mechanism(rows, largest, epsilon, torch.Generator().manual_seed(seed))
    noise = laplace((4,), 2 * largest / epsilon, torch.Generator().manual_seed(seed)).double()
    assert torch.allclose(released - noise, centre(rows, largest), atol=1e-6 * float(noise.abs().max() + 1))
    assert len(set(noise.tolist())) == 4


@given(st.integers(0, 2**31), st.floats(0.1, 3))
def test_densities_of_neighbours_differ_by_at_most_e_to_epsilon(seed: int, epsilon: float) -> None:
    largest, rows = 1.0, random_rows(seed, 3.0)
    other = rows.clone()
    other[0] = random_rows(seed + 1, 3.0)[0]
    output, scale = 5 * random_rows(seed + 2, 1.0)[0], 2 * largest / epsilon
    distances = [float((output - centre(data, largest)).abs().sum()) for data in (rows, other)]
    assert exp((distances[1] - distances[0]) / scale) <= exp(epsilon) * (1 + 1e-9)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_row_that_is_no_number_does_not_show(bad: float) -> None:
    rows = torch.tensor([[bad, 0.0], [0.1, 0.2]])
    assert bool(torch.isfinite(functional_mechanism(rows, 1.0, 1.0, torch.Generator())).all())
