"""Small trained models behind a real server, in a thread of the test's own process."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from http_client import Client, serving

import stobatch
from stobatch import data
from stobatch.config import DataConfig
from stobatch.loading import TrainedModel
from stobatch_recipes import recipe

if importlib.util.find_spec("uvicorn") is None:  # an extra: CI has it
    collect_ignore_glob = ["test_*.py"]

SMALL = {"data.train_limit": 400, "data.test_limit": 60, "method.batch_size": 100}


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    """With plain bounds, which take a hundredth of the time that slopes take; see `climbing`."""
    plain = {"certification.slope_steps": 0}
    config = recipe("demo").override_all({**SMALL, **plain, "method.epsilon": 50.0, "training.steps": 8})
    return stobatch.train(config, tmp_path_factory.mktemp("runs") / "digits", quiet=True)


@pytest.fixture(scope="package")
def climbing(model: TrainedModel) -> TrainedModel:
    """Return the same network with the slopes of its bounds climbed on, as is the default."""
    return replace(model, config=model.config.override("certification.slope_steps", 20))


@pytest.fixture(scope="package")
def voting(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    draws = {"certification.noise_draws": 400, "certification.selection_draws": 20}
    config = recipe("sound.mnist_l2").override_all({**SMALL, **draws, "training.steps": 3})
    return stobatch.train(config, tmp_path_factory.mktemp("runs") / "votes", quiet=True)


@pytest.fixture(scope="package")
def inputs() -> torch.Tensor:
    return data.load(DataConfig(name="mnist", train_limit=1, test_limit=40)).test.inputs


@pytest.fixture(scope="package")
def client(model: TrainedModel, voting: TrainedModel) -> Iterator[Client]:
    with serving({"digits": model, "votes": voting}) as found:
        yield found
