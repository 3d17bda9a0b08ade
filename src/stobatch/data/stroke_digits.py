"""Digits as a few strokes of a pen, in the ways that people write them, with every turning point moved at random.

The ways were written down by hand for this library, after a look at held-out training images of MNIST that a network
of fonts took for other digits: see `PriorCard.tuned_on`. Coordinates are x to the right and y downwards in a box of 1;
a stroke is a smooth curve through its points.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stobatch.data.rendered_digits import FILLED, PICTURE, Glyphs, measure_glyphs

Points = tuple[tuple[float, float], ...]
Way = tuple[Points, ...]
"""Strokes of a digit."""

WAYS: tuple[tuple[Way, ...], ...] = (
    (  # 0: closed; begun inside at the top; open at the top; narrow
        (((0.5, 0.0), (0.12, 0.2), (0.05, 0.6), (0.3, 0.97), (0.7, 0.92), (0.93, 0.5), (0.8, 0.12), (0.5, 0.0)),),
        (((0.6, 0.08), (0.3, 0.05), (0.05, 0.5), (0.3, 0.98), (0.75, 0.85), (0.9, 0.4), (0.7, 0.05), (0.45, 0.12)),),
        (((0.4, 0.03), (0.1, 0.3), (0.08, 0.75), (0.45, 1.0), (0.85, 0.75), (0.92, 0.3), (0.65, 0.02)),),
        (((0.55, 0.0), (0.25, 0.3), (0.2, 0.75), (0.4, 1.0), (0.65, 0.75), (0.75, 0.3), (0.55, 0.0)),),
    ),
    (  # 1: a line; leaning; with a flag; with a flag and a foot
        (((0.5, 0.0), (0.5, 0.5), (0.5, 1.0)),),
        (((0.65, 0.0), (0.5, 0.5), (0.35, 1.0)),),
        (((0.3, 0.2), (0.45, 0.1), (0.55, 0.0)), ((0.55, 0.0), (0.54, 0.5), (0.52, 1.0))),
        (
            ((0.25, 0.22), (0.42, 0.12), (0.52, 0.0)),
            ((0.52, 0.0), (0.51, 0.5), (0.5, 1.0)),
            ((0.2, 1.0), (0.5, 1.0), (0.8, 0.98)),
        ),
    ),
    (  # 2: with a straight base; with loops at the corner; with a wide loop and a wave; as a z; without a corner
        (
            ((0.1, 0.25), (0.4, 0.0), (0.8, 0.12), (0.78, 0.4), (0.45, 0.72), (0.08, 0.98)),
            ((0.08, 0.98), (0.5, 0.97), (0.95, 0.95)),
        ),
        (
            (
                *((0.12, 0.2), (0.45, 0.0), (0.8, 0.15), (0.75, 0.45), (0.4, 0.8), (0.12, 0.98), (0.05, 0.85)),
                *((0.2, 0.75), (0.5, 0.9), (0.95, 0.95)),
            ),
        ),
        (
            (
                *((0.2, 0.1), (0.5, 0.0), (0.72, 0.2), (0.6, 0.55), (0.3, 0.9), (0.08, 0.9), (0.12, 0.7)),
                *((0.4, 0.72), (0.65, 0.92), (0.98, 0.8)),
            ),
        ),
        (((0.1, 0.15), (0.5, 0.02), (0.85, 0.12)), ((0.85, 0.12), (0.5, 0.5), (0.1, 0.95)), ((0.1, 0.95), (0.9, 0.93))),
        (((0.15, 0.3), (0.35, 0.02), (0.75, 0.08), (0.75, 0.4), (0.4, 0.7), (0.2, 0.95), (0.55, 0.9), (0.9, 1.0)),),
        (
            (
                *((0.22, 0.22), (0.45, 0.0), (0.72, 0.12), (0.7, 0.45), (0.5, 0.75), (0.25, 0.95), (0.05, 0.9)),
                *((0.1, 0.7), (0.35, 0.68), (0.6, 0.85), (0.95, 0.97)),
            ),
        ),
        (
            (
                *((0.15, 0.08), (0.6, 0.0), (0.82, 0.22), (0.7, 0.6), (0.4, 0.92), (0.12, 0.95), (0.08, 0.75)),
                *((0.3, 0.65), (0.6, 0.8), (1.0, 0.88)),
            ),
        ),
    ),
    (  # 3: two bows; with a flat top; with a loop in the middle; with a long lower bow
        (
            (
                *((0.15, 0.12), (0.5, 0.0), (0.8, 0.15), (0.7, 0.4), (0.4, 0.47)),
                *((0.75, 0.52), (0.9, 0.75), (0.6, 0.98), (0.1, 0.9)),
            ),
        ),
        (
            ((0.15, 0.03), (0.8, 0.02)),
            ((0.8, 0.02), (0.45, 0.4)),
            ((0.45, 0.4), (0.85, 0.55), (0.85, 0.85), (0.5, 1.0), (0.1, 0.9)),
        ),
        (
            (
                *((0.2, 0.1), (0.6, 0.0), (0.75, 0.2), (0.55, 0.42), (0.35, 0.48), (0.45, 0.4)),
                *((0.75, 0.55), (0.8, 0.8), (0.5, 1.0), (0.1, 0.92)),
            ),
        ),
        (((0.25, 0.08), (0.65, 0.02), (0.7, 0.25), (0.45, 0.4), (0.8, 0.5), (0.85, 0.8), (0.45, 1.0), (0.15, 0.8)),),
    ),
    (  # 4: open; closed; open with a curved first stroke; in one line; with a short stem
        (((0.2, 0.05), (0.1, 0.5)), ((0.1, 0.5), (0.5, 0.52), (0.95, 0.48)), ((0.75, 0.0), (0.7, 0.5), (0.65, 1.0))),
        (((0.65, 0.0), (0.35, 0.35), (0.05, 0.65)), ((0.05, 0.65), (0.95, 0.62)), ((0.65, 0.0), (0.64, 1.0))),
        (((0.15, 0.1), (0.12, 0.4), (0.4, 0.5), (0.75, 0.35)), ((0.8, 0.05), (0.75, 0.5), (0.7, 1.0))),
        (((0.3, 0.0), (0.1, 0.45), (0.3, 0.5), (0.75, 0.42)), ((0.85, 0.1), (0.6, 0.6), (0.45, 1.0))),
        (((0.25, 0.0), (0.05, 0.62)), ((0.05, 0.62), (0.95, 0.6)), ((0.6, 0.3), (0.58, 1.0))),
        (((0.1, 0.0), (0.12, 0.35), (0.3, 0.48), (0.65, 0.42)), ((0.7, 0.0), (0.68, 0.45), (0.72, 1.0))),
    ),
    (  # 5: bar, neck and bowl; with a slanting bar; in one line; with a wide bowl; with a small one
        (
            ((0.85, 0.03), (0.25, 0.05)),
            ((0.25, 0.05), (0.2, 0.42)),
            ((0.2, 0.42), (0.6, 0.38), (0.85, 0.65), (0.6, 0.95), (0.1, 0.92)),
        ),
        (
            ((0.35, 0.1), (0.95, 0.0)),
            ((0.35, 0.1), (0.25, 0.45)),
            ((0.25, 0.45), (0.6, 0.5), (0.7, 0.75), (0.45, 1.0), (0.05, 0.9)),
        ),
        (((0.85, 0.02), (0.4, 0.08), (0.25, 0.35), (0.6, 0.5), (0.75, 0.75), (0.45, 1.0), (0.1, 0.92)),),
        (
            ((0.3, 0.05), (0.6, 0.08), (0.9, 0.02)),
            ((0.3, 0.05), (0.18, 0.5)),
            ((0.18, 0.5), (0.55, 0.4), (0.9, 0.6), (0.75, 0.95), (0.35, 1.0), (0.08, 0.85)),
        ),
        (((1.0, 0.0), (0.5, 0.08)), ((0.5, 0.08), (0.4, 0.45), (0.6, 0.65), (0.5, 0.92), (0.2, 1.0), (0.0, 0.85))),
    ),
    (  # 6: a bow with a loop; upright with a small loop; wide; leaning, with the loop closed inside; with a large loop
        (((0.7, 0.0), (0.3, 0.3), (0.1, 0.7), (0.35, 1.0), (0.75, 0.9), (0.75, 0.6), (0.4, 0.55), (0.15, 0.75)),),
        (((0.35, 0.0), (0.22, 0.4), (0.2, 0.8), (0.45, 1.0), (0.72, 0.85), (0.6, 0.62), (0.3, 0.68), (0.2, 0.8)),),
        (((0.85, 0.05), (0.35, 0.2), (0.08, 0.6), (0.3, 0.98), (0.8, 0.95), (0.9, 0.65), (0.55, 0.5), (0.15, 0.7)),),
        (((0.8, 0.0), (0.45, 0.4), (0.25, 0.8), (0.4, 1.0), (0.65, 0.85), (0.6, 0.65), (0.35, 0.75)),),
        (((0.25, 0.0), (0.1, 0.4), (0.12, 0.85), (0.45, 1.0), (0.9, 0.85), (0.85, 0.5), (0.5, 0.5), (0.35, 0.85)),),
    ),
    (  # 7: bar and stem; curved; with a cross stroke; with a serif; with a bent bar
        (((0.05, 0.08), (0.5, 0.06), (0.9, 0.05)), ((0.9, 0.05), (0.65, 0.5), (0.45, 1.0))),
        (((0.05, 0.15), (0.4, 0.03), (0.85, 0.1), (0.75, 0.4), (0.5, 0.7), (0.4, 1.0)),),
        (((0.05, 0.05), (0.9, 0.06)), ((0.9, 0.06), (0.6, 0.5), (0.4, 1.0)), ((0.3, 0.52), (0.85, 0.48))),
        (((0.08, 0.25), (0.1, 0.05)), ((0.1, 0.05), (0.9, 0.05)), ((0.9, 0.05), (0.65, 0.45), (0.55, 1.0))),
        (((0.0, 0.2), (0.3, 0.3), (0.65, 0.15), (0.9, 0.0)), ((0.9, 0.0), (0.8, 0.5), (0.6, 1.0))),
        (((0.1, 0.1), (0.3, 0.15), (0.8, 0.02)), ((0.8, 0.02), (0.78, 0.5), (0.75, 1.0))),
    ),
    (  # 8: one line; two rings; begun at the top right and left open; narrow and leaning; begun in the middle
        (
            (
                *((0.75, 0.12), (0.45, 0.0), (0.2, 0.2), (0.5, 0.48), (0.8, 0.75), (0.5, 1.0), (0.18, 0.8)),
                *((0.45, 0.5), (0.78, 0.25), (0.7, 0.08)),
            ),
        ),
        (
            ((0.5, 0.0), (0.2, 0.12), (0.22, 0.38), (0.5, 0.47), (0.78, 0.36), (0.78, 0.1), (0.5, 0.0)),
            ((0.5, 0.47), (0.15, 0.62), (0.18, 0.92), (0.5, 1.0), (0.82, 0.9), (0.82, 0.6), (0.5, 0.47)),
        ),
        (
            (
                *((0.85, 0.05), (0.45, 0.05), (0.25, 0.25), (0.55, 0.5), (0.65, 0.8), (0.4, 1.0), (0.2, 0.82)),
                *((0.45, 0.55), (0.75, 0.35), (0.95, 0.1)),
            ),
        ),
        (
            (
                *((0.75, 0.2), (0.65, 0.0), (0.45, 0.1), (0.45, 0.35), (0.55, 0.6), (0.5, 0.9), (0.3, 1.0)),
                *((0.25, 0.8), (0.5, 0.5), (0.75, 0.2)),
            ),
        ),
        (
            (
                *((0.9, 0.02), (0.5, 0.12), (0.3, 0.28), (0.5, 0.45), (0.62, 0.68), (0.55, 0.92), (0.35, 1.0)),
                *((0.3, 0.8), (0.5, 0.52), (0.75, 0.3), (0.9, 0.02)),
            ),
        ),
        (
            (
                *((0.6, 0.35), (0.3, 0.3), (0.3, 0.08), (0.6, 0.0), (0.75, 0.15), (0.55, 0.45), (0.3, 0.7)),
                *((0.35, 0.97), (0.62, 0.95), (0.65, 0.7), (0.45, 0.4)),
            ),
        ),
    ),
    (  # 9: ring and straight stem; ring and bow; one line; with a small ring
        (
            ((0.8, 0.15), (0.45, 0.0), (0.15, 0.2), (0.25, 0.48), (0.6, 0.45), (0.8, 0.15)),
            ((0.8, 0.15), (0.75, 0.55), (0.7, 1.0)),
        ),
        (
            (
                *((0.82, 0.15), (0.45, 0.0), (0.12, 0.25), (0.35, 0.52), (0.75, 0.35), (0.82, 0.1)),
                *((0.82, 0.5), (0.7, 0.9), (0.3, 1.0)),
            ),
        ),
        (((0.75, 0.1), (0.35, 0.05), (0.15, 0.3), (0.4, 0.45), (0.75, 0.2), (0.6, 0.6), (0.45, 1.0)),),
        (
            ((0.7, 0.08), (0.45, 0.0), (0.3, 0.18), (0.45, 0.35), (0.7, 0.2), (0.7, 0.08)),
            ((0.7, 0.08), (0.68, 0.5), (0.6, 1.0)),
        ),
    ),
)
_PIECES = 6
"""Straight pieces between two points of a stroke."""
LOOSENESS = 0.08
"""Standard deviation of the move of a point."""
_WIDTH = 5
"""Of the pen, in glyph pixels; the one that a digit is drawn with in the end is another."""
_FINER = 2
"""The pen draws on a grid that is finer by this factor."""


def make_stroke_glyphs(per_digit: int, generator: torch.Generator, looseness: float = LOOSENESS) -> Glyphs:
    """Return glyphs of every digit, in all its ways by turns."""
    pictures, labels = [], []
    for label, ways in enumerate(WAYS):
        for number in range(per_digit):
            strokes = [torch.tensor(stroke) for stroke in ways[number % len(ways)]]
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
