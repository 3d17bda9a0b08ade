"""From image files to bytes to numbers in [-1, 1]; the one place where pixels are read and scaled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stobatch.data.dataset import DatasetInfo, Examples
from stobatch.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

CHANNELS = {"1": 1, "L": 1, "LA": 1, "P": 3, "PA": 3, "RGB": 3, "RGBA": 3, "RGBX": 3, "CMYK": 3, "YCbCr": 3}
DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I")
"""Pillow's modes of grey pictures of 16 bits; other modes are missing because converting them loses information."""


@dataclass(frozen=True)
class PictureRule:
    """What may be done to a picture so that it fits: fixed and public, the same for every picture."""

    resize: bool = False
    """Bring it to the size asked for; else another size is refused."""
    crop: bool = False
    """Scale its shorter side and cut the middle out, instead of stretching it."""
    recolour: bool = False
    """Turn colour grey; else colour among grey is refused. Grey among colour is always turned into colour."""


def scale(pixels: Tensor) -> Tensor:
    """Scale bytes to [-1, 1]: p / 127.5 - 1.

    >>> scale(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist()
    [-1.0, -0.6000000238418579, 1.0]
    """
    return pixels.to(torch.float32).div_(127.5).sub_(1)


def first_of_classes(pixels: Tensor, labels: Tensor, info: DatasetInfo, limit: int) -> tuple[Tensor, Tensor]:
    """Return the first `limit` records among the classes that `info` keeps."""
    chosen = (labels < info.num_classes).nonzero().flatten()[:limit]
    return pixels[chosen], labels[chosen]


def first_names(names: Sequence[str], wanted: int | None, where: str) -> tuple[str, ...]:
    """Return the classes that `num_classes` keeps."""
    if wanted is not None and wanted > len(names):
        raise DataError(f"{where} has {len(names)} classes, not {wanted}.", remedy=f"Set num_classes to {len(names)}.")
    return tuple(names[:wanted])


def list_images(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the image files of a folder by name; lists, opens nothing."""
    try:
        images = [p for p in folder.iterdir() if p.suffix.lower() in suffixes and not p.name.startswith(".")]
    except OSError as error:
        raise DataError(
            f"cannot list {folder}: {error.strerror}.", remedy="Put the class's images there or lower num_classes."
        ) from None
    return sorted(images)


def folders_with_images(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the folders inside one that hold images at any depth, which a list of its images leaves out."""
    inner = (p for p in folder.iterdir() if p.suffix.lower() not in suffixes and p.name[0] != "." and p.is_dir())
    return sorted(
        place
        for place in inner
        if any(p.suffix.lower() in suffixes and not _is_hidden(p.relative_to(place)) for p in place.rglob("*"))
    )


def other_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files of a folder, at any depth, whose names are not those of images; hidden ones do not count."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix.lower() not in suffixes and not _is_hidden(path.relative_to(folder))
    )


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def in_turn(per_class: Sequence[Sequence[Path]]) -> list[tuple[Path, int]]:
    """Return images with their labels, one of each class in turn, so that a limit keeps the classes balanced."""
    rows = zip_longest(*([(path, label) for path in paths] for label, paths in enumerate(per_class)))
    return [item for item in chain.from_iterable(rows) if item is not None]


def image_shape(path: Path | BinaryIO) -> tuple[int, int, int]:
    """Return (C, H, W) from the header of a file, which may be open; the pixels are not decoded."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            mode, (width, height) = image.mode, image.size
    except Exception as error:  # decoders raise nearly anything on a damaged file
        raise _damaged_error(path, error) from None
    return _channels(path, mode), height, width


def count_frames(path: Path) -> int:
    """Return how many pictures a file holds: more than one where it is animated, or has pages."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return getattr(image, "n_frames", 1)
    except Exception as error:  # decoders raise nearly anything on a damaged file
        raise _damaged_error(path, error) from None


