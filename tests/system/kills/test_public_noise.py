"""Why a public seed voids a guarantee: from the public files of such a run its noise is rebuilt and taken off.

The attacker has `config.json` and `model.safetensors`, and the library. It makes the run's step on records of its own,
clipped to nothing, with the seed that it has read; what is released is noise alone, and that it subtracts from what the
run released.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import stobatch
from stobatch.config import RunConfig
from stobatch.data import Dataset, DatasetInfo, Examples
from stobatch.dp.plan import DpSgdPlan
from stobatch.loading import make_network, make_plan
from stobatch.methods import method_of
from stobatch.seeds import Seeds
from stobatch.sound.step import DpSgdTrainable
from stobatch.training.engines import Gradients, InProcessEngine
from stobatch_recipes import recipe

RATE = 0.5


def records() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.rand(220, 1, 4, 4, generator=generator) * 2 - 1, torch.arange(220) % 3
    return stobatch.from_tensors(inputs[:200], labels[:200], inputs[200:], labels[200:], num_classes=3)


def settings(seed: int | None) -> RunConfig:
    changes = {
        "data.name": "tensors",
        "method.epsilon": 1.0,
        "method.delta": 1e-4,
        "method.momentum": 0.0,
        "method.average_decay": 0.0,
        "method.expected_batch_size": 100,
        "model.architecture": "linear 5, relu, linear",
        "training.steps": 1,
        "training.learning_rate": RATE,
        "machine.threads": 1,
        "seed": seed,
    }
    return recipe("sound.mnist").override_all(changes)


def trainable_of(config: RunConfig, info: DatasetInfo, train: Examples, seed: int) -> DpSgdTrainable:
    seeds = Seeds.reproducible(seed)
    network = make_network(config, info, seeds, None)
    trainable = method_of(config).prepare(config, make_plan(config, info, None), network, train, seeds)
    assert isinstance(trainable, DpSgdTrainable)
    return trainable


def noise_alone(config: RunConfig, info: DatasetInfo, seed: int) -> tuple[Gradients, DpSgdTrainable]:
    """The noise of the first step, by someone who has nothing but the configuration and the seed."""
    blank = Examples(torch.zeros(info.num_train, *info.input_shape), torch.arange(info.num_train) % 2, info.num_classes)
    attacker = trainable_of(config, info, blank, seed)
    attacker.clip_norm = 1e-12
    return attacker.release(0, InProcessEngine()).gradients, attacker


def without_noise(run: Path, seed: int) -> tuple[Gradients, DpSgdPlan]:
    """What a run's only step released, less the noise that this seed gives: from its two public files alone."""
    document = json.loads((run / "config.json").read_text())
    config, info = RunConfig.from_dict(document["config"]), DatasetInfo.from_dict(document["dataset"])
    noise, attacker = noise_alone(config, info, seed)
    first, last = dict(attacker.network.named_parameters()), load_file(run / "model.safetensors")
    return {name: (first[name].detach() - last[name]) / RATE - noise[name] for name in first}, attacker.plan


def contributions(config: RunConfig, seed: int) -> Gradients:
    """What the sampled records really added, as their owner knows: the release of a trainer without noise."""
    data = records()
    owner = trainable_of(config, data.info, data.train.in_memory(), seed)
    owner.noise_stddev = 0.0
    return owner.release(0, InProcessEngine()).gradients


def norm(gradients: Gradients) -> float:
    return float(torch.cat([value.flatten() for value in gradients.values()]).norm())


def difference(first: Gradients, second: Gradients) -> dict[str, Tensor]:
    return {name: first[name] - second[name] for name in first}


@pytest.mark.parametrize("seed", [1, 2**40])
def test_the_noise_of_a_public_seed_is_taken_off(tmp_path: Path, seed: int) -> None:
    config = settings(seed)
    model = stobatch.train(config, tmp_path / "run", dataset=records(), quiet=True)
    assert model.guarantee.status is stobatch.Status.VOID
    found, plan = without_noise(tmp_path / "run", seed)
    truth = contributions(config, seed)
    added = plan.noise_multiplier / plan.expected_batch_size
    assert norm(truth) > 0.01
    assert norm(difference(found, truth)) < 1e-5 < added / 100


def test_the_noise_of_secret_seeds_stays_on(tmp_path: Path) -> None:
    """The same attack with a guess of the seed leaves the run's own noise and that of the guess.

    Both are Gaussian in more than 90 coordinates, so their length is above half of what is expected but with a
    probability below 1e-9 (chi-squared).
    """
    model = stobatch.train(settings(None), tmp_path / "run", dataset=records(), quiet=True)
    assert model.guarantee.status is stobatch.Status.PROVED
    found, plan = without_noise(tmp_path / "run", 1)
    coordinates = sum(value.numel() for value in found.values())
    assert coordinates > 90
    assert norm(found) > 0.5 * plan.noise_multiplier / plan.expected_batch_size * coordinates**0.5
