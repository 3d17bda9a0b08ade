"""`data check` lists every fault at once, and calls a fault exactly what training refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stobatch.config import DataConfig
from stobatch.data import load
from stobatch.data.overlap import require_apart
from stobatch.data_check import check_folder
from stobatch.errors import DataError

CONFIG = DataConfig(name="image_folder")


def picture(path: Path, seed: int, size: tuple[int, int] = (6, 5), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(values).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    seed = 0
    for part, count in (("train", 4), ("test", 3)):
        for name in ("cat", "dog"):
            for index in range(count):
                picture(tmp_path / part / name / f"{index}.png", seed := seed + 1)
    return tmp_path


def test_a_good_folder_has_no_fault(folder: Path) -> None:
    found = check_folder(folder, quiet=True)
    assert found.faults == ()
    assert found.can_be_trained_on
    assert found.input_shape == (3, 6, 5)
    assert [(one.name, one.train, one.test) for one in found.classes] == [("cat", 4, 3), ("dog", 4, 3)]
    assert "2 classes, 8 training and 6 test images" in str(found)


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())


def saved(image: Image.Image) -> Callable[[Path], object]:
    return lambda root: image.save(root / "train/dog/2.png")


BLACK = Image.fromarray(np.eye(6, 5, dtype=np.uint8)).convert("RGB")
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "size": (lambda root: picture(root / "test/cat/0.png", 50, (9, 9)), "2 sizes"),
    "colour": (lambda root: picture(root / "train/cat/0.png", 50, mode="L"), "grey"),
    "grey": (lambda root: picture(root / "train/dog/1.png", 52, mode="L"), "grey"),
    "damaged": (lambda root: (root / "train/dog/3.png").write_bytes(b"no picture"), "not a whole image"),
    "one part": (lambda root: picture(root / "train/eel/0.png", 60), "only one of"),
    "empty class": (lambda root: [(root / part / "fox").mkdir() for part in ("train", "test")], "no training picture"),
    "inner folder": (lambda root: picture(root / "train/cat/more/deep/0.png", 61), "inside a class folder"),
    "leak": (lambda root: copy(root / "train/cat/1.png", root / "test/cat/9.png"), "test picture is a training"),
    "twice": (lambda root: copy(root / "train/cat/2.png", root / "train/cat/9.png"), "more than once"),
    "two labels": (lambda root: copy(root / "train/cat/3.png", root / "train/dog/9.png"), "two labels"),
    "transparent": (saved(Image.new("RGBA", (5, 6), (1, 2, 3, 4))), "transparent"),
    "one value": (saved(Image.new("RGB", (5, 6), (7, 7, 7))), "one value"),
    "black": (saved(BLACK), "all but black"),
}
TOGETHER = [name for name in FAULTS if name not in ("one value", "black")]
"""Three of them stand in one place."""


def is_refused(root: Path) -> bool:
    try:
        require_apart(load(CONFIG, root=root), CONFIG)
    except DataError:
        return True
    return False


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_is_what_training_refuses(folder: Path, name: str) -> None:
    make, said = FAULTS[name]
    make(folder)
    found = check_folder(folder, quiet=True)
    assert said in str(found)
    assert found.can_be_trained_on is not is_refused(folder)


def test_all_of_them_at_once(folder: Path) -> None:
    for name in TOGETHER:
        FAULTS[name][0](folder)
    text = str(check_folder(folder, quiet=True))
    assert [name for name in TOGETHER if FAULTS[name][1] not in text] == []


def test_a_class_with_one_picture_is_said(folder: Path) -> None:
    picture(folder / "train/eel/0.png", 70)
    picture(folder / "test/eel/0.png", 71)
    found = check_folder(folder, quiet=True)
    assert found.can_be_trained_on
    assert "a class has one training picture (eel)" in str(found)


def test_settings_mend_what_they_are_for(folder: Path) -> None:
    FAULTS["size"][0](folder)
    picture(folder / "train/cat/1.png", 51, mode="L")
    mended = CONFIG.replace(size="8x8", colour="grey")
    assert check_folder(folder, mended, quiet=True).faults == ()
    assert load(mended, root=folder).info.input_shape == (1, 8, 8)


def test_a_folder_without_classes_has_faults_and_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    found = check_folder(tmp_path, quiet=True)
    assert not found.can_be_trained_on
    assert found.input_shape is None
    (tmp_path / "file").write_text("x")
    for look in (lambda root: check_folder(root, quiet=True), lambda root: load(CONFIG, root=root)):
        with pytest.raises(DataError, match=r"there is no folder .*nothing"):
            look(tmp_path / "nothing")
        with pytest.raises(DataError, match="file is a file, and no folder"):
            look(tmp_path / "file")


def test_files_that_training_does_not_read_are_named_and_stop_nothing(folder: Path) -> None:
    for name in ("train/cat/7.bmp", "test/dog/8.webp"):
        picture(folder / name, 70)
    (folder / "train/dog/.DS_Store").write_bytes(b"hidden")
    found = check_folder(folder, quiet=True)
    (fault,) = found.faults
    assert (fault.what, fault.stops_training, fault.count) == (
        "2 files are not .png, .jpg, .jpeg, and not read", False, 2
    )  # fmt: skip
    assert set(fault.files) == {"train/cat/7.bmp", "test/dog/8.webp"}
    assert found.classes == check_folder(folder, quiet=True).classes
    assert [(one.train, one.test) for one in found.classes] == [(4, 3), (4, 3)]
