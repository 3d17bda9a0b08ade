"""Norms of the whole first layer, against the dense matrix: what Lemma 3 and the corrected certificates need."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from stobatch.models import AffineEncoder, ConvEncoder, DenseEncoder, affine
from stobatch.types import Norm
from stobatch.votes.margins import hidden_shift, input_shift


def encoders() -> list[AffineEncoder]:
    made: list[AffineEncoder] = [
        DenseEncoder((7,), 5),
        DenseEncoder((2, 3), 11),
        ConvEncoder((1, 8, 8), 3, 5, stride=2, padding=2),
        ConvEncoder((3, 7, 7), 4, 4, stride=2, padding=1),
        ConvEncoder((2, 6, 9), 2, 3, stride=1, padding=1),
    ]
    for encoder in made:
        torch.nn.init.xavier_normal_(encoder.weight, generator=torch.Generator().manual_seed(1))
    return [encoder.double() for encoder in made]


@pytest.fixture(params=range(len(encoders())))
def encoder(request: pytest.FixtureRequest) -> AffineEncoder:
    return encoders()[request.param]


@torch.no_grad()
def dense(encoder: AffineEncoder) -> Tensor:
    size = torch.Size(encoder.input_shape).numel()
    return encoder(torch.eye(size, dtype=torch.float64).reshape(size, *encoder.input_shape)).flatten(1).t()


def test_norms_with_closed_forms_are_exact(encoder: AffineEncoder) -> None:
    A, norms = dense(encoder), encoder.operator_norms()
    assert norms.l1_to_l1 == pytest.approx(float(A.abs().sum(0).max()), rel=1e-12)
    assert norms.linf_to_linf == pytest.approx(float(A.abs().sum(1).max()), rel=1e-12)
    assert norms.l1_to_l2 == pytest.approx(float(A.norm(dim=0).max()), rel=1e-8)
    assert norms.l2_to_l2 == pytest.approx(np.linalg.svd(A.numpy(), compute_uv=False)[0], rel=1e-8)


def test_the_spectral_norm_is_a_bound_where_power_iteration_is_not(encoder: AffineEncoder) -> None:
    A, bound = dense(encoder), encoder.operator_norms().l2_to_l2
    vector = torch.randn(A.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(50):
        vector = A.t() @ (A @ vector)
        vector = vector / vector.norm()
        assert float((A @ vector).norm()) <= bound
    assert bound >= np.linalg.svd(A.numpy(), compute_uv=False)[0]


def test_no_corner_of_the_cube_exceeds_the_linf_to_l1_bound(encoder: AffineEncoder) -> None:
    A, bound = dense(encoder), encoder.operator_norms().linf_to_l1
    signs = torch.randn(2000, A.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).sign()
    for _ in range(5):
        assert float((signs @ A.t()).abs().sum(1).max()) <= bound
        signs = ((signs @ A.t()).sign() @ A).sign()  # climb: each step makes the sum larger or keeps it


def test_the_bound_holds_for_the_exact_norm_of_a_small_matrix() -> None:
    encoder = encoders()[0]
    A = dense(encoder)
    exact = max(float((A @ torch.tensor(s, dtype=torch.float64)).abs().sum()) for s in product((-1.0, 1.0), repeat=7))
    assert exact <= encoder.operator_norms().linf_to_l1


def test_the_linf_to_l1_bound_is_reached_by_a_matrix_of_one_sign() -> None:
    encoder = DenseEncoder((6,), 4).double()
    encoder.weight.data.copy_(torch.ones(4, 6))
    assert encoder.operator_norms().linf_to_l1 == pytest.approx(24)


def test_beyond_the_size_of_an_exact_spectrum_the_bounds_are_looser_but_hold(
    encoder: AffineEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = encoder.operator_norms()
    monkeypatch.setattr(affine, "EXACT_SPECTRUM_UP_TO", 0)
    loose = encoder.operator_norms()
    assert all(vars(loose)[name] >= value * (1 - 1e-8) for name, value in vars(exact).items())


@pytest.mark.parametrize("norm", list(Norm))
def test_no_unit_perturbation_moves_a_layer_further_than_its_shift(norm: Norm, encoder: AffineEncoder) -> None:
    A, order = dense(encoder), {Norm.L1: 1, Norm.L2: 2, Norm.LINF: float("inf")}[norm]
    generator = torch.Generator().manual_seed(2)
    vectors = torch.randn(2000, A.shape[1], generator=generator, dtype=torch.float64)
    spikes = torch.eye(A.shape[1], dtype=torch.float64)
    unit = torch.cat([vectors, vectors.sign(), spikes])
    unit = unit / unit.norm(p=order, dim=1, keepdim=True)
    for moved, shift in ((unit, input_shift(norm, A.shape[1])), (unit @ A.t(), hidden_shift(norm, encoder))):
        assert float(moved.norm(p=1, dim=1).max()) <= shift.l1 * (1 + 1e-12)
        assert float(moved.norm(p=2, dim=1).max()) <= shift.l2 * (1 + 1e-12)
