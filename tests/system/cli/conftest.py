"""The command line in this process: `cli("plan", "--json")` gives back the exit code and both streams."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.command_line import Result, call
from support.tiny import SETTINGS as TINY
from support.tiny import as_arguments

from stobatch.seeds import Seeds

SETTINGS = {**TINY, "audit.instruments": ["release"], "audit.release_trials": 100}
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
    return ["--recipe", "paper.demo", *as_arguments(SETTINGS)]


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
