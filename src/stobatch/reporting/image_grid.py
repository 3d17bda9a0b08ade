"""Attacked test images next to clean ones, as small PNGs inside the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stobatch.errors import RunError
from stobatch.files import PRIVATE, tensors_sha256
from stobatch.reporting.page import Note
from stobatch.reporting.summary import Facts
from stobatch.results import Pictures as KeptPictures

_MOST_EXAMPLES = 8
_WIDEST = 96
"""Larger pictures are shown smaller, so that a report stays small enough to be mailed."""

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Picture:
    """One image with the model's answer."""

    source: str
    alt: str
    where: str
    answer: str
    is_right: bool


@dataclass(frozen=True)
class Pictures:
    """Rows of one example each; or none, and why."""

    note: Note
    examples: tuple[tuple[Picture, ...], ...] = ()


def pictures_of(facts: Facts, *, images: bool | None) -> Pictures:
    kept = facts.scores.images
    if images is False:
        return Pictures(Note("Pictures were left out of this report on request."))
    if kept is None:
        return Pictures(Note("The evaluation kept no pictures."))
    # Old runs do not say whether anyone can download their test images: those have to be asked for.
    if images is None and not kept.public:
        note = "Pictures were left out: the test images are not those of a public data set. To show them:"
        return Pictures(Note(note, "stobatch report RUN --images"))
    if images is None and not _file(facts, kept).exists():
        return Pictures(Note("This copy of the run holds no pictures: they are private."))
    pixels = _read(facts, kept)
    count = min(len(kept.labels), _MOST_EXAMPLES)
    note = (
        f"The first {count} test images and what the {kept.attack} attack on the single pass makes of them; no "
        f"training data is shown. Radius {facts.unit}. Under each picture the model's answer: ✓ right, ✗ wrong."
    )
    if max(pixels["clean"].shape[2:]) > _WIDEST:
        note += f" They are shrunk to {_WIDEST} pixels here."
    return Pictures(Note(note), tuple(tuple(_example(facts, kept, pixels, place)) for place in range(count)))


def _read(facts: Facts, kept: KeptPictures) -> dict[str, Pixels]:
    """Return the pixels, from the run's own folder and nowhere else."""
    from safetensors import SafetensorError, safe_open

    path = _file(facts, kept)
    remedy = f"Evaluate again: `{facts.evaluate_command}`; or report without images."
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            pixels = {name: file.get_tensor(name) for name in kept.predictions}
    except FileNotFoundError:
        raise RunError(f"{path} is not there.", remedy=remedy) from None
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is damaged ({error}).", remedy=remedy) from None
    recorded = metadata.get("config_hash")
    if recorded != facts.scores.training_hash:
        raise RunError(f"{path} is of configuration {recorded}, not of this run.", remedy=remedy)
    if metadata.get("weights_sha256") != facts.scores.weights_sha256:
        raise RunError(f"{path} shows attacks on other weights than those of this run.", remedy=remedy)
    if metadata.get("pixels_sha256") not in (None, tensors_sha256(path.read_bytes())):
        raise RunError(f"{path} is not what the evaluation wrote.", remedy=remedy)
    return pixels


def _file(facts: Facts, kept: KeptPictures) -> Path:
    """Return the file in the private folder, or where older runs have it; never one anywhere else."""
    name = Path(kept.file)
    return facts.run.path / PRIVATE / name.name if name.parts[0] == PRIVATE else facts.run.path / name.name


def _example(facts: Facts, kept: KeptPictures, pixels: dict[str, Pixels], place: int) -> Iterator[Picture]:
    """Yield one row: the clean picture, then each radius."""
    for name, predictions in kept.predictions.items():
        label, answer = (facts.started.dataset.class_name(value) for value in (kept.labels[place], predictions[place]))
        where = f"clean, label {label}" if name == "clean" else f"radius {name}"
        alt = f"test image {place}, {where}: answer {answer}"
        is_right = kept.labels[place] == predictions[place]
        yield Picture(_png(pixels[name][place]), alt, where, f"{answer} {'✓' if is_right else '✗'}", is_right)


def _png(pixels: Pixels) -> str:
    """Return C x H x W bytes as a data address."""
    from PIL import Image

    channels = pixels.shape[0]
    picture = Image.fromarray(pixels[0] if channels == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    picture.thumbnail((_WIDEST, _WIDEST))
    out = io.BytesIO()
    picture.save(out, format="png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
