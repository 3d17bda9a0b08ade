from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch

from stobatch.config import DataConfig
from stobatch.data import Examples, cifar10, describe, load
from stobatch.data.dataset import DatasetInfo
from stobatch.seeds import Seeds

PER_FILE = 20
INFO = DatasetInfo("cifar10", (3, 28, 28), 10, 5 * PER_FILE, PER_FILE, cifar10.NAMES)


@pytest.fixture
def root(tmp_path: Path, generator: torch.Generator) -> Path:
    """Canonical files with few records: labels 0 to 9 in turn, random pixels."""
    folder = tmp_path / cifar10.FOLDER
    folder.mkdir()
    for name in cifar10.MD5:
        rows = torch.randint(256, (PER_FILE, cifar10.RECORD), generator=generator, dtype=torch.uint8)
        rows[:, 0] = torch.arange(PER_FILE) % 10
        (folder / name).write_bytes(bytes(rows.flatten().tolist()))
    return tmp_path


@pytest.fixture
def digests(root: Path) -> dict[str, str]:
    folder = root / cifar10.FOLDER
    return {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in cifar10.MD5}


def test_centre_crop_and_layout(root: Path, digests: dict[str, str]) -> None:
    train, test = cifar10.read(INFO, root, None, digests=digests)
    assert train.inputs.shape == (100, 3, 28, 28)
    assert test.inputs.shape == (20, 3, 28, 28)
    assert train.labels.tolist() == [i % 10 for i in range(100)]
    raw = (root / cifar10.FOLDER / "data_batch_2.bin").read_bytes()
    record, channel, row, column = 3, 2, 5, 7
    byte = raw[record * 3073 + 1 + channel * 1024 + (row + 2) * 32 + column + 2]
    assert train.inputs[PER_FILE + record, channel, row, column].item() == pytest.approx(byte / 127.5 - 1)


def test_augmented_training_is_reproducible_and_leaves_the_test_set_alone(root: Path, digests: dict[str, str]) -> None:
    def read(seed: int) -> tuple[Examples, Examples]:
        return cifar10.read(INFO, root, torch.Generator().manual_seed(seed), digests=digests)

    plain, test = cifar10.read(INFO, root, None, digests=digests)
    once, again, other = read(1), read(1), read(2)
    assert torch.equal(once[0].inputs, again[0].inputs)
    assert not torch.equal(once[0].inputs, other[0].inputs)
    assert once[0].inputs.shape == plain.inputs.shape
    assert torch.equal(once[0].labels, plain.labels)
    assert torch.equal(once[1].inputs, test.inputs)


def test_first_classes_and_limit(root: Path, digests: dict[str, str]) -> None:
    info = DatasetInfo("cifar10", (3, 28, 28), 3, 8, 4, cifar10.NAMES[:3])
    train, test = cifar10.read(info, root, None, digests=digests)
    assert train.labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert test.labels.tolist() == [0, 1, 2, 0]


def test_altered_and_truncated_files_are_refused(root: Path, digests: dict[str, str], fails) -> None:
    message = fails(cifar10.read, INFO, root, None)
    assert "data_batch_1.bin is not the file of CIFAR-10." in message
    path = root / cifar10.FOLDER / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:-1])
    assert str(path) in fails(cifar10.read, INFO, root, None, digests=digests)


def test_a_missing_file_says_what_to_put_where(root: Path, digests: dict[str, str], fails) -> None:
    (root / cifar10.FOLDER / "data_batch_3.bin").unlink()
    message = fails(cifar10.read, INFO, root, None, digests=digests)
    assert f"into {root / cifar10.FOLDER}" in message


@pytest.mark.usefixtures("no_network")
def test_without_files_and_network_the_message_says_what_to_put_where(tmp_path: Path, fails) -> None:
    message = fails(load, DataConfig(name="cifar10"), root=tmp_path / "data")
    assert all(name in message for name in cifar10.MD5)
    assert f"into {tmp_path / 'data' / cifar10.FOLDER}" in message
    assert "STOBATCH_DATA" in message
    assert not (tmp_path / "data").exists()


@pytest.mark.skipif(
    not (Path(os.environ.get("STOBATCH_DATA", "")) / cifar10.FOLDER / cifar10.TEST_FILE).is_file(),
    reason="STOBATCH_DATA has no cifar-10-batches-bin",
)
def test_the_real_files() -> None:
    data = load(DataConfig(name="cifar10"))
    assert data.info == describe(DataConfig(name="cifar10"))
    assert data.train.labels.bincount().tolist() == [5000] * 10
    assert data.test.labels.bincount().tolist() == [1000] * 10
    assert data.train.labels[:5].tolist() == [6, 9, 9, 4, 1]
    config = DataConfig(name="cifar10", num_classes=2, train_limit=64, augment=True)
    augmented = load(config, seeds=Seeds.reproducible(1))
    assert augmented.info == describe(config)
    assert torch.equal(augmented.train.inputs, load(config, seeds=Seeds.reproducible(1)).train.inputs)
