"""A folder of shards that is not what was written is refused in one line; so are the broken twins of a manifest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stobatch.config import DataConfig
from stobatch.data import Manifest, ShardedExamples, from_tensors, load, write_shards
from stobatch.data import shards as manifest_module
from stobatch.seeds import Seeds


def opened(folder: Path) -> ShardedExamples:
    return ShardedExamples(Manifest.read(folder))


def damage_missing(folder: Path) -> None:
    (folder / "train-00001.inputs.npy").unlink()


def damage_truncated(folder: Path) -> None:
    os.truncate(folder / "train-00001.inputs.npy", 900)


def damage_flipped(folder: Path) -> None:
    content = bytearray((folder / "train-00001.inputs.npy").read_bytes())
    content[700] ^= 1
    (folder / "train-00001.inputs.npy").write_bytes(content)


def damage_labels(folder: Path) -> None:
    content = bytearray((folder / "train-00001.labels.npy").read_bytes())
    content[128] ^= 1
    (folder / "train-00001.labels.npy").write_bytes(content)


def damage_swapped(folder: Path) -> None:
    one, two = folder / "train-00001.inputs.npy", folder / "train-00002.inputs.npy"
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def damage_duplicated(folder: Path) -> None:
    for part in ("inputs", "labels"):
        shutil.copy(folder / f"train-00003.{part}.npy", folder / f"train-00001.{part}.npy")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_missing, "train-00001.inputs.npy cannot be read: No such file"),
        (damage_truncated, "train-00001.inputs.npy has 900 bytes instead of 1,928"),
        (damage_flipped, "train-00001.inputs.npy is not the file that was written"),
        (damage_labels, "train-00001.labels.npy is not the file that was written"),
        (damage_swapped, "is not the file that was written: it is that of shard 2"),
        (damage_duplicated, "is not the file that was written: it is that of shard 3"),
    ],
)
def test_a_damaged_shard_is_refused_by_name_and_the_others_are_not(folder: Path, damage, said: str, fails) -> None:
    damage(folder)
    examples = opened(folder)
    message = fails(examples.require)
    assert message.startswith("shard 1 is damaged: ")
    assert said in message
    assert "stobatch shard" in message
    assert fails(examples.fetch, torch.tensor([15])) == message
    examples.require([0])
    examples.fetch(torch.arange(15))
    for shard in examples.manifest.shards:
        assert shard.inputs.sha256[:12] not in message  # a checksum tells about the data


def test_a_shard_that_changes_after_its_first_use_is_looked_at_again(folder: Path, fails) -> None:
    examples = opened(folder)
    examples.fetch(torch.tensor([20]))
    damage_flipped(folder)
    assert "shard 1 is damaged" in fails(examples.fetch, torch.tensor([20]))


def test_damaged_test_examples_are_refused(folder: Path, fails) -> None:
    os.truncate(folder / "test.labels.npy", 130)
    assert "the test part is damaged" in fails(load, DataConfig(name="shards"), root=folder)


def rewritten(folder: Path, **changes: Any) -> None:
    """A manifest that somebody made by hand, digest and all."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text()) | changes
    content = {key: value for key, value in document.items() if key not in ("schema", "version", "digest")}
    path.write_text(json.dumps({**document, "digest": manifest_module._digest(content)}))


def stored(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return content


def test_overlapping_ranges_and_holes_are_refused(folder: Path, fails) -> None:
    shards = stored(folder)["shards"]
    shards[2]["first"] -= 1
    rewritten(folder, shards=shards)
    message = fails(Manifest.read, folder)
    assert "shard 2" in message
    assert "overlap" in message
    shards[2]["first"] += 2
    rewritten(folder, shards=shards)
    assert "A position has no example." in fails(Manifest.read, folder)
    rewritten(folder, shards=shards[:2])
    assert "describes 60 examples and has 30" in fails(Manifest.read, folder)


def test_the_same_shard_twice_is_refused(folder: Path, fails) -> None:
    damage_duplicated(folder)
    shards = stored(folder)["shards"]
    for part in ("inputs", "labels"):
        shards[1][part]["sha256"] = shards[3][part]["sha256"]
    rewritten(folder, shards=shards)
    assert "shard 1 and shard 3" in fails(Manifest.read, folder)


def test_the_same_shard_twice_is_not_even_written(tmp_path: Path, seeds: Seeds, fails) -> None:
    inputs, labels = torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64)
    same = from_tensors(inputs, labels, inputs, labels)
    assert "the same shard twice" in fails(write_shards, same, tmp_path / "same", 2, seeds)
    assert not (tmp_path / "same").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "schema version 2; this program reads 1"),
        ({"schema": "stobatch.plan"}, "is not a stobatch shards"),
        ({"encoding": "bfloat16"}, "is not what was written"),
        ({"shards": [{}]}, "is not what was written"),
        ({"test": None}, "is not what was written"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(folder: Path, changes: dict[str, Any], said: str, fails) -> None:
    rewritten(folder, **changes)
    assert said in fails(Manifest.read, folder)


def test_an_edited_manifest_is_refused(folder: Path, fails) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"num_classes": 3', '"num_classes": 4'))
    assert "edited or damaged" in fails(Manifest.read, folder)
    path.write_text("{")
    assert "not valid JSON" in fails(Manifest.read, folder)


def test_a_manifest_names_no_file_elsewhere(folder: Path, fails) -> None:
    shards = stored(folder)["shards"]
    shards[0]["inputs"]["file"] = "../elsewhere.npy"
    rewritten(folder, shards=shards)
    assert "is not what was written" in fails(Manifest.read, folder)


def test_a_folder_without_a_manifest_says_how_to_write_one(tmp_path: Path, fails) -> None:
    message = fails(load, DataConfig(name="shards"), root=tmp_path / "nowhere")
    assert "manifest.json is not there" in message
    assert "stobatch shard" in message


@pytest.mark.parametrize(("value", "said"), [(float("nan"), "NaN or infinite"), (1.5, "leaves [-1, 1]")])
def test_values_are_checked_as_they_are_fetched(folder: Path, value: float, said: str, fails) -> None:
    """Files from another writer, whose checksums are right and whose values are not."""
    path = folder / "train-00001.inputs.npy"
    values = np.load(path)
    values[3, 0, 0, 0] = value
    np.save(path, values)
    resummed(folder, path)
    message = fails(opened(folder).fetch, torch.tensor([16, 18]))
    assert message.startswith(f"example 18 of {folder}")
    assert said in message


def test_labels_are_checked_as_they_are_fetched(folder: Path, fails) -> None:
    path = folder / "train-00001.labels.npy"
    np.save(path, np.full(15, 3))
    resummed(folder, path)
    assert "has label 3" in fails(opened(folder).fetch, torch.tensor([20]))


def test_an_array_of_another_form_is_refused(folder: Path, fails) -> None:
    path = folder / "train-00001.inputs.npy"
    np.save(path, np.load(path).astype(np.float64))
    resummed(folder, path)
    assert "holds float64" in fails(opened(folder).fetch, torch.tensor([20]))
    np.save(path, np.array([{}] * 15, dtype=object), allow_pickle=True)
    resummed(folder, path)
    assert "is not an array that can be mapped" in fails(opened(folder).fetch, torch.tensor([20]))


def resummed(folder: Path, path: Path) -> None:
    content = path.read_bytes()
    shards = stored(folder)["shards"]
    entry = shards[1]["inputs" if ".inputs." in path.name else "labels"]
    entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewritten(folder, shards=shards)
