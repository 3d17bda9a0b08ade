"""Lemma 2: Δ_R <= d(β + 2). Violated by the coefficients (1/2 - x_ij) h_i that are perturbed; 3dβ holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stobatch.models import AffineEncoder, ConvEncoder, DenseEncoder
from stobatch.published.lemmas import reconstruction_sensitivity
from stobatch.published.losses import reconstruction_gradient


def coefficients(encoder: AffineEncoder, record: Tensor) -> Tensor:
    """(1/2 - x_j) h for one record without noise: a batch of one makes them the published gradient."""
    with torch.no_grad():
        return reconstruction_gradient(encoder, record[None], encoder(record[None]))


def change(encoder: AffineEncoder, record: Tensor, other: Tensor) -> float:
    return float((coefficients(encoder, record) - coefficients(encoder, other)).abs().sum())


def true_bound(d: int, beta: int, maps: int = 1) -> int:
    """3dβ per map: a bound that does hold for Σ (1/2 - x_j) h when x and h are in [-1, 1]."""
    return 3 * d * beta * maps


def dense(weights: Tensor) -> DenseEncoder:
    encoder = DenseEncoder((weights.shape[1],), weights.shape[0]).double()
    encoder.weight.data.copy_(weights)
    return encoder


def violating_pair(d: int, beta: int) -> tuple[DenseEncoder, Tensor, Tensor]:
    """Every hidden neuron reads the last input only, and only that input differs: h flips from 1 to -1."""
    weights = torch.zeros(beta, d, dtype=torch.float64)
    weights[:, -1] = 1
    other = -torch.ones(d, dtype=torch.float64)
    record = other.clone()
    record[-1] = 1
    return dense(weights), record, other


@pytest.mark.parametrize(
    ("d", "beta", "found", "published"), [(25, 14**2, 14_308, 4_950), (2, 3, 12, 10)], ids=["MNIST", "smallest"]
)
def test_the_published_lemma_is_violated_by_this_pair(d: int, beta: int, found: int, published: int) -> None:
    encoder, record, other = violating_pair(d, beta)
    assert encoder.max_column_norm() <= 1
    assert float(encoder(record[None]).detach().abs().max()) <= 1
    assert reconstruction_sensitivity(d, beta) == published
    assert change(encoder, record, other) == found == beta * (3 * (d - 1) + 1)
    assert found > published


@pytest.mark.parametrize(("padded", "expected"), [(True, 341_696), (False, 328_544)])
def test_all_32_maps_read_the_same_image_and_exceed_the_published_bound_66_to_69_times(
    padded: bool, expected: int
) -> None:
    """Delta kernels, the 196 pixels under them flipped; 69 times if the zeros around the image count as inputs."""
    side, padding = (32, 0) if padded else (28, 2)
    encoder = ConvEncoder((1, side, side), 32, 5, stride=2, padding=padding).double()
    encoder.weight.data.zero_()
    encoder.weight.data[:, :, 2, 2] = 1
    other = -torch.ones(1, 28, 28, dtype=torch.float64)
    record = other.clone()
    record[:, ::2, ::2] = 1
    edge = [2 - padding] * 4
    found = change(encoder, torch.nn.functional.pad(record, edge), torch.nn.functional.pad(other, edge))
    assert found == expected > 66 * reconstruction_sensitivity(25, 14**2)
    assert found <= true_bound(25, 14**2, 32) == 470_400


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**31), st.booleans())
def test_3_d_beta_bounds_every_pair_that_a_search_finds(d: int, beta: int, seed: int, corners: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights, record, other = (
        torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1 for shape in ((beta, d), (d,), (d,))
    )
    if corners:
        # Corners of the cube, and one input per neuron: where the change is largest.
        chosen = torch.nn.functional.one_hot(torch.randint(d, (beta,), generator=generator), d)
        weights, record, other = weights.sign() * chosen, record.sign(), other.sign()
    encoder = dense(weights)
    encoder.limit_columns(1.0)
    assert change(encoder, record, other) <= true_bound(d, beta) + 1e-9


@given(st.integers(1, 40), st.integers(1, 40))
def test_3_d_beta_is_tight_up_to_the_one_input_that_has_to_differ(d: int, beta: int) -> None:
    assert true_bound(d, beta) - change(*violating_pair(d, beta)) == 2 * beta


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 2**31))
def test_the_list_in_the_published_proof_is_bounded_but_it_is_not_what_is_perturbed(
    d: int, beta: int, seed: int
) -> None:
    """Σ h / 2, counted d times, and Σ x: within d(β + 2)."""
    generator = torch.Generator().manual_seed(seed)
    weights, x, y = (
        torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1 for shape in ((beta, d), (d,), (d,))
    )
    encoder = dense(weights)
    encoder.limit_columns(1.0)
    with torch.no_grad():
        hidden = float((encoder(x[None]) - encoder(y[None])).abs().sum()) / 2
    assert d * hidden + float((x - y).abs().sum()) <= reconstruction_sensitivity(d, beta) + 1e-9
