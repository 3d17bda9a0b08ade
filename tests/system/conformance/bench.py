"""A method on the bench: its small data, changed in a known way, and its training without the verbs around it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from odd_engines import Noting
from torch import Tensor, nn
from watched import Read

import stobatch
from stobatch import Dataset, Network, RunConfig
from stobatch.config import DataConfig
from stobatch.data import Examples, TrainingExamples, partition
from stobatch.data import load as load_data
from stobatch.loading import make_network
from stobatch.methods import Method
from stobatch.seeds import Seeds
from stobatch.training import Trainable
from stobatch.training import train as run_training


@cache
def _read(data: DataConfig) -> Dataset:
    return load_data(data)


def data_of(config: RunConfig) -> Dataset:
    """The entry's data, read once."""
    return _read(config.data)


def train_of(config: RunConfig) -> Examples:
    return data_of(config).train.in_memory()


def dataset_with(config: RunConfig, train: TrainingExamples) -> Dataset:
    """The entry's data with other training examples of the same sizes."""
    return dataclasses.replace(data_of(config), train=train)


def replaced(train: Examples, row: int) -> Examples:
    """One example is another one: far from it in every pixel, with another label."""
    inputs, labels = train.inputs.clone(), train.labels.clone()
    inputs[row] = torch.where(inputs[row] > 0, -1.0, 1.0)
    labels[row] = (labels[row] + 1) % train.num_classes
    return Examples(inputs, labels, train.num_classes)


def other_examples(train: Examples) -> Examples:
    """As many, of the same shape, and nothing in common."""
    inputs = torch.rand(train.inputs.shape, generator=torch.Generator().manual_seed(9)) * 2 - 1
    return Examples(inputs, train.labels.roll(1), train.num_classes)


def batch_key(config: RunConfig) -> str:
    """The setting that says how many examples a step takes."""
    assert "batch_size" in type(config.method).model_fields
    return "method.batch_size"


def budget_keys(config: RunConfig) -> dict[str, list[str]]:
    """The settings that are an ε, and those that are a δ, of records; the noise of certificates has its own."""
    names = [name for name in type(config.method).model_fields if not name.startswith("robustness_")]
    return {
        kind: [f"method.{name}" for name in names if name == kind or name.endswith(f"_{kind}")]
        for kind in ("epsilon", "delta")
    }


def own_network(config: RunConfig, *, shape: tuple[int, ...] | None = None, mixing: bool = False) -> Network:
    """A network to hand over, for inputs of this shape; with batch normalisation in it, if asked for."""
    shape = shape or data_of(config).info.input_shape
    torch.manual_seed(0)
    size = config.model.last_hidden_size
    layers: list[nn.Module] = [nn.Tanh(), nn.Linear(6, size)]
    if mixing:
        layers.insert(0, nn.BatchNorm1d(6))
    pixels = int(np.prod(shape))
    return stobatch.from_layers(nn.Linear(pixels, 6), nn.Sequential(*layers), nn.Linear(size, 10), shape)


def with_own_network(config: RunConfig) -> RunConfig:
    return config.override("model.architecture", "custom")


def prepared(method: Method, config: RunConfig, train: TrainingExamples | None = None) -> Trainable:
    """The method bound to the entry's data, or to others of the same sizes."""
    assert config.seed is not None
    info, seeds = data_of(config).info, Seeds.reproducible(config.seed)
    network = make_network(config, info, seeds, None)
    return method.prepare(config, method.plan(config, info, None), network, train or train_of(config), seeds)


Keep = Callable[[list[int]], list[int]]
"""What is left of a sample, as if the rest had never been there."""


def all_of_it(rows: list[int]) -> list[int]:
    return rows


@contextmanager
def samples(keep: Keep = all_of_it) -> Iterator[list[set[int]]]:
    """Every Poisson sample that is drawn, or what is kept of it.

    Methods whose proof rests on Poisson sampling draw by `data.partition.poisson_sample`, which is tested by itself.
    """
    original, drawn = partition.poisson_sample, list[set[int]]()

    def noting(num_examples: int, rate: float, generator: np.random.Generator) -> Tensor:
        kept = keep(original(num_examples, rate, generator).tolist())
        drawn.append(set(kept))
        return torch.tensor(kept, dtype=torch.long)

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("stobatch.") and getattr(module, "poisson_sample", None) is original:
                patch.setattr(module, "poisson_sample", noting)
        yield drawn


@dataclass(frozen=True)
class Finished:
    """A run with secret seeds that every verb has worked on, and what each verb read of the training examples."""

    path: Path
    certifies: bool
    reads: dict[str, list[Read]]


@dataclass(frozen=True)
class Trained:
    """A training without the verbs: what it was told or released, and the samples it drew."""

    trainable: Trainable
    engine: Noting
    drawn: list[set[int]]


def trained(
    method: Method,
    config: RunConfig,
    folder: Path,
    *,
    train: Examples | None = None,
    like: Trained | None = None,
    keep: Keep = all_of_it,
) -> Trained:
    """Train to the end; `like` is a training whose releases this one hears in place of its own."""
    engine = Noting(told=like.engine.releases if like else None)
    trainable = prepared(method, config, train)
    with samples(keep) as drawn:
        run_training(trainable, config, engine, folder, data_of(config).test, resume=False, quiet=True)
    return Trained(trainable, engine, drawn)
