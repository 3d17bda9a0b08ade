"""`data check`: everything that is wrong with a folder of images, at once, before anything is trained."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from stobatch.config import DataConfig
from stobatch.data.image_folder import FLATTEN, SUFFIXES, picture_shape, require_folder
from stobatch.data.overlap import HARMLESS
from stobatch.data.persons import MOST_OF_ONE, read_owners
from stobatch.data.pixels import (
    PictureRule,
    folders_with_images,
    image_shape,
    list_images,
    other_files,
    read_image,
)
from stobatch.errors import DataError
from stobatch.progress import progress
from stobatch.results import ClassCount, DataCheck, DataFault, PersonCount

_SHOWN = 5
"""Files that a fault names."""
PARTS = ("train", "test")


@dataclass
class _Faults:
    """Faults in the order in which they were first seen, with the files of each."""

    files: dict[tuple[str, bool, str], list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, what: str, remedy: str, *files: Path | str, stops: bool = True) -> None:
        self.files[what, stops, remedy] += map(str, files)

    def all(self) -> tuple[DataFault, ...]:
        entries = [
            DataFault(what=what, stops_training=stops, count=len(files), files=tuple(files[:_SHOWN]), remedy=remedy)
            for (what, stops, remedy), files in self.files.items()
        ]
        return tuple(sorted(entries, key=lambda fault: not fault.stops_training))


def check_folder(root: str | Path, config: DataConfig | None = None, *, quiet: bool = False) -> DataCheck:
    """List every fault of ROOT/train/CLASS/* and ROOT/test/CLASS/*, with the settings that training would have.

    What it returns speaks of single private files, so it is printed for the data's owner and never written.
    """
    folder, config = Path(root), config or DataConfig(name="image_folder")
    require_folder(folder)
    faults = _Faults()
    files = _list(folder, faults, config.classes)
    sizes, kinds = Counter[tuple[int, int]](), Counter[int]()
    every = [path for part in files.values() for paths in part.values() for path in paths]
    shape, rule = None, PictureRule()
    digests: dict[str, list[tuple[str, str, Path]]] = defaultdict(list)
    with progress("check", len(every), quiet=quiet) as advance:
        for part, name, path in _each_file(files):
            try:
                channels, height, width = image_shape(path)
                if shape is None:
                    shape, rule = picture_shape(config, path)
                # Faults of size and colour are counted over all files; read with both mended, others are found, too.
                image = read_image(path, shape, PictureRule(True, rule.crop, True))
            except DataError as error:
                reason = error.what.removeprefix(f"{path} ").rstrip(".")
                faults.add(f"a picture {reason}", error.remedy, path.relative_to(folder))
            else:
                sizes[height, width] += 1
                kinds[channels] += 1
                _check_picture(image, path.relative_to(folder), faults)
                digests[_digest(image)].append((part, name, path.relative_to(folder)))
            advance()
    if len(sizes) > 1 and not rule.resize:
        counts = ", ".join(f"{count:,} of {h}x{w}" for (h, w), count in sizes.most_common(_SHOWN))
        most = max(sizes, key=lambda size: sizes[size])
        faults.add(
            f"pictures have {len(sizes)} sizes (height x width: {counts})", f"Set data.size={most[0]}x{most[1]}, say."
        )
    if len(kinds) > 1 and not rule.recolour:
        # Grey among colour becomes colour; colour among grey, when the first picture is grey, is refused.
        is_grey = shape is not None and shape[0] == 1
        what = f"{kinds[1]:,} pictures are grey and {kinds[3]:,} in colour"
        faults.add(what, "Set data.colour=grey or data.colour=rgb.", stops=is_grey)
    _check_repeats(digests, files, faults, per="person" if config.manifest else "picture")
    classes = [
        ClassCount(name=name, train=len(files["train"].get(name, ())), test=len(files["test"].get(name, ())))
        for name in sorted({*files["train"], *files["test"]})
    ]
    persons = (
        {} if config.manifest is None else {"persons": _check_persons(folder, folder / config.manifest, files, faults)}
    )
    return DataCheck(folder=str(folder), input_shape=shape, classes=tuple(classes), faults=faults.all(), **persons)


def _check_persons(folder: Path, table: Path, files: dict[str, dict[str, list[Path]]], faults: _Faults) -> PersonCount:
    """Count persons, with what is wrong about the table that names them."""
    try:
        owners = read_owners(table)
    except DataError as error:
        faults.add(error.what.rstrip("."), error.remedy)
        return PersonCount(num=0, largest=0)
    named: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
    missing = "Add a line for each: image,label,person."
    for part, name, path in _each_file(files):
        key = path.relative_to(folder).as_posix()
        owner = owners.pop(key, None)
        if owner is None:
            if part == "train":
                faults.add("a training picture has no line in the table of persons", missing, key)
            continue
        if owner.label != name:
            faults.add("the table of persons says another class than the folder", "Mend the line.", key)
        named[part][owner.person] += 1
    if owners:
        remedy = "Paths are written from the folder on, as train/cat/1.png."
        faults.add("the table of persons names a picture that is not there", remedy, *owners, stops=False)
    both = len(named["train"].keys() & named["test"].keys())
    if both:
        remedy = "Test pictures are not protected, and the accuracy on them is too good; keep a person in one part."
        faults.add(f"{both:,} persons have both training and test pictures", remedy, stops=False)
    total, largest = sum(named["train"].values()), max(named["train"].values(), default=0)
    if largest > MOST_OF_ONE * total:
        remedy = "Give unknown persons a name each, or keep fewer pictures of that person."
        faults.add(f"one person owns {largest:,} of {total:,} training pictures", remedy)
    return PersonCount(num=len(named["train"]), largest=largest)


def _list(folder: Path, faults: _Faults, classes: tuple[str, ...] | None) -> dict[str, dict[str, list[Path]]]:
    """Return the files of each class of each part, with what is wrong about folders."""
    files: dict[str, dict[str, list[Path]]] = {}
    for part in PARTS:
        place = folder / part
        names = sorted(p.name for p in place.iterdir() if p.is_dir() and p.name[0] != ".") if place.is_dir() else []
        if not names:
            faults.add(f"{part}/ has no class folders", "Lay pictures out as ROOT/train/CLASS/* and ROOT/test/CLASS/*.")
        files[part] = {name: list_images(place / name, SUFFIXES) for name in names}
    _check_classes(files, faults, classes)
    inner, others = (
        [
            path.relative_to(folder)
            for part in PARTS
            for name in files[part]
            for path in found(folder / part / name, SUFFIXES)
        ]
        for found in (folders_with_images, other_files)
    )
    if inner:
        faults.add("a folder inside a class folder has pictures, which would not be read", FLATTEN, *inner)
    if others:
        are = "file is" if len(others) == 1 else "files are"
        what = f"{len(others):,} {are} not {', '.join(SUFFIXES)}, and not read"
        faults.add(what, "Save pictures in one of these formats, or remove the files.", *others, stops=False)
    if files["test"] and not any(files["test"].values()):
        faults.add("there is no test picture", f"Put {', '.join(SUFFIXES)} files under test/CLASS.")
    return files


def _check_classes(files: dict[str, dict[str, list[Path]]], faults: _Faults, classes: tuple[str, ...] | None) -> None:
    """Note what is wrong about class folders; of classes that are named beforehand one may have no picture."""
    if classes is not None:
        remedy = "Mend its name there, take the folder away, or name it, too: then that it is there is public."
        for name in sorted({*files["train"], *files["test"]}.difference(classes)):
            faults.add("a class is not in data.classes", remedy, name)
        return
    if all(files.values()):
        for name in sorted(files["train"].keys() ^ files["test"].keys()):
            faults.add("a class is in only one of train/ and test/", "Give both the same class folders.", name)
        if len(files["train"]) == 1:
            faults.add("there is one class", "A classifier needs two or more.", *files["train"])
    for name, paths in files["train"].items():
        if not paths:
            faults.add("a class has no training picture", f"Put {', '.join(SUFFIXES)} files there.", name)
        if len(paths) == 1:
            remedy = "Whether it is there may be seen from the model's classes; gather more, leave the class out, "
            remedy += "or name all classes in data.classes."
            faults.add("a class has one training picture", remedy, name, stops=False)


def _each_file(files: dict[str, dict[str, list[Path]]]) -> Iterator[tuple[str, str, Path]]:
    for part in PARTS:
        for name, paths in files[part].items():
            for path in paths:
                yield part, name, path


def _check_picture(image: Tensor, path: Path, faults: _Faults) -> None:
    """Note faults of a picture that can be read and still is hardly what was meant."""
    low, high = image.aminmax()
    if low == high:
        faults.add("a picture has one value everywhere", "Look whether it was saved as it should.", path, stops=False)
    elif high <= -1 + 2 / 255 + 1e-6:
        remedy = "Values of 0 and 1 out of 255 are often a picture over [0, 1] that was saved without scaling."
        faults.add("a picture is all but black", remedy, path, stops=False)


def _digest(image: Tensor) -> str:
    return hashlib.sha256(image.to(torch.float32).contiguous().numpy().tobytes()).hexdigest()


def _check_repeats(
    digests: dict[str, list[tuple[str, str, Path]]],
    files: dict[str, dict[str, list[Path]]],
    faults: _Faults,
    per: str,
) -> None:
    """Note pictures that occur more than once: a leak into the test set, two labels for one, or one person twice."""
    groups = [group for group in digests.values() if len(group) > 1]
    num_test = sum(map(len, files["test"].values()))
    leaked = [
        path for group in groups if len({part for part, *_ in group}) > 1 for part, _, path in group if part == "test"
    ]
    if leaked:
        remedy = "Remove them from one of the two, or set data.allow_overlap=true: every report then says so."
        stops = len(leaked) * HARMLESS > num_test
        faults.add("a test picture is a training picture", remedy, *leaked, stops=stops)
    for group in groups:
        paths = [path for _, _, path in group]
        if len({name for _, name, _ in group}) > 1:
            faults.add("one picture has two labels", "Decide which it is.", *paths, stops=False)
        if sum(part == "train" for part, *_ in group) > 1:
            remedy = (
                "One person twice is protected less than the guarantee, which is per picture, says."
                if per == "picture"
                else "If it is one person's, the table of persons has to say so."
            )
            trained = [path for part, _, path in group if part == "train"]
            faults.add("a training picture is there more than once", remedy, *trained, stops=False)
