"""Digits of handwriting fonts, bent and drawn anew in every batch, framed as MNIST's are: 20 pixels long in a picture
of 28x28, centred by mass.

The glyphs are pictures that lie in the package. A glyph is kept as its signed distance to the outline, positive inside:
a thicker or thinner pen is another level of it, and it can be read between its pixels.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

FOLDER = Path(__file__).parent / "font_digit_files"
SIDE, LONGEST = 28, 20
"""Of the picture, and of the digit in it."""
_GLYPH, _FILLED, _MARGIN = 64, 56, 16
"""Pixels of a glyph's picture, of the glyph in it, and what is added on each side for distances to grow in."""
_UNIT = _FILLED / LONGEST
"""Glyph pixels in a pixel, for a digit that is not resized."""
_KNOTS = 5
"""A bend is drawn at so many places along each side, and smooth between them."""

_OUTERMOST = 16
"""Places of a glyph that its frame is found from, one in each direction."""


@dataclass(frozen=True)
class Hand:
    """How far a digit may be changed. Each number is drawn for each digit alone."""

    rotation: float = 0.15
    """Radians, standard deviation; as the following ones."""
    shear: float = 0.25
    stretch: float = 0.2
    """Of the logarithm of width over height."""
    bend: float = 0.8
    """Of a smooth shift of its parts, in pixels."""
    size: float = 0.03
    """Of the logarithm of its size."""
    pen: tuple[float, float] = (0.7, 1.8)
    """Half the width of a stroke, in pixels, from and to."""
    fade: tuple[float, float] = (0.8, 1.6)
    """Pixels over which ink fades, from and to."""


class FontDigits:
    """All glyphs, and digits drawn from them."""

    def __init__(self, folder: Path = FOLDER, hand: Hand | None = None) -> None:
        self.hand = hand or Hand()
        self.fonts = [line.split("\t")[0] for line in (folder / "FONTS.tsv").read_text("utf-8").splitlines()]
        self.sheet = folder / "digits.png"
        self._distances, self._half_widths, self._points = _measure(self.sheet)
        line = torch.arange(SIDE) - (SIDE - 1) / 2
        self._places = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).flatten(0, 1)
        self._smooth = _interpolation()

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.sheet.read_bytes()).hexdigest()

    def draw(self, count: int, generator: torch.Generator, among: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return pictures [count, 1, 28, 28] in [-1, 1] and their labels; the generator decides everything."""

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(count, generator=generator)

        def normal(stddev: float) -> Tensor:
            return stddev * torch.randn(count, generator=generator)

        hand = self.hand
        if among is None:
            glyph = torch.randint(len(self._distances), (count,), generator=generator)
        else:
            glyph = among[torch.randint(len(among), (count,), generator=generator)]
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
        points = self._points[glyph] @ writing.mT
        near = (points / (SIDE / 2)).unsqueeze(1)
        points = points - F.grid_sample(bend, near, padding_mode="border", align_corners=False)[:, :, 0].mT
        length = (points.amax(1) - points.amin(1)).amax(1)
        # The pen is added after the frame has scaled the middle of the strokes; 2 pen wide at the ends.
        own = self._half_widths[glyph]
        scale = (length - 2 * own / _UNIT).clamp_min(4) / (longest - 2 * pen).clamp_min(4)
        pixel = (_UNIT * scale).unsqueeze(1)
        # Thinner than half of itself a stroke would break.
        wider = (pen.unsqueeze(1) * pixel - own.unsqueeze(1)).maximum(-own.unsqueeze(1) / 2)
        glyphs = self._distances[glyph]

        def ink(centre: Tensor) -> Tensor:
            places = self._places * scale.view(-1, 1, 1) + centre.unsqueeze(1) + bend.flatten(2).mT
            read = (places @ reading.mT).view(count, SIDE, SIDE, 2) / (_GLYPH / 2 + _MARGIN)
            distance: Tensor = F.grid_sample(glyphs, read, padding_mode="border", align_corners=False).flatten(1)
            return (0.5 + (distance + wider) / pixel / fade.unsqueeze(1)).clamp(0, 1)

        centre = points[:, _OUTERMOST:].mean(1)
        first = ink(centre)
        mass = first @ self._places / first.sum(1, keepdim=True).clamp_min(1)
        pictures = 2 * ink(centre + mass * scale.unsqueeze(1)) - 1
        return pictures.view(count, 1, SIDE, SIDE), glyph % 10


@cache
def _measure(sheet: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each glyph the distances to its outline [1, 48, 48], half of its usual stroke width, and places of its
    ink from its middle [80, 2] as (x, y): the outermost in 16 directions, and others evenly. All in glyph pixels."""
    from PIL import Image
    from scipy.ndimage import distance_transform_edt

    with Image.open(sheet) as picture:
        ink = np.asarray(picture.convert("L")) > 0
    glyphs = ink.reshape(-1, _GLYPH, 10, _GLYPH).transpose(0, 2, 1, 3).reshape(-1, _GLYPH, _GLYPH)
    angles = np.arange(_OUTERMOST) * 2 * np.pi / _OUTERMOST
    directions = np.stack([np.cos(angles), np.sin(angles)])
    distances, widths, places = [], [], []
    for glyph in np.pad(glyphs, ((0, 0), (_MARGIN, _MARGIN), (_MARGIN, _MARGIN))):
        inside, outside = distance_transform_edt(glyph), distance_transform_edt(~glyph)
        distances.append(np.where(glyph, inside - 0.5, 0.5 - outside))
        # In a stroke of half-width w the distance is w / 2 on average.
        widths.append(2 * (inside[glyph] - 0.5).mean())
        own = np.argwhere(glyph)[:, ::-1] - (len(glyph) - 1) / 2
        outermost = own[(own @ directions).argmax(0)]
        evenly = own[np.linspace(0, len(own) - 1, 64).round().astype(int)]
        places.append(np.concatenate([outermost, evenly]))
    found = torch.from_numpy(np.stack(distances)).float().unsqueeze(1)
    return F.avg_pool2d(found, 2), torch.tensor(widths).float(), torch.from_numpy(np.stack(places)).float()


def _interpolation() -> Tensor:
    """Return the matrix [25, 784] from values at the knots to smooth values at the pixels."""
    basis = torch.eye(_KNOTS**2).view(-1, 1, _KNOTS, _KNOTS)
    return F.interpolate(basis, size=(SIDE, SIDE), mode="bicubic", align_corners=True).flatten(1)
