"""Digits bent and drawn afresh in every batch, framed like MNIST's: 20 of 28 pixels long, centred by mass.

A glyph is kept as its signed distance to the outline, positive inside: a thicker or thinner pen is another level of it,
and it can be read between its pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

SIDE, LONGEST = 28, 20
"""Of the picture, and of the digit in it."""
PICTURE, FILLED = 64, 56
"""Pixels of a glyph's picture, and of the glyph in it."""
_FRAME, _FINENESS = 96, 2
"""Pixels of a glyph's frame, in which distances grow, and of one value of them."""
_OUTERMOST, _EVENLY = 16, 64
"""Places of a glyph that its frame is found from, one in each direction, and those of its mass."""
_UNIT = FILLED / LONGEST
"""Glyph pixels in a pixel, for a digit that is not resized."""
_KNOTS = 5
"""A bend is drawn at this many places along each side, and smooth between them."""


@dataclass(frozen=True)
class Glyphs:
    """Pictures of digits, in glyph pixels."""

    distances: Tensor
    """[N, 1, 48, 48]: to the outline, positive inside."""
    half_widths: Tensor
    """[N]: half of the usual width of a stroke."""
    places: Tensor
    """[N, 80, 2] as (x, y) from the middle: the outermost ink in 16 directions, then 64 spread evenly over it."""
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, which: Tensor) -> Glyphs:
        return Glyphs(*(getattr(self, field.name)[which] for field in fields(self)))

    @classmethod
    def join(cls, parts: Sequence[Glyphs]) -> Glyphs:
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def measure_glyphs(pictures: NDArray[np.bool_], labels: Tensor) -> Glyphs:
    """Return what is needed to draw from pictures [N, 64, 64] of ink."""
    from scipy.ndimage import distance_transform_edt

    margin = (_FRAME - PICTURE) // 2
    angles = np.arange(_OUTERMOST) * 2 * np.pi / _OUTERMOST
    directions = np.stack([np.cos(angles), np.sin(angles)])
    distances, widths, places = [], [], []
    for ink in np.pad(pictures, ((0, 0), (margin, margin), (margin, margin))):
        inside, outside = distance_transform_edt(ink), distance_transform_edt(~ink)
        distances.append(np.where(ink, inside - 0.5, 0.5 - outside))
        # In a stroke of half-width w the distance is w / 2 on average.
        widths.append(2 * (inside[ink] - 0.5).mean())
        own = np.argwhere(ink)[:, ::-1] - (_FRAME - 1) / 2
        outermost = own[(own @ directions).argmax(0)]
        evenly = own[np.linspace(0, len(own) - 1, _EVENLY).round().astype(int)]
        places.append(np.concatenate([outermost, evenly]))
    return Glyphs(
        F.avg_pool2d(torch.from_numpy(np.stack(distances)).float().unsqueeze(1), _FINENESS),
        torch.tensor(widths).float(),
        torch.from_numpy(np.stack(places)).float(),
        labels,
    )


@dataclass(frozen=True)
class Distortion:
    """How far a digit may be changed. Each number is drawn for each digit alone."""

    rotation: float = 0.15
    """Radians, standard deviation; as the following ones."""
    shear: float = 0.25
    stretch: float = 0.2
    """Of the logarithm of width over height."""
    bend: float = 1.2
    """Of a smooth shift of its parts, in pixels."""
    size: float = 0.03
    """Of the logarithm of its size."""
    pen: tuple[float, float] = (0.8, 2.0)
    """Half the width of a stroke, in pixels, from and to."""
    fade: tuple[float, float] = (0.5, 1.2)
    """Pixels over which ink fades, from and to."""


