"""Theorem 1 (Eq. 16, Eq. 17, Eq. 18; Δ_g: Eq. 20, Eq. 21, Eq. 22): one step on θ1 separates neighbours perfectly.

With sbar = Σ x̄ᵢ and C the centred scatter matrix of the raw batch the published gradient is
g = -Cθ + uwᵀ, u = m/2 - sbar, w = θᵀsbar/m + 2χ2/m. All noise sits in a matrix of rank one.
"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from stobatch.dp.noise import laplace
from stobatch.models import DenseEncoder
from stobatch.published.lemmas import encoder_budget, gradient_sensitivity, reconstruction_sensitivity
from stobatch.published.losses import reconstruction_gradient

D, BETA, M = 25, 32, 50


def encoder() -> DenseEncoder:
    layer = DenseEncoder((D,), BETA).double()
    torch.nn.init.xavier_uniform_(layer.weight, generator=torch.Generator().manual_seed(0))
    layer.limit_columns(1.0)
    return layer


def scatter(batch: Tensor) -> Tensor:
    centred = batch - batch.mean(0)
    return centred.t() @ centred


def neighbours() -> tuple[Tensor, Tensor]:
    batch = torch.rand(M, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1
    other = batch.clone()
    other[-1] = -other[-1]
    return batch, other


def release(layer: DenseEncoder, batch: Tensor, epsilon: float, generator: torch.Generator, *, fresh: bool) -> Tensor:
    """One gradient with public θ; `fresh` is the twin with its own noise for every example."""
    scale = reconstruction_sensitivity(D, BETA) / (M * epsilon)
    rows = M if fresh else 1
    noisy = batch + laplace((rows, D), scale, generator).double()
    with torch.no_grad():
        hidden = layer(noisy) + laplace((rows, BETA), 2 * scale, generator).double()
        return reconstruction_gradient(layer, noisy, hidden).t()


def second_singular_value(layer: DenseEncoder, gradient: Tensor, batch: Tensor) -> float:
    """0 up to rounding if the gradient came from this batch."""
    theta = layer.columns().detach()
    return float(torch.linalg.svdvals(gradient + scatter(batch) @ theta)[1])


def right_guesses(epsilon: float, games: int, *, fresh: bool) -> int:
    layer, pair = encoder(), neighbours()
    generator = torch.Generator().manual_seed(2)
    right = 0
    for game in range(games):
        gradient = release(layer, pair[game % 2], epsilon, generator, fresh=fresh)
        ranks = [second_singular_value(layer, gradient, batch) for batch in pair]
        right += ranks[game % 2] < ranks[1 - game % 2]
    return right


@pytest.mark.parametrize("seed", range(5))
def test_all_noise_of_the_gradient_sits_in_a_matrix_of_rank_one(seed: int) -> None:
    layer, (batch, _) = encoder(), neighbours()
    generator = torch.Generator().manual_seed(seed)
    chi_1, chi_2 = laplace((D,), 1.7, generator).double(), laplace((BETA,), 3.4, generator).double()
    noisy, theta = batch + chi_1, layer.columns().detach()
    with torch.no_grad():
        gradient = reconstruction_gradient(layer, noisy, layer(noisy) + chi_2).t()
    total = noisy.sum(0)
    closed_form = -scatter(batch) @ theta + torch.outer(M / 2 - total, theta.t() @ total / M + chi_2)
    assert float((gradient - closed_form).norm() / gradient.norm()) < 1e-12


@pytest.mark.parametrize("epsilon", [1e-3, 0.06, 1.0])
def test_the_rank_test_separates_neighbours_every_time(epsilon: float) -> None:
    """e^ε p + δ with ε = encoder_budget allows nothing of the kind: TPR 1 and FPR 0 refute every finite ε."""
    assert encoder_budget(epsilon, 1.981) < 1.6
    assert right_guesses(epsilon, 200, fresh=False) == 200


@pytest.mark.parametrize("epsilon", [1e-3, 0.06, 1.0])
def test_with_fresh_noise_per_example_the_rank_test_only_guesses(epsilon: float) -> None:
    """The twin. A coin lands outside of this interval with probability 1e-9."""
    games = 200
    low, high = binom.ppf(5e-10, games, 0.5), binom.isf(5e-10, games, 0.5)
    assert low <= right_guesses(epsilon, games, fresh=True) <= high


def test_the_claimed_budget_is_the_published_sum() -> None:
    assert encoder_budget(0.06, 2.0) == pytest.approx(0.09)


def test_noise_in_the_inputs_exceeds_the_sensitivity_claimed_for_a_gradient_column() -> None:
    """Δ_g = 3β assumes |1/2 - x̄| <= 3/2; with x̄ = x + χ1/m two neighbours differ by more in every column."""
    layer, (batch, other) = encoder(), neighbours()
    noise = laplace((D,), reconstruction_sensitivity(D, BETA) / (M * 0.06), torch.Generator().manual_seed(3)).double()
    with torch.no_grad():
        sums = [reconstruction_gradient(layer, data + noise, layer(data + noise)).t() for data in (batch, other)]
    assert float((sums[0] - sums[1]).abs().sum(1).max()) > gradient_sensitivity(BETA)
