"""Digits as a few strokes of a pen, in the ways that people write them, with every turning point moved at random.

The ways were written down by hand for this library, after a look at held-out training images of MNIST that a network
of fonts took for other digits: see `PriorCard.tuned_on`. Coordinates are x to the right and y downwards in a box of 1;
a stroke is a smooth curve through its points.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stobatch.data.rendered_digits import FILLED, PICTURE, Glyphs, measure_glyphs

FILE = Path(__file__).parent / "stroke_digit_files" / "ways.json"
_PIECES = 6
"""Straight pieces between two points of a stroke."""
LOOSENESS = 0.08
"""Standard deviation of the move of a point."""
_WIDTH = 5
"""Of the pen, in glyph pixels; the one that a digit is drawn with in the end is another."""
_FINER = 2
"""The pen draws on a grid that is finer by this factor."""


@cache
def read_ways() -> tuple[list[list[Tensor]], ...]:
    """Return the ways of each digit: strokes, each of them points [K, 2]."""
    digits = json.loads(FILE.read_text("utf-8"))
    return tuple([[torch.tensor(stroke) for stroke in way] for way in digit["ways"]] for digit in digits)


def make_stroke_glyphs(per_digit: int, generator: torch.Generator, looseness: float = LOOSENESS) -> Glyphs:
    """Return glyphs of every digit, in all its ways by turns."""
    pictures, labels = [], []
    for label, ways in enumerate(read_ways()):
        for number in range(per_digit):
            strokes = ways[number % len(ways)]
            # A point that two strokes share is moved in each of them: they meet only nearly, as with a real pen.
            moved = [line + looseness * torch.randn(line.shape, generator=generator) for line in strokes]
            pictures.append(_draw([smooth(line) for line in moved]))
            labels.append(label)
    return measure_glyphs(np.stack(pictures), torch.tensor(labels))


def smooth(points: Tensor) -> Tensor:
    """Return points of the Catmull-Rom spline through points [K, 2]; it passes through every one.

    >>> smooth(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))[:, 0].tolist()[::3]
    [0.0, 0.5, 1.0]
    """
    first, last = 2 * points[:1] - points[1:2], 2 * points[-1:] - points[-2:-1]
    p = torch.cat([first, points, last]).unsqueeze(1)
    a, b, c, d = (p[start : len(p) - 3 + start] for start in range(4))
    t = (torch.arange(_PIECES) / _PIECES).view(1, -1, 1)
    between = 0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3)
    return torch.cat([between.flatten(0, 1), points[-1:]])


def _draw(lines: list[Tensor]) -> NDArray[np.bool_]:
    """Return the picture that a round pen leaves, with the digit as large as glyphs are."""
    from PIL import Image, ImageDraw

    every = torch.cat(lines)
    low, high = every.amin(0), every.amax(0)
    scale = _FINER * (FILLED - _WIDTH) / float((high - low).amax())
    side, radius = _FINER * PICTURE, _FINER * _WIDTH / 2
    canvas = Image.new("1", (side, side))
    pen = ImageDraw.Draw(canvas)
    for line in lines:
        places = [(float(x), float(y)) for x, y in (line - (low + high) / 2) * scale + side / 2]
        pen.line(places, fill=1, width=round(2 * radius), joint="curve")
        for x, y in (places[0], places[-1]):
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=1)
    blocks = np.asarray(canvas).reshape(PICTURE, _FINER, PICTURE, _FINER)
    ink: NDArray[np.bool_] = blocks.mean((1, 3)) >= 0.5
    return ink
