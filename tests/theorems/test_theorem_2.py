"""Theorem 2 (Eq. 31): crafting adversarial examples first does not help, one step on them separates neighbours too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stobatch.attacks import IFGSM, Ball, craft
from stobatch.dp.noise import laplace
from stobatch.models import Network, from_layers, initialise
from stobatch.published.lemmas import adversarial_encoder_budget, encoder_budget, reconstruction_sensitivity
from stobatch.published.losses import reconstruction_gradient
from stobatch.published.settings import IterativeSchedule
from stobatch.seeds import Seeds
from stobatch.types import Radius

D, BETA, M = 16, 8, 30


def linear_network(seed: int = 0) -> Network:
    network = from_layers(nn.Linear(D, BETA), nn.Identity(), nn.Linear(BETA, 2), (D,)).double()
    initialise(network, torch.Generator().manual_seed(seed))
    return network


def scatter(batch: Tensor) -> Tensor:
    centred = batch - batch.mean(0)
    return centred.t() @ centred


def second_singular_value(network: Network, gradient: Tensor, batch: Tensor) -> float:
    return float(torch.linalg.svdvals(gradient.t() + scatter(batch) @ network.encoder.columns().detach())[1])


def unclamped_scores(network: Network) -> Callable[[Tensor], Tensor]:
    """Scores whose gradient does not vanish where the last hidden layer would be clamped."""
    return lambda points: network.head.output(network.noisy_hidden(points))


@pytest.mark.parametrize(("epsilon", "least"), [(1e-3, 38), (0.06, 30)])
def test_one_step_on_adversarial_examples_tells_neighbours_apart(epsilon: float, least: int) -> None:
    """Shared noise gives all examples one prediction, so the same signs: one more translation, and the rank test works.

    The true batch passes in nearly all of 40 games, the neighbour in none: no finite ε allows that.
    """
    scale, radius = reconstruction_sensitivity(D, BETA) / (M * epsilon), Radius(0.2)
    generator = torch.Generator().manual_seed(1)
    batch = torch.rand(M, D, generator=generator, dtype=torch.float64) - 0.5
    other = batch.clone()
    other[-1] = -other[-1]
    pair, passed = (batch, other), [0, 0]
    for game in range(40):
        network = linear_network()
        network.set_noise(laplace((D,), scale, generator), laplace((BETA,), 2 * scale, generator))
        noisy = pair[game % 2] + network.input_noise
        ball = Ball.around(noisy, radius, shift=network.input_noise)
        adversarial = craft(unclamped_scores(network), ball, [IFGSM(steps=2)], generator)
        with torch.no_grad():
            gradient = reconstruction_gradient(network.encoder, adversarial, network.noisy_hidden(adversarial))
        for wrong in (0, 1):
            passed[wrong] += second_singular_value(network, gradient, pair[(game + wrong) % 2]) < 1e-3
    assert passed[0] >= least
    assert passed[1] == 0


def test_algorithm_1_uses_every_tuple_for_both_objectives() -> None:
    """So 'disjoint, hence parallel' holds within a step only."""
    schedule = IterativeSchedule(5, Seeds.reproducible(0))
    tasks = [schedule.tasks(step)[0] for step in range(5)]
    assert {task.benign_batch for task in tasks} == {task.adversarial_batch for task in tasks} == set(range(5))


def test_the_claim_is_that_of_theorem_1() -> None:
    assert adversarial_encoder_budget(0.06, 1.981) == encoder_budget(0.06, 1.981)
