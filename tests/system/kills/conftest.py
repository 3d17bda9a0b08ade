"""Runs to disturb: a fork server for real processes, and one undisturbed run to compare with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file
from support.disturbed import Server
from support.tiny import SETTINGS as TINY
from support.tiny import as_arguments

import stobatch
from stobatch import RunConfig
from stobatch_recipes import recipe

SETTINGS: dict[str, Any] = {**TINY, "method.total_epsilon": 200.0}


@pytest.fixture(scope="session")
def stobatch_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def config() -> RunConfig:
    return recipe("paper.demo").override_all({**SETTINGS, "seed": 1})


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    return ["--recipe", "paper.demo", *as_arguments(SETTINGS), "--seed", "1"]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> Path:
    """Trained, certified and evaluated without accident. Read only."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    stobatch.train(config, out, quiet=True)
    stobatch.certify(out, quiet=True)
    stobatch.evaluate(out, quiet=True)
    return out


@pytest.fixture
def run(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy of the undisturbed run, to be damaged."""
    return Path(shutil.copytree(undisturbed, tmp_path / "run"))


@pytest.fixture
def trained(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy of the undisturbed run that was neither certified nor evaluated."""
    leave = shutil.ignore_patterns("records", "certificates.json", "scores.json")
    return Path(shutil.copytree(undisturbed, tmp_path / "trained", ignore=leave))


Same = Callable[[Path, Path], None]


def _same_training(one: Path, other: Path) -> None:
    a, b = (load_file(run / "model.safetensors") for run in (one, other))
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different
    histories = [json.loads((run / "training.json").read_text())["history"] for run in (one, other)]
    assert histories[0] == histories[1]
    assert len(histories[0]) == 2
    noise = [load_file(run / "private" / "noise.safetensors") for run in (one, other)]
    assert all(torch.equal(noise[0][name], noise[1][name]) for name in noise[0])


@pytest.fixture(scope="session")
def same_training() -> Same:
    """Assert that two runs have the same bits: weights, history and noise."""
    return _same_training


def _rows(run: Path, verb: str) -> dict[str, list[Any]]:
    parts = sorted(run.glob(f"records/{verb}-*/rows-*.parquet"))
    columns: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in pyarrow.parquet.read_table(part).to_pydict().items():
            columns.setdefault(name, []).extend(values)
    return columns


@pytest.fixture(scope="session")
def rows() -> Callable[[Path, str], dict[str, list[Any]]]:
    """All rows of a verb's table, read without the library."""
    return _rows


def _files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="session")
def files() -> Callable[[Path], dict[str, bytes]]:
    """The whole content of a folder."""
    return _files
