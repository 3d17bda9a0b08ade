"""One tiny run that was trained, certified and evaluated, and copies of it to work on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import evaluate_as

import stobatch
from stobatch import RunConfig, data
from stobatch.models import Network
from stobatch_recipes import recipe

SETTINGS: dict[str, Any] = {
    "data.train_limit": 300,
    "data.test_limit": 40,
    "method.batch_size": 60,
    "method.total_epsilon": 3000.0,
    "method.train_attack_steps": 1,
    "model.architecture": "small_cnn",
    "model.last_hidden_size": 16,
    "training.steps": 1,
    "certification.noise_draws": 50,
    "certification.resampling_shrinkage": 1.0,
    "evaluation.attack_steps": 2,
    "evaluation.adaptive_attacks": ["fgsm", "madry"],
    "evaluation.adaptive_steps": 2,
    "evaluation.restarts": 1,
    "evaluation.noise_draws": 2,
    "evaluation.vote_attacks": ["madry"],
    "evaluation.vote_draws": 30,
    "evaluation.vote_limit": 10,
    "evaluation.num_images": 2,
    "evaluation.radii": [0.0005, 0.2],
    "evaluation.queries": 3,
    "machine.threads": 1,
    "seed": 1,
}


@pytest.fixture(scope="session")
def config() -> RunConfig:
    return recipe("paper.demo").override_all(SETTINGS)


def _fit(network: Network, config: RunConfig) -> None:
    """The method's own training would need thousands of images; scores of a model that knows nothing would all be 0."""
    train = data.load(config.data).train
    descent = torch.optim.Adam(network.requires_grad_(True).parameters(), lr=0.005)
    for _ in range(30):
        descent.zero_grad()
        torch.nn.functional.cross_entropy(network(train.inputs), train.labels).backward()
        descent.step()
        network.calibrate()


@pytest.fixture(scope="session")
def evaluated(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> Path:
    """Read only."""
    out = tmp_path_factory.mktemp("evaluated") / "run"
    network = stobatch.train(config, out, quiet=True).network
    _fit(network, config)
    evaluate_as(network, config, out)
    return out


@pytest.fixture
def run(evaluated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(evaluated, tmp_path / "run"))
