"""What a training took at most: seen when it is large, forgotten when it is over, and named after what it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stobatch
from stobatch import training_run as verb
from stobatch.config import DataConfig, MachineConfig, ModelConfig, RunConfig, TrainingConfig
from stobatch.sound.settings import SoundConfig
from stobatch.training import device as peak_memory
from stobatch.training.device import PeakMemory

LARGE = 300
"""MiB; training the small network below takes a few."""

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere an older peak cannot be forgotten")


def trained(out: Path) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.rand(40, 1, 6, 6, generator=generator) * 2 - 1, torch.arange(40) % 3
    dataset = stobatch.from_tensors(inputs[:30], labels[:30], inputs[30:], labels[30:], num_classes=3)
    config = RunConfig(
        method=SoundConfig(epsilon=3.0, delta=1e-2, batch_size=8, warm_up=0.0),
        data=DataConfig(name="tensors"),
        model=ModelConfig(architecture="conv 3 3/2, relu, linear"),
        training=TrainingConfig(steps=2, learning_rate=0.1, optimiser="sgd"),
        machine=MachineConfig(threads=1),
        seed=1,
    )
    return stobatch.train(config, out, dataset=dataset, quiet=True).run.read("training")


@linux
def test_a_large_allocation_of_a_training_shows_and_one_before_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.ones(LARGE * 2**18)  # in memory, and gone again
    small, real = trained(tmp_path / "small"), verb.run_training

    def hungry(*arguments: Any, **options: Any) -> Any:
        torch.ones(LARGE * 2**18)
        return real(*arguments, **options)

    monkeypatch.setattr(verb, "run_training", hungry)
    large = trained(tmp_path / "large")
    assert small["peak_memory_of"] == large["peak_memory_of"] == "process"
    assert large["peak_memory_mb"] - small["peak_memory_mb"] > 0.8 * LARGE
    monkeypatch.undo()
    assert large["peak_memory_mb"] - trained(tmp_path / "again")["peak_memory_mb"] > 0.8 * LARGE


def test_what_cannot_be_forgotten_is_called_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peak_memory, "_RESET", tmp_path / "missing" / "clear_refs")
    found = PeakMemory.begin(torch.device("cpu")).to_dict()
    assert found["peak_memory_of"] == "process since its start"
    assert isinstance(found["peak_memory_mb"], float)
    assert 10 < found["peak_memory_mb"] < 1e6


def test_a_system_that_counts_nothing_gives_no_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peak_memory, "_RESET", tmp_path / "missing" / "clear_refs")
    monkeypatch.setitem(sys.modules, "resource", None)
    assert PeakMemory.begin(torch.device("cpu")).to_dict()["peak_memory_mb"] is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_tensors_are_counted() -> None:
    device = torch.device("cuda")
    measured = PeakMemory.begin(device)
    torch.ones(2**20, device=device)
    assert measured.of == "gpu tensors"
    assert (measured.mebibytes() or 0) >= 4
