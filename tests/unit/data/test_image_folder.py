from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import stobatch
from stobatch.config import DataConfig
from stobatch.data import DatasetInfo, describe, load
from stobatch.data_check import check_folder
from stobatch.errors import SettingError
from stobatch.types import Status
from stobatch_recipes import recipe

CONFIG = DataConfig(name="image_folder")


def save(path: Path, value: int, mode: str = "RGB", size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, value).convert(mode).save(path)


def fill(root: Path, mode: str = "RGB") -> Path:
    for part, count in (("train", 3), ("test", 2)):
        for label, name in enumerate(("cat", "dog")):
            for index in range(count):
                save(root / part / name / f"{index}.png", 51 * label, mode)
    (root / "train" / "cat" / "notes.txt").write_text("ignored")
    (root / "train" / ".hidden").mkdir()
    return root


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("RGBA", 3), ("P", 3), ("1", 1)])
def test_layout(tmp_path: Path, mode: str, channels: int) -> None:
    data = load(CONFIG, root=fill(tmp_path, mode))
    assert data.info == describe(CONFIG, tmp_path)
    assert data.info.input_shape == (channels, 4, 6)
    assert data.info.class_names == ("cat", "dog")
    assert (data.info.num_train, data.info.num_test) == (6, 4)
    assert data.train.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert data.train.inputs[0].unique().tolist() == [-1]


def test_suffixes_and_jpeg(tmp_path: Path) -> None:
    save(fill(tmp_path) / "train" / "dog" / "photo.JPG", 255)
    assert describe(CONFIG, tmp_path).num_train == 7
    assert torch.allclose(load(CONFIG, root=tmp_path).train.inputs[-1], torch.ones(3, 4, 6))


def test_the_first_image_of_another_size_is_named(tmp_path: Path, fails) -> None:
    odd = fill(tmp_path) / "train" / "dog" / "1.png"
    save(odd, 0, size=(6, 5))
    message = fails(load, CONFIG, root=tmp_path)
    assert f"{odd} is 5x6 (height x width), the first image is 4x6." in message
    assert "data.size=4x6" in message


def test_colour_among_grey_is_refused_and_grey_among_colour_is_not(tmp_path: Path, fails) -> None:
    fill(tmp_path / "grey", "L")
    save(tmp_path / "grey" / "test" / "dog" / "0.png", 9, "RGB")
    assert "is a colour image" in fails(load, CONFIG, root=tmp_path / "grey")
    fill(tmp_path / "colour")
    save(tmp_path / "colour" / "test" / "dog" / "0.png", 9, "L")
    assert load(CONFIG, root=tmp_path / "colour").info.input_shape[0] == 3


def test_sixteen_bits_keep_all_of_them(tmp_path: Path) -> None:
    values = torch.tensor([0, 1, 257, 32768, 65534, 65535], dtype=torch.int32)
    path = fill(tmp_path, "L") / "test" / "cat" / "0.png"
    Image.fromarray(values.repeat(4, 1).numpy().astype("uint16")).save(path)
    found = load(CONFIG, root=tmp_path).test.inputs[0, 0, 0]
    assert torch.equal(found, values.float() / 32767.5 - 1)


def test_floats_are_refused(tmp_path: Path, fails) -> None:
    path = fill(tmp_path) / "test" / "cat" / "0.png"
    Image.new("F", (6, 4)).save(path, format="TIFF")
    assert "8-bit" in fails(load, CONFIG, root=tmp_path)


def test_transparency_is_refused_where_something_shows_through(tmp_path: Path, fails) -> None:
    fill(tmp_path, "RGBA")
    load(CONFIG, root=tmp_path)  # opaque everywhere
    Image.new("RGBA", (6, 4), (9, 9, 9, 254)).save(tmp_path / "train" / "dog" / "1.png")
    assert "transparent" in fails(load, CONFIG, root=tmp_path)


