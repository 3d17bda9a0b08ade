from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from stobatch.config import DataConfig
from stobatch.data import describe, load, tiny_imagenet
from stobatch.seeds import Seeds

WNIDS = ("n03", "n01", "n02")
"""Not in alphabetical order, as in the official list."""


def save(path: Path, colour: tuple[int, int, int], mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64), colour).convert(mode).save(path, "JPEG")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The official layout: 4 training and 2 validation images a class; each class has its own shade of red."""
    folder = tmp_path / tiny_imagenet.FOLDER
    rows = []
    for label, wnid in enumerate(WNIDS):
        for index in range(4):
            save(folder / "train" / wnid / "images" / f"{wnid}_{index}.JPEG", (80 * label, 10 * index, 0))
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
        for index in range(2):
            name = f"val_{index * 3 + label}.JPEG"
            save(folder / "val" / "images" / name, (80 * label, 0, 0))
            rows.append(f"{name}\t{wnid}\t0\t0\t63\t63\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(rows))
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    return tmp_path


def config(**changes: object) -> DataConfig:
    return DataConfig(name="tiny_imagenet", **changes)  # type: ignore[arg-type]


def test_official_layout(root: Path) -> None:
    data = load(config(), root=root)
    assert data.info == describe(config(), root)
    assert data.info.class_names == WNIDS
    assert (data.info.num_train, data.info.num_test, data.info.copies) == (12, 6, 1)
    for examples in (data.train, data.test):
        red = examples.inputs[:, 0].mean((1, 2))
        assert torch.allclose(red, examples.labels * 80 / 127.5 - 1, atol=0.03)


def test_first_classes_in_the_official_order_and_balanced_limits(root: Path) -> None:
    data = load(config(num_classes=2, train_limit=4), root=root)
    assert data.info.class_names == ("n03", "n01")
    assert data.train.labels.tolist() == [0, 1, 0, 1]
    assert data.info.num_test == 4


def test_three_copies(root: Path) -> None:
    plain = load(config(), root=root)
    data = load(config(augment=True), root=root, seeds=Seeds.reproducible(4))
    assert (data.info.copies, data.info.num_train, data.info.num_test) == (3, 36, 6)
    assert torch.equal(data.train.inputs[0::3], plain.train.inputs)
    assert torch.equal(data.train.inputs[1::3], plain.train.inputs.flip(3))
    assert not torch.equal(data.train.inputs[2::3], plain.train.inputs)
    assert torch.equal(data.train.labels, plain.train.labels.repeat_interleave(3))
    again = load(config(augment=True), root=root, seeds=Seeds.reproducible(4))
    assert torch.equal(data.train.inputs, again.train.inputs)


def test_a_limit_counts_records_after_augmentation(root: Path) -> None:
    data = load(config(augment=True, train_limit=7), root=root, seeds=Seeds.reproducible(4))
    assert len(data.train) == data.info.num_train == 7
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2]


def test_grey_images_become_colour(root: Path) -> None:
    save(root / tiny_imagenet.FOLDER / "train" / "n03" / "images" / "n03_0.JPEG", (200, 200, 200), "L")
    first = load(config(), root=root).train.inputs[0]
    assert torch.equal(first[0], first[1])
    assert first.mean().item() == pytest.approx(200 / 127.5 - 1, abs=0.02)


def test_a_truncated_image_is_named(root: Path, fails) -> None:
    path = root / tiny_imagenet.FOLDER / "train" / "n01" / "images" / "n01_2.JPEG"
    path.write_bytes(path.read_bytes()[:-200])
    message = fails(load, config(), root=root)
    assert f"{path} is not a whole image." in message


def test_damaged_folders(root: Path, fails) -> None:
    folder = root / tiny_imagenet.FOLDER
    assert "3 classes, not 30" in fails(describe, config(num_classes=30), root)
    (folder / "val" / "images" / "val_0.JPEG").unlink()
    assert "val_0.JPEG" in fails(load, config(), root=root)
    (folder / "train" / "n02").rename(folder / "n02")
    assert "lower num_classes" in fails(describe, config(), root)
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\n")
    assert "has the line 'val_0.JPEG'" in fails(describe, config(num_classes=2), root)
    (folder / "wnids.txt").unlink()
    assert "wnids.txt" in fails(describe, config(), root)


@pytest.mark.usefixtures("no_network")
def test_without_files_and_network_the_message_says_what_to_put_where(tmp_path: Path, fails) -> None:
    assert describe(config(num_classes=30), tmp_path).num_train == 15_000
    message = fails(lambda: load(config(), root=tmp_path))
    assert f"lie in {tmp_path}" in message
    assert "STOBATCH_DATA" in message


@pytest.mark.skipif(
    not (Path(os.environ.get("STOBATCH_DATA", "")) / tiny_imagenet.FOLDER / "wnids.txt").is_file(),
    reason="STOBATCH_DATA has no tiny-imagenet-200",
)
def test_the_real_set() -> None:
    info = describe(config(num_classes=30, augment=True))
    assert (info.num_train, info.num_test, info.copies) == (45_000, 1_500, 3)
    assert info.class_names[:3] == ("n02124075", "n04067472", "n04540053")
    few = load(config(num_classes=30, train_limit=90))
    assert few.train.labels.bincount().tolist() == [3] * 30
    assert few.test.labels.bincount().tolist() == [50] * 30
