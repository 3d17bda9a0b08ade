"""Small files in the very format for the mistakes; the real set where the machine has it."""

from __future__ import annotations

import gzip
import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stobatch.config import DataConfig
from stobatch.data import describe, fashion_mnist, load, sources
from stobatch.data.idx_files import IdxSet

PIXELS = torch.arange(12 * 784).remainder(256).to(torch.uint8).view(12, 1, 28, 28)
LABELS = torch.arange(12).remainder(3).to(torch.uint8)


def idx(values: torch.Tensor, kind: int) -> bytes:
    """The header says how many dimensions there are and how long each is; then come the bytes."""
    shape = values.squeeze(1).shape if kind == 3 else values.shape
    header = bytes([0, 0, 8, kind]) + b"".join(side.to_bytes(4, "big") for side in shape)
    return header + bytes(values.flatten().tolist())


CONTENTS = {
    f"{stem}-{kind}-ubyte": content
    for stem in ("train", "t10k")
    for kind, content in (("images-idx3", idx(PIXELS, 3)), ("labels-idx1", idx(LABELS, 1)))
}


@pytest.fixture
def files() -> IdxSet:
    digests = {name: hashlib.md5(content).hexdigest() for name, content in CONTENTS.items()}
    return replace(fashion_mnist.FILES, train_counts=(4,) * 3, test_counts=(4,) * 3, md5=digests)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    own = tmp_path / "own" / fashion_mnist.NAME
    own.mkdir(parents=True)
    for name, content in CONTENTS.items():
        (own / f"{name}.gz").write_bytes(gzip.compress(content))
    return own


def test_what_the_files_hold_is_what_is_read(files: IdxSet, folder: Path) -> None:
    info = files.describe(DataConfig(num_classes=2), folder)
    assert (info.num_train, info.class_names) == (8, ("T-shirt/top", "trouser"))
    train, test = files.read(replace(info, num_test=3), folder)
    kept = LABELS < 2
    assert torch.equal(train.inputs.add(1).mul(127.5).round(), PIXELS[kept].float())
    assert (train.labels.tolist(), test.labels.tolist()) == (LABELS[kept].tolist(), [0, 1, 0])


@pytest.mark.parametrize("mistake", ["missing", "truncated", "one pixel", "labels of another order", "not packed"])
def test_a_mistake_in_a_file_names_the_file_and_where_to_get_it(
    files: IdxSet, folder: Path, mistake: str, fails
) -> None:
    name = "t10k-labels-idx1-ubyte" if mistake.startswith("labels") else "train-images-idx3-ubyte"
    path, content = folder / f"{name}.gz", CONTENTS[name]
    changed = {
        "truncated": path.read_bytes()[:-20],
        "one pixel": gzip.compress(content[:-1] + bytes([content[-1] ^ 1])),
        "labels of another order": gzip.compress(content[:8] + content[:7:-1]),
        "not packed": content,
    }
    path.unlink() if mistake == "missing" else path.write_bytes(changed[mistake])
    message = fails(files.read, files.describe(DataConfig(num_classes=3), folder), folder)
    assert str(path) in message
    assert "apt install dataset-fashion-mnist" in message


def test_the_data_root_comes_before_the_package_and_neither_is_said_to_be_missing(
    files: IdxSet, folder: Path, tmp_path: Path, monkeypatch, fails
) -> None:
    monkeypatch.setattr(fashion_mnist, "FILES", files)
    info, nowhere = files.describe(DataConfig(num_classes=3), folder), tmp_path / "nowhere"
    for root, packaged in ((folder.parent, nowhere), (nowhere, folder)):
        assert len(fashion_mnist.read(info, root, None, packaged=packaged)[0]) == 12
    # A damaged copy under the root is refused; the package does not stand in for it silently.
    damaged = shutil.copytree(folder, tmp_path / "damaged" / fashion_mnist.NAME)
    (damaged / "train-labels-idx1-ubyte.gz").write_bytes(b"")
    assert "damaged" in fails(fashion_mnist.read, info, damaged.parent, None, packaged=folder)
    assert str(nowhere / fashion_mnist.NAME) in fails(fashion_mnist.read, info, nowhere, None, packaged=nowhere)


def here() -> bool:
    return fashion_mnist.PACKAGED.is_dir() or (sources.data_root() / fashion_mnist.NAME).is_dir()


@pytest.mark.skipif(not here(), reason="Fashion-MNIST is not on this machine (apt install dataset-fashion-mnist)")
def test_the_real_set_has_its_published_counts_and_statistics() -> None:
    """0.2860 and 0.3530 over [0, 1] are the mean and deviation that everyone normalises it with."""
    config = DataConfig(name="fashion_mnist")
    data = load(config)
    assert data.info == describe(config)
    assert data.train.labels.bincount().tolist() == [6000] * 10
    assert data.test.labels.bincount().tolist() == [1000] * 10
    assert data.test.labels[:10].tolist() == [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]
    unit = data.train.inputs.double().add(1).div(2)
    assert unit.mean().item() == pytest.approx(0.2860, abs=5e-5)
    assert unit.std().item() == pytest.approx(0.3530, abs=5e-5)
