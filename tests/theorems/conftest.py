"""Small networks and trainings, cheap enough for every theorem's test and deterministic in their seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stobatch.data import Examples
from stobatch.models import Network, from_layers, initialise
from stobatch.published.noise import PrivateNoise
from stobatch.published.settings import PublishedConfig
from stobatch.published.training import PublishedTrainable
from stobatch.seeds import Seeds

SHAPE, HIDDEN, LAST, CLASSES = (1, 6, 6), (4, 3, 3), 6, 3

MakeNetwork = Callable[..., Network]
MakeExamples = Callable[..., Examples]
MakeNoise = Callable[..., PrivateNoise]
MakeTraining = Callable[..., PublishedTrainable]


@pytest.fixture
def make_network() -> MakeNetwork:
    """A convolution, one hidden layer and an output layer, in float64."""

    def make(seed: int = 0) -> Network:
        body = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(36, LAST))
        network = from_layers(nn.Conv2d(1, 4, 3, stride=2, padding=1), body, nn.Linear(LAST, CLASSES), SHAPE).double()
        initialise(network, torch.Generator().manual_seed(seed))
        return network

    return make


@pytest.fixture
def make_examples() -> MakeExamples:
    def make(count: int = 24, seed: int = 0) -> Examples:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.rand(count, *SHAPE, generator=generator) * 2 - 1
        return Examples(inputs, torch.randint(CLASSES, (count,), generator=generator), CLASSES)

    return make


@pytest.fixture
def make_noise() -> MakeNoise:
    def make(
        seed: int = 0, *, scale: float = 3.0, per_class: bool = False, label_seed: int | None = None
    ) -> PrivateNoise:
        def draw(label: int) -> PrivateNoise:
            return PrivateNoise.draw(
                Seeds.reproducible(label),
                input_shape=SHAPE,
                input_scale=scale,
                hidden_shape=HIDDEN,
                hidden_scale=2 * scale,
                label_shape=(CLASSES, LAST) if per_class else (LAST,),
                label_scale=scale,
            )

        noise = draw(seed)
        label_noise = noise.label_noise if label_seed is None else draw(label_seed).label_noise
        return PrivateNoise(noise.input_noise, noise.hidden_noise, label_noise)

    return make


@pytest.fixture
def make_training(make_network: MakeNetwork, make_examples: MakeExamples, make_noise: MakeNoise) -> MakeTraining:
    """A bound training of 24 examples in 4 batches of 6."""

    def make(
        examples: Examples | None = None, noise: PrivateNoise | None = None, seed: int = 0, **method: object
    ) -> PublishedTrainable:
        config = PublishedConfig(batch_size=6, train_attack_steps=2, **method)
        return PublishedTrainable(
            config, make_network(), examples or make_examples(), noise or make_noise(), Seeds.reproducible(seed)
        )

    return make


@pytest.fixture
def seeded() -> Callable[[int], torch.Generator]:
    return lambda seed: torch.Generator().manual_seed(seed)


@pytest.fixture
def uniform() -> Callable[..., Tensor]:
    """Float64 values in [-1, 1]."""

    def draw(*shape: int, seed: int = 0) -> Tensor:
        return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1

    return draw