@pytest.mark.parametrize(("fit", "left"), [("resize", -1.0), ("crop", 1.0)])
def test_other_sizes_are_stretched_or_cut_by_a_fixed_rule(tmp_path: Path, fit: str, left: float) -> None:
    fill(tmp_path)
    wide = Image.new("RGB", (30, 10), (255, 255, 255))
    wide.paste((0, 0, 0), (0, 0, 8, 10))  # the left is black, and a square in the middle has none of it
    wide.save(tmp_path / "train" / "cat" / "0.png")
    data = load(CONFIG.replace(size="8x8", fit=fit), root=tmp_path)
    assert data.info.input_shape == (3, 8, 8)
    assert data.train.inputs[0, 0, 4, 0] == left
    assert data.train.inputs[0, 0, 4, 7] == 1.0
    again = load(CONFIG.replace(size="8x8", fit=fit), root=tmp_path)
    assert torch.equal(data.train.inputs, again.train.inputs)


def test_colours_by_a_fixed_rule(tmp_path: Path) -> None:
    fill(tmp_path, "L")
    save(tmp_path / "test" / "dog" / "0.png", 9, "RGB")
    assert load(CONFIG.replace(colour="grey"), root=tmp_path).info.input_shape[0] == 1
    assert load(CONFIG.replace(colour="rgb"), root=tmp_path).info.input_shape[0] == 3


@pytest.mark.parametrize("size", ["64", "0x4", "4x", "-1x3", "999999x1", "4X4"])
def test_a_size_that_is_none(size: str) -> None:
    with pytest.raises(SettingError, match="HEIGHTxWIDTH"):
        DataConfig(size=size)


def test_the_rule_is_in_files_only_where_it_is_used() -> None:
    assert CONFIG.to_dict().keys().isdisjoint({"size", "fit", "colour"})
    assert CONFIG.replace(size="8x8").to_dict()["size"] == "8x8"


def test_damaged_images_are_named(tmp_path: Path, fails) -> None:
    path = fill(tmp_path) / "train" / "dog" / "0.png"
    path.write_bytes(path.read_bytes()[:40])
    assert str(path) in fails(load, CONFIG, root=tmp_path)
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"")
    assert "is not a whole image" in fails(describe, CONFIG, tmp_path)


def test_pictures_in_inner_folders_are_refused_and_hidden_ones_are_not_seen(tmp_path: Path, fails) -> None:
    fill(tmp_path)
    (tmp_path / "train" / "cat" / "empty").mkdir()
    for hidden in (".thumbnails/0.png", "__MACOSX/._0.png"):
        save(tmp_path / "train" / "cat" / hidden, 7)
    assert describe(CONFIG, tmp_path).num_train == 6
    save(tmp_path / "test" / "dog" / "monday" / "morning" / "0.JPG", 7)
    message = fails(load, CONFIG, root=tmp_path)
    assert str(tmp_path / "test" / "dog" / "monday") in message
    assert "would not be read" in message


def test_layouts_that_do_not_fit(tmp_path: Path, fails) -> None:
    assert "ROOT/train/CLASS" in fails(describe, CONFIG, tmp_path)
    fill(tmp_path)
    assert "2 classes, not 3" in fails(describe, CONFIG.replace(num_classes=3), tmp_path)
    (tmp_path / "train" / "eel").mkdir()
    assert "class 'eel' is in only one" in fails(describe, CONFIG, tmp_path)
    (tmp_path / "test" / "eel").mkdir()
    assert f"{tmp_path / 'train' / 'eel'} has no images." in fails(describe, CONFIG, tmp_path)
    assert describe(CONFIG.replace(num_classes=2), tmp_path).num_classes == 2


BEFOREHAND = {"classes": ("dog", "cat", "rare"), "size": "4x6", "colour": "rgb"}


