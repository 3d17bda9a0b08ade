"""Two small runs of the same settings with secret seeds, made once; a copy to tamper with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.tamperings import make_run

from stobatch.seeds import Seeds


def made(out: Path, root: int) -> Path:
    """A run whose seeds are secret as far as the library knows, and the same each time: no test hangs on luck."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Seeds, "secret", classmethod(lambda cls: cls(root, public=False)))
        return make_run(out)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained, certified, evaluated, attacked, audited and reported. Read only."""
    return made(tmp_path_factory.mktemp("verified") / "run", root=1)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another run of the same settings, with secrets of its own. Read only."""
    return made(tmp_path_factory.mktemp("verified") / "other", root=2)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))
