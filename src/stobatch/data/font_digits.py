"""The digits of handwriting fonts, as pictures that lie in the package."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch

from stobatch.data.rendered_digits import PICTURE, Glyphs, measure_glyphs

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