def read_images(
    files: Sequence[tuple[Path, int]],
    shape: tuple[int, int, int],
    num_classes: int,
    rule: PictureRule | None = None,
    advance: Callable[[], object] = lambda: None,
) -> Examples:
    """Decode images to one shape, by a rule where they differ; `advance` is called after each file."""
    inputs = torch.empty((len(files), *shape))
    for index, (path, _) in enumerate(files):
        inputs[index] = read_image(path, shape, rule or PictureRule())
        advance()
    return Examples(inputs, torch.tensor([label for _, label in files], dtype=torch.int64), num_classes)


def read_image(path: Path | BinaryIO, shape: tuple[int, int, int], rule: PictureRule) -> Tensor:
    """Return one picture as numbers in [-1, 1]; messages call an open file by what `str` says of it."""
    from PIL import Image

    channels, height, width = shape
    try:
        with Image.open(path) as image:
            mode, size = image.mode, image.size
            image.load()
            transparent = _is_transparent(image)
            # As numbers from 0 to 65535, which Pillow resizes without rounding to bytes.
            picture = image.convert("F") if mode in DEEP else image.convert("L" if channels == 1 else "RGB")
            if size != (width, height) and rule.resize:
                picture = _fit(picture, width, height, crop=rule.crop)
            values = np.asarray(picture)
    except Exception as error:  # decoders raise nearly anything on a damaged file
        raise _damaged_error(path, error) from None
    if transparent:
        raise DataError(
            f"{path} has transparent pixels.",
            why="What stands behind them is not in the file.",
            remedy="Put it on a background and save it without transparency.",
        )
    if size != (width, height) and not rule.resize:
        raise DataError(
            f"{path} is {size[1]}x{size[0]} (height x width), the first image is {height}x{width}.",
            why="One network has one input size.",
            remedy=f"Set data.size={height}x{width}, which brings every image to that size, or resize them yourself.",
        )
    if _channels(path, mode) > channels and not rule.recolour:
        raise DataError(
            f"{path} is a colour image, the first image is grey.",
            remedy="Set data.colour=grey or data.colour=rgb, or convert them yourself.",
        )
    if mode in DEEP:
        return _scale_deep(path, values).expand(channels, height, width)
    return scale(torch.from_numpy(values.copy()).view(height, width, channels).permute(2, 0, 1))


def _fit(picture: Image, width: int, height: int, *, crop: bool) -> Image:
    """Bring a picture to a size by averaging over what each new pixel covers."""
    from PIL import Image, ImageOps

    if crop:
        return ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
    return picture.resize((width, height), Image.Resampling.BILINEAR)


def _scale_deep(path: Path | BinaryIO, values: NDArray[Any]) -> Tensor:
    """Scale sixteen bits to [-1, 1]: p / 32767.5 - 1."""
    if values.min() < 0 or values.max() > 65535:
        raise DataError(
            f"{path} has values up to {values.max():g}.",
            why="Only images of 8 or 16 bits a channel scale to [-1, 1] without loss.",
            remedy="Convert it to 16-bit grey.",
        )
    return torch.from_numpy(values.astype(np.float32)).div_(32767.5).sub_(1).clamp_(-1, 1)


def _is_transparent(image: Image) -> bool:
    """Return whether some pixel shows what is behind the picture; a channel that is opaque everywhere says nothing."""
    if "A" not in image.getbands() and "transparency" not in image.info:
        return False
    lowest = image.convert("RGBA").getchannel("A").getextrema()[0]
    return isinstance(lowest, int | float) and lowest < 255


def _channels(path: Path | BinaryIO, mode: str) -> int:
    if mode in DEEP:
        return 1
    if mode not in CHANNELS:
        raise DataError(
            f"{path} has pixels of mode {mode}.",
            why="Only images of 8 bits a channel, or grey ones of 16, scale to [-1, 1] without loss.",
            remedy="Convert it to 8-bit grey or RGB.",
        )
    return CHANNELS[mode]


def _damaged_error(path: Path | BinaryIO, error: Exception) -> DataError:
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return DataError(
        f"{path} is not a whole image.", why=f"Pillow says: {reason}.", remedy="Restore the file or remove it."
    )
