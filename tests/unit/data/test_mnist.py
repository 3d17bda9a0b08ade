from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest
import torch

from stobatch.config import DataConfig
from stobatch.data import Dataset, describe, load, mnist

KNOWN_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
KNOWN_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
IMAGES = "t10k-images-idx3-ubyte"


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load(DataConfig())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(mnist.FOLDER, tmp_path / "copy"))


def test_counts_shape_and_range(data: Dataset) -> None:
    assert data.info == describe(DataConfig())
    assert data.train.inputs.shape == (60_000, 1, 28, 28)
    assert data.test.inputs.shape == (10_000, 1, 28, 28)
    assert data.train.labels.bincount().tolist() == KNOWN_TRAIN
    assert data.test.labels.bincount().tolist() == KNOWN_TEST
    assert [float(extreme) for extreme in data.train.inputs.aminmax()] == [-1, 1]


def test_pixels_agree_with_the_published_statistics(data: Dataset) -> None:
    """0.1307 and 0.3081 over [0, 1] are the mean and deviation everyone normalises MNIST with."""
    unit = data.train.inputs.double().add(1).div(2)
    assert unit.mean().item() == pytest.approx(0.1307, abs=5e-5)
    assert unit.std().item() == pytest.approx(0.3081, abs=5e-5)


def test_the_first_digits_are_the_known_ones(data: Dataset) -> None:
    assert data.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert data.test.labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]


def test_first_classes_and_limits(data: Dataset) -> None:
    config = DataConfig(num_classes=3, train_limit=50)
    few = load(config)
    assert few.info == describe(config)
    assert (few.info.num_train, few.info.num_test) == (50, sum(KNOWN_TEST[:3]))
    expected = (data.train.labels < 3).nonzero().flatten()[:50]
    assert torch.equal(few.train.inputs, data.train.inputs[expected])
    assert torch.equal(few.train.labels, data.train.labels[expected])


def read(folder: Path) -> object:
    config = DataConfig(train_limit=1, test_limit=1)
    return mnist.read(describe(config), folder, None, folder=folder)


def test_truncated_archive(copy: Path, fails) -> None:
    path = copy / f"{IMAGES}.gz"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "cannot be unpacked" in fails(read, copy)


def test_damaged_archive(copy: Path, fails) -> None:
    path = copy / f"{IMAGES}.gz"
    raw = bytearray(path.read_bytes())
    raw[5000:5100] = bytes(100)
    path.write_bytes(raw)
    assert str(path) in fails(read, copy)


@pytest.mark.parametrize("content", [b"", b"not gzip at all"])
def test_something_else(copy: Path, content: bytes, fails) -> None:
    (copy / f"{IMAGES}.gz").write_bytes(content)
    assert IMAGES in fails(read, copy)


@pytest.mark.parametrize("change", ["one pixel", "shorter"])
def test_altered_content(copy: Path, change: str, fails) -> None:
    path = copy / f"{IMAGES}.gz"
    raw = bytearray(gzip.decompress(path.read_bytes()))
    if change == "one pixel":
        raw[-1] ^= 1
    path.write_bytes(gzip.compress(raw if change == "one pixel" else raw[:-784], 1))
    message = fails(read, copy)
    assert "is not the file of MNIST" in message
    assert "--force-reinstall" in message


def test_missing_file(copy: Path, fails) -> None:
    (copy / "train-labels-idx1-ubyte.gz").unlink()
    assert "is not there" in fails(read, copy)
