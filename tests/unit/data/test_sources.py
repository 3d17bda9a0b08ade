from __future__ import annotations

import gzip
from pathlib import Path
from typing import NoReturn

import pytest
from PIL import Image

from stobatch.config import DataConfig
from stobatch.data import data_root, describe, load, pixels, tiny_imagenet
from stobatch.data.sources import DATA_SETS, Source
from stobatch.settings import declared


def test_every_name_in_the_configuration_has_a_source() -> None:
    assert all(isinstance(DATA_SETS[choice], Source) for choice in declared(DataConfig)["name"].choices or ())


def test_tensors_are_handed_over_in_python(fails) -> None:
    assert "from_tensors" in fails(load, DataConfig(name="tensors"))
    assert "from_tensors" in fails(describe, DataConfig(name="tensors"))


@pytest.mark.parametrize("name", ["mnist", "image_folder"])
def test_augmentation_that_the_paper_does_not_have_is_refused(name: str, fails) -> None:
    assert "data.augment=false" in fails(describe, DataConfig(name=name, augment=True))


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_too_many_classes(name: str, fails) -> None:
    assert "10 classes, not 11" in fails(describe, DataConfig(name=name, num_classes=11))


def test_data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STOBATCH_DATA", str(tmp_path))
    assert data_root() == tmp_path
    assert data_root(Path("here")) == Path("here")
    monkeypatch.delenv("STOBATCH_DATA")
    assert data_root() == Path("data")


def test_describing_opens_no_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The images below are not even images, and every way of reading one fails."""

    def forbidden(*_: object, **__: object) -> NoReturn:
        raise AssertionError("image data was read")

    folder = tmp_path / tiny_imagenet.FOLDER
    for part in ("train/n1/images", "train/n2/images", "val/images"):
        (folder / part).mkdir(parents=True)
        (folder / part / "0.JPEG").write_bytes(b"no image")
    (folder / "wnids.txt").write_text("n1\nn2\n")
    (folder / "val" / "val_annotations.txt").write_text("0.JPEG\tn1\t0\t0\t1\t1\n")
    for module, function in ((Path, "read_bytes"), (Image, "open"), (gzip, "decompress"), (pixels, "read_image")):
        monkeypatch.setattr(module, function, forbidden)
    assert describe(DataConfig(train_limit=100)).num_train == 100
    assert describe(DataConfig(name="cifar10"), tmp_path).num_train == 50_000
    info = describe(DataConfig(name="tiny_imagenet", augment=True), tmp_path)
    assert (info.num_train, info.num_test, info.copies) == (6, 1, 3)


def test_describing_an_image_folder_reads_one_header_and_no_pixels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[Path] = []
    for part in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (5, 7)).save(tmp_path / part / name / "0.png")
    original = Image.open

    def recording(path: Path) -> Image.Image:
        opened.append(path)
        image = original(path)
        image.load = image.tobytes = None  # type: ignore[assignment,method-assign]
        return image

    monkeypatch.setattr(Image, "open", recording)
    assert describe(DataConfig(name="image_folder"), tmp_path).input_shape == (3, 7, 5)
    assert opened == [tmp_path / "train" / "a" / "0.png"]
