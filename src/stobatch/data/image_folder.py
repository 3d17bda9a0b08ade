"""Your own images: ROOT/train/CLASS/*.png and ROOT/test/CLASS/*.png, where ROOT is the data root."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stobatch.config import DataConfig
from stobatch.data.dataset import Chunk, DatasetInfo, Examples, Stream, rows_at_once
from stobatch.data.persons import codes_of_pictures
from stobatch.data.pixels import (
    PictureRule,
    first_names,
    folders_with_images,
    image_shape,
    in_turn,
    list_images,
    read_images,
)
from stobatch.data.sources import Source
from stobatch.errors import DataError
from stobatch.progress import running

SUFFIXES = (".png", ".jpg", ".jpeg")
FLATTEN = "Put them into the class folder itself, or take them away."


@dataclass(frozen=True)
class FolderInfo(DatasetInfo):
    """A folder of images, with what may be done to them, and a table that says whose they are.

    Both stand in the settings, so files leave them out.
    """

    rule: PictureRule = field(default_factory=PictureRule)
    table: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key not in ("rule", "table")}

    def owners(self, root: Path) -> Tensor | None:
        """Return the number of each training picture's person, where a table says whose it is."""
        if self.table is None:
            return None
        files = _files(root, "train", self.class_names)[: self.num_train]
        return codes_of_pictures(root, root / self.table, files, self.class_names)


def describe(config: DataConfig, root: Path) -> DatasetInfo:
    """Count by listing folders. The size of an image is taken from the first file's header; no pixel is decoded."""
    require_folder(root)
    names, test_names = _classes(root, "train"), _classes(root, "test")
    if names != test_names:
        odd = sorted(set(names) ^ set(test_names))[0]
        raise DataError(
            f"class '{odd}' is in only one of {root / 'train'} and {root / 'test'}.",
            remedy="Give both the same class folders; one under test may be empty.",
        )
    names = first_names(names, config.num_classes, str(root / "train"))
    train, test = _files(root, "train", names), _files(root, "test", names)
    places = [root / part / name for part in ("train", "test") for name in names]
    for inner in (one for place in places for one in folders_with_images(place, SUFFIXES)):
        raise DataError(f"{inner}, inside a class folder, has images that would not be read.", remedy=FLATTEN)
    with_images = {label for _, label in train}
    empty = [root / "train" / name for label, name in enumerate(names) if label not in with_images]
    for folder in empty + ([] if test else [root / "test"]):
        raise DataError(f"{folder} has no images.", remedy=f"Put {', '.join(SUFFIXES)} files there.")
    shape, rule = picture_shape(config, train[0][0])
    info = FolderInfo("image_folder", shape, len(names), len(train), len(test), names, rule=rule, table=config.manifest)
    owners = replace(info, num_train=min(len(train), config.train_limit or len(train))).owners(root)
    return info if owners is None else replace(info, num_persons=int(owners.max()) + 1)


def require_folder(root: Path) -> None:
    """Raise unless there is a folder to look into."""
    if not root.is_dir():
        raise DataError(
            f"{root} is a file, and no folder of images." if root.exists() else f"there is no folder {root}.",
            remedy="Name the folder that holds train/ and test/: as machine.data_root, STOBATCH_DATA or an argument.",
        )


def picture_shape(config: DataConfig, first: Path) -> tuple[tuple[int, int, int], PictureRule]:
    """Return the shape that the settings ask for, and how pictures get it; what they leave open the first has."""
    channels, height, width = image_shape(first)
    if config.height_and_width is not None:
        height, width = config.height_and_width
    if config.colour is not None:
        channels = 1 if config.colour == "grey" else 3
    rule = PictureRule(config.size is not None, config.fit == "crop", config.colour is not None)
    return (channels, height, width), rule


def read(info: DatasetInfo, root: Path, generator: torch.Generator | None) -> tuple[Examples, Examples]:
    assert isinstance(info, FolderInfo)

    def part(name: str, limit: int) -> Examples:
        files, shown = _files(root, name, info.class_names)[:limit], running()
        shown.expect(len(files))
        return read_images(files, info.input_shape, info.num_classes, info.rule, shown)

    train = part("train", info.num_train)
    return replace(train, groups=info.owners(root)), part("test", info.num_test)


def stream(info: DatasetInfo, root: Path) -> Stream:
    """Yield the same examples in the same order, of which a few at a time are decoded."""
    assert isinstance(info, FolderInfo)

    def part(name: str, limit: int) -> Iterator[Chunk]:
        files = _files(root, name, info.class_names)[:limit]
        rows = rows_at_once(info.input_shape)
        for start in range(0, len(files), rows):
            examples = read_images(files[start : start + rows], info.input_shape, info.num_classes, info.rule)
            yield examples.inputs, examples.labels

    return Stream(info, part("train", info.num_train), part("test", info.num_test), info.owners(root))


def _classes(root: Path, part: str) -> tuple[str, ...]:
    folder = root / part
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name[0] != ".") if folder.is_dir() else []
    if len(names) < 2:
        raise DataError(
            f"{folder} does not have two or more class folders.",
            why="Expected ROOT/train/CLASS/IMAGE.png and ROOT/test/CLASS/IMAGE.png.",
            remedy="Lay the images out so and point STOBATCH_DATA (or the data root) at ROOT.",
        )
    return tuple(names)


def _files(root: Path, part: str, names: tuple[str, ...]) -> list[tuple[Path, int]]:
    return in_turn([list_images(root / part / name, SUFFIXES) for name in names])


SOURCE = Source(describe, read, can_augment=False, stream=stream)
