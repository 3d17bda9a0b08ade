"""From image files to bytes to numbers in [-1, 1]; the one place where pixels are read and scaled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path

import torch
from torch import Tensor

from stobatch.data.dataset import DatasetInfo, Examples
from stobatch.errors import DataError

MODES = {"1": 1, "L": 1, "LA": 1, "P": 3, "PA": 3, "RGB": 3, "RGBA": 3, "RGBX": 3, "CMYK": 3, "YCbCr": 3}
"""Channels by Pillow's mode; 16-bit and float images are missing because converting them loses information."""


def scale(pixels: Tensor) -> Tensor:
    """Bytes to [-1, 1]: p / 127.5 - 1.

    >>> scale(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist()
    [-1.0, -0.6000000238418579, 1.0]
    """
    return pixels.to(torch.float32).div_(127.5).sub_(1)


def first_of_classes(pixels: Tensor, labels: Tensor, info: DatasetInfo, limit: int) -> tuple[Tensor, Tensor]:
    """The first `limit` records among the classes that `info` keeps."""
    chosen = (labels < info.num_classes).nonzero().flatten()[:limit]
    return pixels[chosen], labels[chosen]


def first_names(names: Sequence[str], wanted: int | None, where: str) -> tuple[str, ...]:
    """The classes that `num_classes` keeps."""
    if wanted is not None and wanted > len(names):
        raise DataError(f"{where} has {len(names)} classes, not {wanted}.", remedy=f"Set num_classes to {len(names)}.")
    return tuple(names[:wanted])


def list_images(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The image files of a folder by name; lists, opens nothing."""
    try:
        found = [p for p in folder.iterdir() if p.suffix.lower() in suffixes and not p.name.startswith(".")]
    except OSError as error:
        raise DataError(
            f"cannot list {folder}: {error.strerror}.", remedy="Put the class's images there or lower num_classes."
        ) from None
    return sorted(found)


def in_turn(per_class: Sequence[Sequence[Path]]) -> list[tuple[Path, int]]:
    """Images with their labels, one of each class in turn, so that a limit keeps the classes balanced."""
    rows = zip_longest(*([(path, label) for path in paths] for label, paths in enumerate(per_class)))
    return [item for item in chain.from_iterable(rows) if item is not None]


def image_shape(path: Path) -> tuple[int, int, int]:
    """(C, H, W) from the file's header; the pixels are not decoded."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            mode, (width, height) = image.mode, image.size
    except Exception as error:  # decoders raise nearly anything on a damaged file
        raise _damaged(path, error) from None
    return _channels(path, mode), height, width


def read_images(files: Sequence[tuple[Path, int]], shape: tuple[int, int, int], num_classes: int) -> Examples:
    """Decode images that must all have one shape. A grey image in a colour set becomes a colour image."""
    pixels = torch.empty((len(files), *shape), dtype=torch.uint8)
    for index, (path, _) in enumerate(files):
        pixels[index] = _decode(path, shape)
    return Examples(scale(pixels), torch.tensor([label for _, label in files], dtype=torch.int64), num_classes)


def _decode(path: Path, shape: tuple[int, int, int]) -> Tensor:
    from PIL import Image

    channels, height, width = shape
    try:
        with Image.open(path) as image:
            mode, size = image.mode, image.size
            raw = bytearray(image.convert("L" if channels == 1 else "RGB").tobytes())
    except Exception as error:  # decoders raise nearly anything on a damaged file
        raise _damaged(path, error) from None
    if size != (width, height):
        raise DataError(
            f"{path} is {size[0]}x{size[1]}, the first image is {width}x{height}.",
            why="One network has one input size.",
            remedy=f"Resize every image to {width}x{height}.",
        )
    if _channels(path, mode) > channels:
        raise DataError(
            f"{path} is a colour image, the first image is grey.",
            remedy="Convert all of them to grey, or all of them to RGB.",
        )
    return torch.frombuffer(raw, dtype=torch.uint8).view(height, width, channels).permute(2, 0, 1)


def _channels(path: Path, mode: str) -> int:
    if mode not in MODES:
        raise DataError(
            f"{path} has pixels of mode {mode}.",
            why="Only images of 8 bits a channel scale to [-1, 1] without loss.",
            remedy="Convert it to 8-bit grey or RGB.",
        )
    return MODES[mode]


def _damaged(path: Path, error: Exception) -> DataError:
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return DataError(
        f"{path} is not a whole image.", why=f"Pillow says: {reason}.", remedy="Restore the file or remove it."
    )
