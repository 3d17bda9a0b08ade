"""Two small runs of the same settings with secret seeds, made once; a copy to tamper with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tamperings import make_run


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained, certified, evaluated, attacked, audited and reported. Read only."""
    return make_run(tmp_path_factory.mktemp("verified") / "run")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another run of the same settings, with secrets of its own. Read only."""
    return make_run(tmp_path_factory.mktemp("verified") / "other")


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))
