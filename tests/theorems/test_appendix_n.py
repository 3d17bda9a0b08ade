"""Appendix N: Monte Carlo over fresh noise ψ times smaller, around the fixed noise; fast form against a naive loop."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from stobatch.config import ModelConfig
from stobatch.models import Network, build, from_layers, initialise
from stobatch.published import monte_carlo
from stobatch.published.monte_carlo import FreshNoise, Tally, tally_products
from stobatch.votes.noise import Streams, split_generator

DRAWS, INPUTS = 24, 4


@dataclass(frozen=True)
class Replay(FreshNoise):
    """Hands out the same draws in the same order, in whatever portions they are asked for."""

    position: list[int] = field(default_factory=lambda: [0])

    def draw(self, network: Network, count: int, streams: Streams) -> tuple[Tensor, Tensor]:
        first = self.position[0]
        self.position[0] += count
        return tuple(part[first : first + count] for part in all_draws(network, self))


def all_draws(network: Network, noise: FreshNoise) -> tuple[Tensor, Tensor]:
    return FreshNoise(noise.input_scale, noise.hidden_scale).draw(
        network, DRAWS, split_generator(torch.Generator().manual_seed(4))
    )


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def conv_network(normalisation: str) -> Network:
    config = ModelConfig(architecture="mnist_cnn", normalisation=normalisation, last_hidden_size=16)
    return build(config, (1, 12, 12), 4, torch.Generator().manual_seed(0))


def dense_network() -> Network:
    network = from_layers(nn.Linear(20, 9), nn.Sequential(nn.Tanh(), nn.Linear(9, 6)), nn.Linear(6, 4), (20,))
    initialise(network, torch.Generator().manual_seed(0))
    return network


@pytest.fixture(params=["reference", "group", "none", "dense"])
def network(request: pytest.FixtureRequest) -> Network:
    """With fixed noise, as deployed, in float64 so that the order of a sum decides no vote."""
    made = dense_network() if request.param == "dense" else conv_network(request.param)
    made = made.double()
    generator = torch.Generator().manual_seed(1)
    made.set_noise(
        *(torch.randn(s, generator=generator) for s in (made.encoder.input_shape, made.encoder.hidden_shape))
    )
    made.head.output.weight.data.mul_(20)
    made.calibrate()
    return made


def some_inputs(network: Network) -> Tensor:
    return torch.rand(INPUTS, *network.encoder.input_shape, generator=torch.Generator().manual_seed(2)).double() * 2 - 1


@torch.no_grad()
def naive(network: Network, inputs: Tensor, noise: FreshNoise) -> Tally:
    """Appendix N as it is written: one invocation at a time, through the deployed network."""
    votes = torch.zeros(INPUTS, network.num_classes, dtype=torch.int64)
    scores = torch.zeros(INPUTS, network.num_classes, dtype=torch.float64)
    for at_input, at_hidden in zip(*all_draws(network, noise), strict=True):
        for row, x in enumerate(inputs):
            noisy = (x + network.input_noise)[None]
            f_x = network.scores_of_noisy(noisy + at_input).softmax(1)[0]
            f_h = network.head(network.noisy_hidden(noisy) + at_hidden).softmax(1)[0]
            votes[row, int((f_x * f_h).argmax())] += 1
            scores[row] += f_x * f_h
    return Tally(votes, scores, DRAWS)


def test_the_fast_tally_is_the_naive_loop(network: Network) -> None:
    inputs, noise = some_inputs(network), Replay(0.7, 1.4)
    fast, slow = tally_products(network, inputs, noise, DRAWS, torch.Generator(), 512), naive(network, inputs, noise)
    assert torch.equal(fast.votes, slow.votes)
    assert torch.allclose(fast.scores, slow.scores, rtol=0, atol=1e-9)
    assert int((fast.votes > 0).sum()) > INPUTS, "the noise must matter for this test to mean anything"
    assert fast.votes.sum(1).tolist() == [DRAWS] * INPUTS


def test_the_size_of_a_tile_changes_no_vote_given_the_same_draws(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, tallies = some_inputs(network), []
    for rows in (3, 7, 200):
        monkeypatch.setattr(monte_carlo, "CPU_ROWS", rows)
        tallies.append(tally_products(network, inputs, Replay(0.7, 1.4), DRAWS, torch.Generator(), 512))
    assert all(torch.equal(tally.votes, tallies[0].votes) for tally in tallies)
    assert all(torch.allclose(tally.scores, tallies[0].scores, rtol=0, atol=1e-9) for tally in tallies)


def test_the_memory_budget_changes_no_vote() -> None:
    network = build(ModelConfig(), (1, 28, 28), 10, torch.Generator().manual_seed(0)).double()
    network.calibrate()
    inputs = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(1)).double() * 2 - 1
    votes = [
        tally_products(network, inputs, FreshNoise(1.0, 2.0), 100, torch.Generator().manual_seed(2), memory_mb).votes
        for memory_mb in (16, 512)
    ]
    assert torch.equal(*votes)


@pytest.mark.parametrize("inputs", [230, 401])
def test_threads_change_no_vote_and_no_bit_of_a_score(inputs: int) -> None:
    """Some threads share the images of each tile; one alone is the oracle.

    Kernels of processors without AVX have other last bits for other numbers of rows; scores are then the same up to
    rounding.
    """
    network = conv_network("reference")
    network.calibrate()
    network.head.output.weight.data.mul_(20)
    images = torch.rand(inputs, 1, 12, 12, generator=torch.Generator().manual_seed(2)) * 2 - 1
    threads, tallies = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            tallies.append(tally_products(network, images, FreshNoise(0.7, 1.4), 37, seeded(3), 512))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert int((tallies[0].votes > 0).sum()) > inputs, "a test of nothing"
    rounding = 0.0 if torch.backends.cpu.get_cpu_capability().startswith("AVX") else 1e-4
    for tally in tallies[1:]:
        assert torch.equal(tally.votes, tallies[0].votes)
        assert torch.allclose(tally.scores, tallies[0].scores, rtol=0, atol=rounding)


def test_a_network_with_code_of_its_own_is_asked_by_one_thread() -> None:
    class Watched(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            seen.add(threading.get_ident())
            return values

    seen: set[int] = set()
    body = nn.Sequential(nn.ReLU(), Watched(), nn.Flatten(), nn.Linear(72, 6))
    network = from_layers(nn.Conv2d(1, 2, 3, stride=2, padding=1), body, nn.Linear(6, 4), (1, 12, 12))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        tally_products(network, torch.zeros(250, 1, 12, 12), FreshNoise(0.7, 1.4), 5, seeded(), 512)
    finally:
        torch.set_num_threads(threads)
    assert seen == {threading.get_ident()}


def test_each_input_is_judged_as_if_it_were_alone(network: Network) -> None:
    inputs = some_inputs(network)
    together = tally_products(network, inputs, Replay(0.7, 1.4), DRAWS, torch.Generator(), 512).votes
    for row in range(INPUTS):
        alone = tally_products(network, inputs[row : row + 1], Replay(0.7, 1.4), DRAWS, torch.Generator(), 512).votes
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("psi", [1.0, 2.0, 10.0])
def test_fresh_noise_is_psi_times_smaller(psi: float) -> None:
    noise = FreshNoise.shrunk(32.4, 64.8, psi)
    assert noise.input_scale * psi == pytest.approx(32.4)
    assert noise.hidden_scale * psi == pytest.approx(64.8)


def test_the_expected_score_does_not_converge_to_the_score_at_the_fixed_noise() -> None:
    """The appendix says it does. For f = [x > 0] at x = 0.1 the mean stays near 1/2, the score at the centre is 1."""
    draws = torch.distributions.Laplace(0.0, 5.0)
    assert float(draws.cdf(torch.tensor(0.1))) < 0.52


def test_the_deployed_function_contains_the_private_noise(network: Network) -> None:
    """Two queries of the linear first layer, at 0 with and without, give χ1 through θ1 and 2χ2 away."""
    zero = torch.zeros(1, *network.encoder.input_shape, dtype=torch.float64)
    with torch.no_grad():
        seen = network.noisy_hidden(zero + network.input_noise)
        expected = network.encoder(network.input_noise[None]) + network.hidden_noise
    assert torch.allclose(seen, expected, atol=1e-12)
