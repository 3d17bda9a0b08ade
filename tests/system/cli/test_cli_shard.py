"""`stobatch shard` from beginning to end: written, checked, planned with, and refused in one line."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import stobatch
from stobatch.config import DataConfig
from stobatch.data import Examples, Manifest, TrainingExamples, from_tensors, load
from stobatch_recipes import recipe

SMALL = ["--set", "data.train_limit=120", "--set", "data.test_limit=30", "--num-shards", "3"]


@pytest.fixture
def folder(cli, tmp_path: Path) -> Path:
    assert cli("shard", "--out", tmp_path / "shards", *SMALL, "--json").code == 0
    return tmp_path / "shards"


def test_shards_are_written_and_said_in_words(cli, tmp_path: Path) -> None:
    result = cli("shard", "--out", tmp_path / "shards", *SMALL)
    assert result.code == 0
    assert "shard" in result.err  # the bar
    for part in (
        "mnist, 120 training examples in 3 shards of 40",
        "30 test examples",
        "as uint8",
        "seeded permutation",
    ):
        assert part in result.out
    assert f"--set data.name=shards --set machine.data_root={tmp_path / 'shards'}" in result.out
    assert len(load(DataConfig(name="shards"), root=tmp_path / "shards").train) == 120


def test_the_summary_is_one_document_without_checksums(cli, tmp_path: Path) -> None:
    result = cli("shard", "--recipe", "demo", "--out", tmp_path / "a", *SMALL, "--seed", "4", "--json")
    document = result.json()
    assert result.err == ""
    assert document["num_shards"] == 3
    assert document["dataset"]["num_train"] == 120
    assert document["dealt"] == {"rule": "seeded permutation", "seed": 4}
    manifest = Manifest.read(tmp_path / "a")
    assert document["bytes"] == sum(file.stat().st_size for file in (tmp_path / "a").glob("*.npy"))
    assert manifest.digest not in result.out
    assert not any(shard.inputs.sha256 in result.out for shard in manifest.shards)


def test_a_configuration_file_says_what_is_sharded(cli, tmp_path: Path) -> None:
    config = recipe("demo").override_all({"data.train_limit": 50, "data.test_limit": 5})
    (tmp_path / "mine.json").write_text(json.dumps(config.to_dict()))
    cli("shard", "--config", tmp_path / "mine.json", "--out", tmp_path / "shards", "--json")
    assert Manifest.read(tmp_path / "shards").info.num_train == 50


def test_a_plan_reads_the_manifest_alone(cli, folder: Path) -> None:
    for file in folder.glob("*.npy"):
        file.unlink()
    shards = ["--set", "data.name=shards", "--set", f"machine.data_root={folder}"]
    small = ["--recipe", "demo", "--set", "method.expected_batch_size=20", "--set", "data.train_limit=120"]
    small += ["--set", "method.delta=1e-3"]
    assert cli("plan", *small, *shards, "--json").json() == cli("plan", *small, "--json").json()


class Held(TrainingExamples):
    """The records of shards in memory, in the same ranges: samples are drawn by range."""

    def __init__(self, sharded: TrainingExamples) -> None:
        self.held, self.ranges, self.num_classes = sharded.in_memory(), sharded.shards, sharded.num_classes

    def __len__(self) -> int:
        return len(self.held)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return self.held.input_shape

    @property
    def shards(self) -> tuple[range, ...]:
        return self.ranges

    def fetch(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.held.fetch(rows)

    def fingerprint(self) -> str:
        return self.held.fingerprint()

    def in_memory(self) -> Examples:
        return self.held


def test_training_from_shards_is_training_on_the_same_records_in_memory(cli, folder: Path, tmp_path: Path) -> None:
    changes = {
        "data.name": "shards",
        "machine.data_root": str(folder),
        "method.expected_batch_size": 20,
        "method.delta": 1e-3,
        "training.steps": 3,
    }
    small = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    assert cli("train", "--recipe", "demo", "--seed", 1, *small, "--out", tmp_path / "disk", "--json").code == 0
    config = recipe("demo").override_all({**changes, "seed": 1})
    data = load(config.data, root=folder)
    stobatch.train(config, tmp_path / "memory", dataset=replace(data, train=Held(data.train)), quiet=True)
    disk, memory = (load_file(tmp_path / name / "model.safetensors") for name in ("disk", "memory"))
    assert all(torch.equal(disk[name], memory[name]) for name in memory)


def test_a_good_folder_passes_its_check(cli, folder: Path) -> None:
    result = cli("shard", "--check", folder)
    assert result.code == 0
    assert "checked" in result.out
    assert "no record occurs twice" in result.out
    assert cli("shard", "--check", folder, "--json").json()["repeated_records"]["count"] == 0


def test_a_record_in_two_shards_is_a_warning(cli, tmp_path: Path) -> None:
    inputs = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(40) % 2
    inputs[20:30], labels[20:30] = inputs[:10], labels[:10]
    data = from_tensors(inputs, labels, inputs, labels)
    stobatch.shard(recipe("demo"), tmp_path / "shards", num_shards=4, dataset=data, quiet=True)
    result = cli("shard", "--check", tmp_path / "shards")
    assert result.code == 0
    assert "warning: 10 records occur more than once" in " ".join(result.out.split())
    found: dict[str, Any] = cli("shard", "--check", tmp_path / "shards", "--json").json()["repeated_records"]
    sharded = load(DataConfig(name="shards"), root=tmp_path / "shards").train
    assert found["count"] == 10
    assert 1 <= found["in_more_than_one_shard"] <= 10
    for one, two in found["first_positions"]:
        pair, _ = sharded.fetch(torch.tensor([one, two]))
        assert torch.equal(pair[0], pair[1])


def test_a_damaged_folder_fails_its_check_in_one_line(cli, folder: Path) -> None:
    os.truncate(folder / "train-00002.labels.npy", 200)
    message = cli("shard", "--check", folder).err.strip().splitlines()[-1]
    assert "shard 2 is damaged" in message
    assert "shard 2 is damaged" in cli("shard", "--check", folder, "--json").refusal()


WRONG = {
    "neither": ([], "no folder, or two"),
    "both": (["--out", "a", "--check", "b"], "no folder, or two"),
    "settings of a check": (["--check", "a", "--set", "data.train_limit=3"], "--check takes no settings"),
    "nothing to check": (["--check", "nowhere"], "manifest.json is not there"),
    "too many shards": (["--out", "a", *SMALL, "--num-shards", "121"], "Use from 1 to 120 shards."),
    "data from Python": (["--out", "a", "--set", "data.name=tensors"], "from_tensors"),
    "a file in the way": (["--out", "file/a"], "cannot write file/a"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_in_one_line_and_leaves_nothing(cli, tmp_path, monkeypatch, name) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    arguments, said = WRONG[name]
    assert said in cli("shard", *arguments, "--json").refusal()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_is_in_use_is_refused_before_data_is_read(cli, folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("stobatch.data.idx_files.IdxSet.unpack", None)
    assert "already holds shards" in cli("shard", "--out", folder, *SMALL, "--json").refusal()
