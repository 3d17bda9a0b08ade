"""Trainings of several real processes: as torchrun starts them, and by torchrun itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.groups import Server, arguments


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("group"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def sound_alone(group: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sound method with one trainer, in one process and undisturbed. Read only."""
    out = tmp_path_factory.mktemp("alone") / "run"
    ended = group(0, "train", "--out", out, *arguments())
    assert ended.codes == [0], ended.err
    return out