def test_what_is_read_off_private_pictures_is_an_objection_unless_it_is_said_beforehand(tmp_path: Path) -> None:
    fill(tmp_path)
    method = {"method.batch_size": 2, "method.delta": 1e-2, "method.tuned_on_private_data": False, "training.steps": 2}
    method["model.architecture"] = "linear"
    config = recipe("demo").override_all({"data.name": "image_folder", "machine.data_root": str(tmp_path), **method})
    (objection,) = stobatch.plan(config).guarantee.objections
    assert objection.startswith("the classes, size and colour of pictures were read off a private folder")
    for unsaid in BEFOREHAND:
        said = {f"data.{key}": value for key, value in BEFOREHAND.items() if key != unsaid}
        (objection,) = stobatch.plan(config.override_all(said)).guarantee.objections
        assert objection.startswith(f"the {unsaid} of pictures were read off"), objection
        assert f"data.{unsaid}" in objection
    config = config.override_all({f"data.{key}": value for key, value in BEFOREHAND.items()})
    plan = stobatch.plan(config)
    assert plan.guarantee.status is Status.PROVED
    assert not plan.guarantee.objections
    # The first classes of a folder are no list: another record makes others the first.
    assert (
        len(stobatch.plan(config.override_all({"data.classes": None, "data.num_classes": 2})).guarantee.objections) == 1
    )


def test_the_objection_is_in_the_run_and_passes_through_shards(tmp_path: Path) -> None:
    fill(tmp_path / "photos")
    config = recipe("demo").override_all(
        {"data.name": "image_folder", "machine.data_root": str(tmp_path / "photos"), "data.allow_overlap": True}
    )
    stobatch.shard(config, tmp_path / "shards", num_shards=2, quiet=True)
    info = describe(DataConfig(name="shards"), tmp_path / "shards")
    assert info.read_from_folder == ("classes", "size", "colour")
    assert DatasetInfo.from_dict(info.to_dict()) == info
    model = stobatch.train(
        config.override_all(
            {"method.batch_size": 2, "method.delta": 1e-2, "training.steps": 1, "canaries.num": 0}
            | {"model.architecture": "linear"}
        ),
        tmp_path / "run",
        quiet=True,
    )
    assert any("read off a private folder" in line for line in model.guarantee.objections)
    checked = stobatch.verify(tmp_path / "run", sample=0)
    assert not checked.differing


def test_a_class_that_is_named_beforehand_may_have_no_picture(tmp_path: Path) -> None:
    """Otherwise its only record would decide whether the others can be trained on."""
    fill(tmp_path)
    config = CONFIG.replace(**BEFOREHAND)
    bare = load(config, root=tmp_path)
    assert bare.info.class_names == ("dog", "cat", "rare")
    assert bare.train.labels.tolist() == [0, 1] * 3
    save(tmp_path / "train" / "rare" / "0.png", 9)
    more = load(config, root=tmp_path)
    assert more.train.labels.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert replace(more.info, num_train=6) == bare.info
    assert not [fault for fault in check_folder(tmp_path, config, quiet=True).faults if "class" in fault.what]
    (tmp_path / "train" / "rare" / "0.png").unlink()
    assert load(config, root=tmp_path).info == bare.info


def test_a_folder_of_a_class_that_is_not_named_is_refused(tmp_path: Path, fails) -> None:
    fill(tmp_path)
    save(tmp_path / "test" / "bird" / "0.png", 9)
    message = fails(describe, CONFIG.replace(classes=("cat", "dog")), tmp_path)
    assert f"{tmp_path / 'test' / 'bird'} is the folder of a class that data.classes does not name" in message
    faults = {fault.what: fault for fault in check_folder(tmp_path, CONFIG.replace(classes=("cat", "dog"))).faults}
    assert faults["a class is not in data.classes"].files == ("bird",)
    assert "data.classes is not for mnist" in fails(describe, DataConfig(classes=("0", "1")), tmp_path)


@pytest.mark.parametrize("classes", [("cat",), ("cat", "cat"), ("cat", "../dog"), ("cat", ".dog")])
def test_class_names_that_are_none(classes: tuple[str, ...]) -> None:
    with pytest.raises(SettingError, match=r"data\.classes has"):
        DataConfig(classes=classes)
