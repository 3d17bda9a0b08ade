"""Runs to disturb: a fork server for real processes, and one undisturbed run to compare with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

import stobatch
from stobatch import RunConfig
from stobatch_recipes import recipe

SETTINGS: dict[str, Any] = {
    "data.train_limit": 120,
    "data.test_limit": 60,
    "method.batch_size": 30,
    "method.total_epsilon": 200.0,
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
    "machine.checkpoint_every": 1,
    "machine.threads": 1,
}


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


class Server:
    """Ask the fork server for one `stobatch` process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        script = Path(__file__).with_name("fork_server.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __call__(self, *arguments: object, **accident: Any) -> Ended:
        streams = {name: str(self.folder / name) for name in ("out", "err")}
        request = {"arguments": [str(argument) for argument in arguments], **streams, **accident}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        code = json.loads(self._line())
        return Ended(code, *(Path(file).read_text() for file in streams.values()))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


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
    changes = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    return ["--recipe", "paper.demo", *changes, "--seed", "1"]


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
