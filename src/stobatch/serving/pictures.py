"""Pictures that strangers send as files: what is not plainly one picture of the right shape is refused."""

from __future__ import annotations

from io import BytesIO

import torch
from torch import Tensor

from stobatch.data.pixels import PictureRule, image_shape, read_image
from stobatch.errors import DataError, SettingError

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")
"""Decoders that may see what strangers send; others have had more holes, or start programs."""
LARGEST_PIXELS = 2**22
"""Width times height of a file, before it is brought to the network's size: 2048 x 2048."""
MOST_PIXELS = 2**24
"""Of all files of a request: they are decoded one after the other, and others wait."""
FITS = ("resize", "crop")


class Upload(BytesIO):
    """A file that was sent, with a name for messages."""

    def __init__(self, content: bytes, place: int) -> None:
        super().__init__(content)
        self.place = place

    def __str__(self) -> str:
        return f"picture {self.place}"


def read_uploads(files: list[bytes], shape: tuple[int, ...], rule: PictureRule) -> Tensor:
    """Return the pictures in files as a batch in [-1, 1]."""
    channels, height, width = shape
    uploads = [Upload(file, place) for place, file in enumerate(files)]
    together = sum(_pixels(file) for file in uploads)
    if together > MOST_PIXELS:
        raise DataError(
            f"the files have {together:,} pixels together.",
            why=f"At most {MOST_PIXELS:,} are decoded for a request.",
            remedy="Send fewer at once, or smaller ones.",
        )
    return torch.stack([_read(file, (channels, height, width), rule) for file in uploads])


def _pixels(file: Upload) -> int:
    """Return the size of a file that is plainly one picture, which is not decoded for that."""
    from PIL import Image, UnidentifiedImageError

    known = ", ".join(FORMATS)
    try:
        with Image.open(file, formats=FORMATS) as image:
            size, animated = image.size, getattr(image, "is_animated", False)
    except UnidentifiedImageError:
        raise DataError(f"{file} is no picture.", remedy=f"Send one of {known}.") from None
    except Exception:  # decoders raise nearly anything on a damaged file
        raise DataError(f"{file} is damaged, or far too large.", remedy=f"Send one whole file, {known}.") from None
    if size[0] * size[1] > LARGEST_PIXELS:
        raise DataError(
            f"{file} is {size[0]}x{size[1]} pixels.",
            why=f"At most {LARGEST_PIXELS:,} are decoded.",
            remedy="Send a smaller one.",
        )
    if animated:
        raise DataError(f"{file} is animated.", why="It is many pictures.", remedy="Send one of its frames.")
    file.seek(0)
    return int(size[0] * size[1])


def _read(file: Upload, shape: tuple[int, int, int], rule: PictureRule) -> Tensor:
    found = image_shape(file)
    if found[1:] != shape[1:] and not rule.resize:
        raise DataError(
            f"{file} is {found[1]}x{found[2]} (height x width), and the network takes {shape[1]}x{shape[2]}.",
            remedy=f"Send that size, or the parameter fit={' or fit='.join(FITS)}.",
        )
    if found[0] > shape[0] and not rule.recolour:
        raise DataError(
            f"{file} is in colour, and the network takes grey.",
            remedy=f"Send it in grey, or the parameter fit={' or fit='.join(FITS)}.",
        )
    file.seek(0)
    return read_image(file, shape, rule)


def rule_for(fit: object, of_training: PictureRule) -> PictureRule:
    """Return how pictures may be brought to the network's shape: as those of the training, or as is asked."""
    if fit is None:
        return of_training
    if fit not in FITS:
        raise SettingError("the parameter fit is unknown.", remedy=f"Use {' or '.join(FITS)}.")
    return PictureRule(True, fit == "crop", True)
