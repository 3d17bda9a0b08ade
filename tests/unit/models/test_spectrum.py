"""The largest eigenvalue by Lanczos and Cholesky, against all eigenvalues; and a search that misses it is caught."""

from __future__ import annotations

import pytest
import torch

from stobatch.models import spectrum


def gram(values: torch.Tensor) -> torch.Tensor:
    """Return a matrix with these eigenvalues."""
    noise = torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = torch.linalg.qr(noise).Q
    return basis @ torch.diag(values) @ basis.T


@pytest.mark.parametrize("gap", [0.0, 1e-12, 1e-6, 0.5])
@pytest.mark.parametrize("size", [3, 400])
def test_the_largest_eigenvalue_is_found_however_close_the_next_one_is(size: int, gap: float) -> None:
    values = torch.linspace(0, 2, size, dtype=torch.float64)
    values[-2] = values[-1] * (1 - gap)
    assert spectrum.largest_eigenvalue(gram(values)) == pytest.approx(2.0, rel=1e-11)


@pytest.mark.parametrize("missed", [1e-6, 1e-9, 0.5])
def test_a_search_that_ends_below_is_refuted_by_the_proof(missed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectrum, "_lanczos", lambda matrix: 2.0 * (1 - missed))
    assert spectrum.largest_eigenvalue(gram(torch.linspace(0, 2, 400, dtype=torch.float64))) == pytest.approx(2.0)


def test_a_matrix_of_zeros_has_no_reach() -> None:
    assert spectrum.largest_eigenvalue(torch.zeros(400, 400, dtype=torch.float64)) == pytest.approx(0.0, abs=1e-12)
