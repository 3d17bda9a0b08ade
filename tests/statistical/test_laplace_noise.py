"""Noise has the law that it claims. Each Kolmogorov-Smirnov test alarms falsely with probability 1e-9 (exact law)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import kstwo, laplace

from stobatch.dp.noise import laplace as draw
from stobatch.models import DenseEncoder, Head, Network
from stobatch.published.lemmas import functional_mechanism
from stobatch.published.monte_carlo import FreshNoise
from stobatch.published.noise import PrivateNoise
from stobatch.seeds import Seeds
from stobatch.votes.noise import split_generator

FALSE_ALARM, DRAWS = 1e-9, 200_000


def rejected(sample: NDArray[np.float64], scale: float) -> bool:
    """Whether the sample is not one of Lap(scale)."""
    ordered = laplace.cdf(np.sort(sample), 0, scale)
    ranks = np.arange(len(ordered) + 1) / len(ordered)
    distance = max((ranks[1:] - ordered).max(), (ordered - ranks[:-1]).max())
    return bool(distance > kstwo.isf(FALSE_ALARM, len(ordered)))


def sample(scale: float, seed: int = 0) -> NDArray[np.float64]:
    return draw((DRAWS,), scale, torch.Generator().manual_seed(seed)).double().numpy()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 32.4, 1e6])
def test_draws_have_the_laplace_law(scale: float) -> None:
    assert not rejected(sample(scale), scale)


@pytest.mark.parametrize("error", [0.5, 0.95, 1.05])
def test_noise_of_another_scale_is_caught(error: float) -> None:
    assert rejected(sample(error), 1.0)


def test_gaussian_noise_of_equal_deviation_is_caught() -> None:
    assert rejected(np.sqrt(2) * np.random.default_rng(0).normal(size=DRAWS), 1.0)


def test_draws_are_finite_and_differ() -> None:
    values = sample(1.0)
    assert np.isfinite(values).all()
    assert len(np.unique(values)) > 0.97 * DRAWS  # float32 has few bits, but not that few


def test_each_part_of_the_private_noise_has_its_own_scale() -> None:
    shapes = {"input_shape": (DRAWS,), "hidden_shape": (DRAWS,), "label_shape": (DRAWS,)}
    noise = PrivateNoise.draw(Seeds.reproducible(1), input_scale=2.0, hidden_scale=4.0, label_scale=0.3, **shapes)
    for values, scale in ((noise.input_noise, 2.0), (noise.hidden_noise, 4.0), (noise.label_noise, 0.3)):
        assert not rejected(values.double().numpy(), scale)
        assert rejected(values.double().numpy(), 2 * scale)


def test_fresh_noise_for_inference_has_its_own_scale_at_each_layer() -> None:
    network = Network(DenseEncoder((40,), 50), Head(torch.nn.Identity(), torch.nn.Identity(), torch.nn.Linear(50, 2)))
    at_input, at_hidden = FreshNoise.shrunk(6.59, 13.18, 10.0).draw(
        network, 4000, split_generator(torch.Generator().manual_seed(2))
    )
    assert not rejected(at_input.flatten().double().numpy(), 0.659)
    assert not rejected(at_hidden.flatten().double().numpy(), 1.318)
    assert rejected(at_hidden.flatten().double().numpy(), 0.659)


def test_the_functional_mechanism_releases_with_sensitivity_over_epsilon() -> None:
    rows = torch.zeros(3, DRAWS, dtype=torch.float64)
    released = functional_mechanism(rows, 1.5, 0.5, torch.Generator().manual_seed(3)).numpy()
    assert not rejected(released, 6.0)
    assert rejected(released, 3.0)
