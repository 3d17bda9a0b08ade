"""The command line in this process: `cli("plan", "--json")` gives back the exit code and both streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.command_line import Result, call

from stobatch.seeds import Seeds

SETTINGS = {
    "data.train_limit": 120,
    "data.test_limit": 60,
    "method.batch_size": 30,
    "method.train_attack_steps": 2,
    "model.last_hidden_size": 16,
    "training.steps": 4,
    "training.monitor_every": 2,
    "certification.noise_draws": 50,
    "evaluation.attack_steps": 2,
    "evaluation.adaptive_attacks": ["fgsm", "madry"],
    "evaluation.adaptive_steps": 2,
    "evaluation.restarts": 1,
    "evaluation.noise_draws": 2,
    "evaluation.vote_attacks": ["madry"],
    "evaluation.vote_draws": 20,
    "evaluation.vote_limit": 10,
    "evaluation.num_images": 2,
    "evaluation.radii": [0.05, 0.2],
    "audit.instruments": ["release"],
    "audit.release_trials": 100,
    "machine.checkpoint_every": 1,
    "machine.threads": 1,
}


Cli = Callable[..., Result]


@pytest.fixture
def cli() -> Cli:
    return call


@pytest.fixture(autouse=True)
def repeatable_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds that are secret as far as the library knows, and the same in every run of the tests: none hangs on luck."""
    roots = count(1)
    monkeypatch.setattr(Seeds, "secret", classmethod(lambda cls: cls(next(roots), public=False)))


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """Arguments that make every verb take well under a second."""
    changes = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    return ["--recipe", "paper.demo", *changes]


@pytest.fixture(scope="session")
def settings() -> dict[str, Any]:
    return dict(SETTINGS)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> Path:
    """One `stobatch demo` for tests that only read what it wrote."""
    out = tmp_path_factory.mktemp("finished") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Seeds, "secret", classmethod(lambda cls: cls(1, public=False)))
        assert call("demo", "--out", out, "--json", *tiny).code == 0
    return out