class RenderedDigits:
    """Digits drawn from glyphs."""

    def __init__(self, glyphs: Glyphs, hand: Distortion | None = None) -> None:
        self.glyphs, self.hand = glyphs, hand or Distortion()
        line = torch.arange(SIDE) - (SIDE - 1) / 2
        self._places = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).flatten(0, 1)
        self._smooth = _interpolation()

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return pictures [count, 1, 28, 28] in [-1, 1] and their labels; the generator decides everything."""

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(count, generator=generator)

        def normal(stddev: float) -> Tensor:
            return stddev * torch.randn(count, generator=generator)

        hand = self.hand
        chosen = self.glyphs.take(torch.randint(len(self.glyphs), (count,), generator=generator))
        turn, shear, stretch = normal(hand.rotation), normal(hand.shear), normal(hand.stretch / 2).exp()
        pen, fade, longest = uniform(*hand.pen), uniform(*hand.fade), LONGEST * normal(hand.size).exp()
        knots = hand.bend * torch.randn((count, 2, _KNOTS**2), generator=generator)
        bend = (knots @ self._smooth).view(count, 2, SIDE, SIDE)  # where a pixel is read from, in pixels aside

        # A pixel p is read at the place M (scale p + centre + bend) of the glyph; M takes rotation and slant off it.
        cos, sin, zero = turn.cos(), turn.sin(), torch.zeros(count)
        rotate = torch.stack([cos, -sin, sin, cos], 1).view(-1, 2, 2)
        slant = torch.stack([1 / stretch, shear, zero, stretch], 1).view(-1, 2, 2)
        reading = _UNIT * slant @ rotate
        writing = torch.linalg.inv(reading)

        # Points of the glyph as they are written, for the frame: their box and their mean.
        points = chosen.places @ writing.mT
        near = (points / (SIDE / 2)).unsqueeze(1)
        points = points - F.grid_sample(bend, near, padding_mode="border", align_corners=False)[:, :, 0].mT
        length = (points.amax(1) - points.amin(1)).amax(1)
        # The pen is added after the frame has scaled the middle of the strokes; 2 pen wide at the ends.
        own = chosen.half_widths
        scale = (length - 2 * own / _UNIT).clamp_min(4) / (longest - 2 * pen).clamp_min(4)
        pixel = (_UNIT * scale).unsqueeze(1)
        # Thinner than half of itself a stroke would break.
        wider = (pen.unsqueeze(1) * pixel - own.unsqueeze(1)).maximum(-own.unsqueeze(1) / 2)

        def ink(centre: Tensor) -> Tensor:
            places = self._places * scale.view(-1, 1, 1) + centre.unsqueeze(1) + bend.flatten(2).mT
            read = (places @ reading.mT).view(count, SIDE, SIDE, 2) / (_FRAME / 2)
            distance = F.grid_sample(chosen.distances, read, padding_mode="border", align_corners=False).flatten(1)
            ink: Tensor = (0.5 + (distance + wider) / pixel / fade.unsqueeze(1)).clamp(0, 1)
            return ink

        centre = points[:, _OUTERMOST:].mean(1)
        first = ink(centre)
        mass = first @ self._places / first.sum(1, keepdim=True).clamp_min(1)
        pictures = 2 * ink(centre + mass * scale.unsqueeze(1)) - 1
        return pictures.view(count, 1, SIDE, SIDE), chosen.labels


def _interpolation() -> Tensor:
    """Return the matrix [25, 784] from values at the knots to smooth values at the pixels."""
    basis = torch.eye(_KNOTS**2).view(-1, 1, _KNOTS, _KNOTS)
    return F.interpolate(basis, size=(SIDE, SIDE), mode="bicubic", align_corners=True).flatten(1)


FOLDER = Path(__file__).parent / "font_digit_files"
SHEET, NAMES = FOLDER / "digits.png", FOLDER / "FONTS.tsv"


def list_fonts() -> list[str]:
    """Return the names of the fonts, in the order of their rows."""
    return [line.split("\t")[0] for line in NAMES.read_text("utf-8").splitlines()]


@cache
def read_font_glyphs() -> Glyphs:
    """Return all digits of all fonts, font by font."""
    from PIL import Image

    with Image.open(SHEET) as picture:
        ink = np.asarray(picture.convert("L")) > 0
    pictures = ink.reshape(-1, PICTURE, 10, PICTURE).transpose(0, 2, 1, 3).reshape(-1, PICTURE, PICTURE)
    return measure_glyphs(pictures, torch.arange(len(pictures)) % 10)
