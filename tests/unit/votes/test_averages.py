"""A fixed mean of windows as a network's first layer: what votes under noise at the input prove of such a network.

The matrix A of means of k x k pixels has A Aᵀ = I/k². So noise N(0, σ²) at the input is N(0, σ²/k²) behind the mean,
independent again, and ‖Aδ‖ <= ‖δ‖/k: the two factors cancel, and the radius is σZ at the input as for any network.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stobatch.types import Norm
from stobatch.votes import GaussianNoise

STDDEV = 0.5


def matrix_of_means(side: int, window: int) -> Tensor:
    """Row by row, from what the layer makes of each pixel alone."""
    pixels = torch.eye(side**2, dtype=torch.float64).view(-1, 1, side, side)
    return nn.AvgPool2d(window)(pixels).flatten(1).mT


@pytest.mark.parametrize(("side", "window"), [(4, 2), (6, 3), (8, 2), (8, 4), (7, 2)])
def test_noise_behind_a_mean_is_independent_and_smaller_by_its_window(side: int, window: int) -> None:
    means = matrix_of_means(side, window)
    assert torch.allclose(means @ means.mT, torch.eye(len(means), dtype=torch.float64) / window**2, atol=1e-15)
    assert math.isclose(float(torch.linalg.matrix_norm(means, 2)), 1 / window, rel_tol=1e-12)


def test_means_that_overlap_make_noise_dependent() -> None:
    """Why the windows have to lie side by side for the law above; the radius at the input does not need it."""
    pixels = torch.eye(36, dtype=torch.float64).view(-1, 1, 6, 6)
    means = nn.AvgPool2d(2, 1)(pixels).flatten(1).mT
    assert not torch.allclose(means @ means.mT, torch.eye(len(means), dtype=torch.float64) / 4, atol=1e-3)


def share_of_top(direction: Tensor, means: Tensor, shift: Tensor, threshold: float) -> float:
    """How often noise leaves a half-space behind the means on its side, exactly: a normal number's distribution."""
    seen = direction @ means
    return float(torch.special.ndtr((threshold - seen @ shift) / (STDDEV * seen.norm())))


@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (2.0, False)])
@pytest.mark.parametrize("norm", [Norm.L2, Norm.LINF])
def test_the_worst_half_space_is_met_exactly_and_a_doubled_radius_is_refuted(
    norm: Norm, factor: float, holds: bool
) -> None:
    """Who lets the mean halve perturbations and forgets that it halves the noise claims twice the radius: too much."""
    side, window = 8, 2
    means = matrix_of_means(side, window)
    direction = torch.ones(len(means), dtype=torch.float64)  # weights of one sign and size: worst for both norms
    top = share_of_top(direction, means, torch.zeros(side**2, dtype=torch.float64), threshold=2.0)
    radius = factor * float(GaussianNoise(STDDEV).radius(norm, np.array(top), np.array(1 - top), side**2))
    seen = direction @ means
    worst = radius * (seen / seen.norm() if norm is Norm.L2 else seen.sign())
    moved = share_of_top(direction, means, worst, threshold=2.0)
    assert (moved > 0.5) is holds
    if holds:
        assert moved < 0.5 + 1e-6  # nothing is given away
