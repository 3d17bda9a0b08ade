"""Your own images: ROOT/train/CLASS/*.png and ROOT/test/CLASS/*.png, where ROOT is the data root."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    found = {part: _classes(root, part) for part in ("train", "test")}
    if config.classes is None:
        _require_same(root, found["train"], found["test"])
    else:
        _require_listed(root, found, config.classes)
    names = first_names(config.classes or found["train"], config.num_classes, str(root / "train"))
    train, test = _files(root, "train", names), _files(root, "test", names)
    places = [root / part / name for part in ("train", "test") for name in names if name in found[part]]
    for inner in (one for place in places for one in folders_with_images(place, SUFFIXES)):
        raise DataError(f"{inner}, inside a class folder, has images that would not be read.", remedy=FLATTEN)
    with_images = {label for _, label in train}
    empty = [root / "train" / name for label, name in enumerate(names) if label not in with_images]
    # Of classes that are named beforehand one may be empty: otherwise its last picture would decide whether it is one.
    needed = [root / part for part, files in (("train", train), ("test", test)) if not files]
    for folder in (empty if config.classes is None else []) + needed:
        raise DataError(f"{folder} has no images.", remedy=f"Put {', '.join(SUFFIXES)} files there.")
    shape, rule = picture_shape(config, train[0][0])
    given = {"classes": config.classes, "size": config.size, "colour": config.colour}
    info = FolderInfo(
        "image_folder", shape, len(names), len(train), len(test), names, rule=rule, table=config.manifest,
        read_from_folder=tuple(name for name, value in given.items() if value is None),
    )  # fmt: skip
    owners = replace(info, num_train=min(len(train), config.train_limit or len(train))).owners(root)
    return info if owners is None else replace(info, num_persons=int(owners.max()) + 1)


def _require_same(root: Path, train: tuple[str, ...], test: tuple[str, ...]) -> None:
    """Raise where the folders of both parts are not those of the same two or more classes."""
    for part, names in (("train", train), ("test", test)):
        if len(names) < 2:
            raise DataError(
                f"{root / part} does not have two or more class folders.",
                why="Expected ROOT/train/CLASS/IMAGE.png and ROOT/test/CLASS/IMAGE.png.",
                remedy="Lay the images out so and point STOBATCH_DATA (or the data root) at ROOT.",
            )
    for odd in sorted(set(train) ^ set(test)):
        raise DataError(
            f"class '{odd}' is in only one of {root / 'train'} and {root / 'test'}.",
            remedy="Give both the same class folders; one under test may be empty.",
        )


def _require_listed(root: Path, found: Mapping[str, tuple[str, ...]], classes: tuple[str, ...]) -> None:
    """Raise where there is a folder of a class that the settings do not name."""
    for odd in (root / part / name for part, names in found.items() for name in names if name not in classes):
        raise DataError(
            f"{odd} is the folder of a class that data.classes does not name.",
            why=f"It names {', '.join(classes)}.",
            remedy="Mend its name there, take the folder away, or name it, too: then that it is there is public.",
        )


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
    names = (p.name for p in folder.iterdir() if p.is_dir() and p.name[0] != ".") if folder.is_dir() else ()
    return tuple(sorted(names))


def _files(root: Path, part: str, names: tuple[str, ...]) -> list[tuple[Path, int]]:
    folders = [root / part / name for name in names]
    return in_turn([list_images(folder, SUFFIXES) if folder.is_dir() else [] for folder in folders])


SOURCE = Source(describe, read, can_augment=False, stream=stream)
