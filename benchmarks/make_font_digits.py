"""Render the digits of fonts into src/stobatch/data/font_digit_files, for `stobatch pretrain --from-data fonts`.

    npm pack @fontsource/NAME       # for every font of FONTS.tsv; unpack each into FOLDER/NAME/package
    python benchmarks/make_font_digits.py FOLDER

Only fonts under the SIL Open Font License are taken, and of fonts with nearly the same digits the first. The sheet has
a row for each font and a column for each digit, a bilevel picture of 64x64 that the digit fills but for a border of 4.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont

OUT = Path(__file__).parents[1] / "src" / "stobatch" / "data" / "font_digit_files"
SIDE, BORDER, RENDERED = 64, 4, 400
SAME = 0.8
"""Ink that two fonts have in common, over what either has."""
LEFT_OUT = Path(__file__).with_name("fonts_left_out.txt")


def render(font: ImageFont.FreeTypeFont, digit: str) -> Image.Image | None:
    """Return a digit that fills its picture; None where the font has none."""
    canvas = Image.new("L", (4 * RENDERED, 4 * RENDERED))
    ImageDraw.Draw(canvas).text((RENDERED, RENDERED), digit, fill=255, font=font)
    box = canvas.getbbox()
    if box is None:
        return None
    cut = canvas.crop(box)
    scale = (SIDE - 2 * BORDER) / max(cut.size)
    size = tuple(max(1, round(side * scale)) for side in cut.size)
    small = cut.resize(size, Image.Resampling.BOX)
    whole = Image.new("L", (SIDE, SIDE))
    whole.paste(small, ((SIDE - size[0]) // 2, (SIDE - size[1]) // 2))
    return whole


def read_notice(file: Path) -> str:
    """Return the copyright notice that a font carries, in one line."""
    with TTFont(file) as font:
        return re.sub(r"\s+", " ", font["name"].getDebugName(0)).strip()


def main(folder: Path) -> None:
    left_out = set(LEFT_OUT.read_text().split()) if LEFT_OUT.exists() else set()
    rows, names = [], []
    for package in sorted(folder.glob("*/package")):
        name = package.parent.name
        about = json.loads((package / "package.json").read_text())
        notice = package / "LICENSE"
        licence = notice.read_text(encoding="utf-8", errors="replace") if notice.exists() else ""
        files = sorted(package.glob("files/*-latin-*-normal.woff"))
        if name in left_out or about.get("license") != "OFL-1.1" or "SIL Open Font License" not in licence or not files:
            continue
        font = ImageFont.truetype(str(files[0]), RENDERED)
        if any(font.getmask(digit).getbbox() is None for digit in "0123456789"):
            continue
        digits = [render(font, digit) for digit in "0123456789"]
        row = np.concatenate([np.asarray(digit) >= 128 for digit in digits], 1)
        if any((row & other).sum() > SAME * (row | other).sum() for other in rows):
            continue
        rows.append(row)
        names.append(f"{name}\t{about['version']}\t{read_notice(files[0])}")
    Image.fromarray(np.concatenate(rows)).save(OUT / "digits.png", optimize=True)
    (OUT / "FONTS.tsv").write_text("\n".join(names) + "\n", encoding="utf-8")
    print(f"{len(rows)} fonts, {(OUT / 'digits.png').stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
