"""Label pictures, and say how far no change of them can alter the label.

Pictures are read as the training data were: by the rule in the settings, which is public and fixed. A picture that
cannot be read is an answer of its own and stops nobody else's. Votes draw fresh secret noise for every call, so that
nobody can prepare for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stobatch.config import RunConfig
from stobatch.data.image_folder import SUFFIXES
from stobatch.data.pixels import PictureRule, count_frames, image_shape, other_files, read_image, scale
from stobatch.errors import DataError
from stobatch.models import Classifier
from stobatch.results import Kind, Prediction
from stobatch.seeds import Seeds
from stobatch.types import PAPER_RANGE, Status
from stobatch.verifier import CertificateKind, Verifier

Picture = Path | Tensor | str
"""A file, values in [-1, 1] of the network's shape, or why a file of a folder is not read."""
Named = tuple[str, Picture]
_ROWS = 64
"""Pictures that pass at once: few enough for large ones, enough to fill the machine."""
_PIXEL = PAPER_RANGE.width / 255


def picture_rule(config: RunConfig) -> PictureRule:
    """Return how the pictures of the training data were brought to one shape; only folders of images have a rule."""
    if config.data.name != "image_folder":
        return PictureRule()
    return PictureRule(config.data.size is not None, config.data.fit == "crop", config.data.colour is not None)


def name_pictures(pictures: Any, shape: tuple[int, ...]) -> Iterator[Named]:
    """Go through files, folders, arrays or tensors, each picture with a name; opens nothing yet."""
    if isinstance(pictures, str | Path):
        yield from _files(Path(pictures))
    elif isinstance(pictures, Sequence) and all(isinstance(one, str | Path) for one in pictures):
        for one in pictures:
            yield from _files(Path(one))
    else:
        for place, one in enumerate(as_batch(pictures, shape)):
            yield str(place), one


def _files(path: Path) -> Iterator[Named]:
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.name[0] != ".")
        if not found:
            raise DataError(f"{path} has no images.", remedy=f"Give a folder with {', '.join(SUFFIXES)} files.")
        yield from ((str(file), file) for file in found)
        left_out = f"is not {', '.join(SUFFIXES)}, all that is read of a folder; name the file itself"
        yield from ((str(file), left_out) for file in other_files(path, SUFFIXES))
    else:
        yield str(path), path


def as_batch(values: Any, shape: tuple[int, ...]) -> Tensor:
    """Arrays and tensors as a batch of the network's shape in [-1, 1]; bytes are scaled, another layout is named.

    In NumPy throughout: operations of torch give Python's lock away, which the server's loop can ill afford.
    """
    try:
        if isinstance(values, Tensor):
            values = (values.float() if values.is_floating_point() else values).detach().cpu()
        found = np.asarray(values)
        if found.dtype.kind not in "biuf":
            raise TypeError(f"values are {found.dtype}")
        if found.dtype.kind != "f" and found.dtype != np.uint8:
            raise DataError(
                f"pictures are whole numbers of type {found.dtype}, which may be bytes or values in {PAPER_RANGE}.",
                remedy="Give bytes as uint8, as inputs.to(torch.uint8), or floats in that range.",
            )
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"these are no pictures: {reason}.", remedy="Give files, an array or a tensor.") from None
    if found.ndim == len(shape):
        found = found[None]
    if found.shape[1:] != shape:
        last = found.ndim == 4 and found.transpose(0, 3, 1, 2).shape[1:] == shape
        moved = "They seem to be [N, H, W, C]: give inputs.permute(0, 3, 1, 2)." if last else ""
        axes = {3: "[N, C, H, W]"}.get(len(shape), f"[N, {', '.join(map(str, shape))}]")
        raise DataError(
            f"pictures of shape {found.shape} are not {axes} with {shape} after N.",
            remedy=moved or f"Give an array of shape (N, {', '.join(map(str, shape))}).",
        )
    kind = np.uint8 if found.dtype == np.uint8 else np.float32
    with np.errstate(over="ignore"):  # an infinity is out of range
        found = np.require(found, kind, ("C", "W"))  # torch shares the memory of no other array
    if kind is np.uint8:
        return scale(torch.from_numpy(found))
    low, high = (found.min(), found.max()) if found.size else (0.0, 0.0)
    if not (low >= PAPER_RANGE.low and high <= PAPER_RANGE.high):
        raise _range_error(found, float(low), float(high))
    return torch.from_numpy(found)


def _range_error(values: NDArray[Any], low: float, high: float) -> DataError:
    """Return what to say of pictures that leave the range: what mends them depends on how."""
    why = "Certificates are about inputs in that range."
    if not np.isfinite((low, high)).all():
        lost = int((~np.isfinite(values)).sum())
        return DataError(
            f"{lost} of {values.size} values are NaN or infinite, and pictures are in {PAPER_RANGE}.",
            why=why,
            remedy="Look at what made them: no scaling mends these.",
        )
    bytes_of_floats = "Give bytes (uint8) from 0 to 255, or divide them by 127.5 and subtract 1."
    other = "Bring them to the range in which the network was trained: a byte is divided by 127.5, less 1."
    is_bytes = low >= 0 and 2 < high <= 255
    return DataError(
        f"values span [{low:g}, {high:g}], not {PAPER_RANGE}.", why=why, remedy=bytes_of_floats if is_bytes else other
    )


def best_kind(kinds: Sequence[CertificateKind]) -> CertificateKind:
    """Of a verifier's kinds the one that is proved, if any is."""
    return next((kind for kind in kinds if kind.status is Status.PROVED), kinds[0])


def describe_kind(kind: CertificateKind, refuted: frozenset[str] = frozenset()) -> Kind:
    """Return a kind of certificate for a document; refuted where an audit broke it."""
    return Kind(
        name=kind.name,
        function=kind.function,
        column=kind.column,
        status=Status.REFUTED if kind.name in refuted else kind.status,
        source=kind.source,
        norm=kind.unit.norm,
        input_range=str(kind.unit.range),
        failure_probability=kind.failure_probability,
        assumptions=kind.assumptions,
    )


def predictions(
    network: Classifier,
    class_names: Sequence[str],
    verifier: Verifier | None,
    pictures: Iterable[Named],
    rule: PictureRule,
    *,
    radius: float | None = None,
    seeds: Seeds | None = None,
) -> Iterator[Prediction]:
    """Answer picture by picture, a few read at a time: any number of them fits into memory.

    **Guarantee.** Where `radius` of an answer is above 0, what its certificate's kind says holds: no input of [-1, 1]
    within it, in the kind's norm, gets another label from the function that the kind names. With `radius` given, the
    verifier must have been made for it.
    """
    generator = (seeds or Seeds.secret()).generator("predict")
    rest = iter(pictures)
    while part := list(islice(rest, _ROWS)):
        read = [_read(picture, network.input_shape, rule) for _, picture in part]
        good = [values for values in read if isinstance(values, Tensor)]
        answers = iter(_answer(network, class_names, verifier, torch.stack(good), radius, generator) if good else ())
        for (name, _), values in zip(part, read, strict=True):
            is_read = isinstance(values, Tensor)
            yield next(answers).replace(name=name) if is_read else Prediction(name=name, error=str(values))


def _read(picture: Picture, shape: tuple[int, ...], rule: PictureRule) -> Tensor | str:
    """Return a picture's values, or what is wrong with it."""
    if isinstance(picture, Tensor | str):
        return picture
    try:
        _require_readable(picture, shape, rule)
        channels, height, width = shape
        return read_image(picture, (channels, height, width), rule)
    except DataError as error:
        return " ".join(part for part in (error.what.removeprefix(f"{picture} "), error.why) if part).rstrip(".")


def _require_readable(file: Path, shape: tuple[int, ...], rule: PictureRule) -> None:
    """Raise unless a file is one picture that the rule brings to the network's shape."""
    channels, *size = shape
    fit = "Ask for --fit resize or crop, or give a rule."
    if not file.is_file():
        raise DataError("is no file." if file.exists() else "is not there.", remedy="Name a file.")
    if count_frames(file) > 1:
        raise DataError("is animated: it is many pictures.", remedy="Save one of its frames.")
    found, height, width = image_shape(file)
    if [height, width] != size and not rule.resize:
        network = f"{size[0]}x{size[1]}"
        raise DataError(
            f"is {height}x{width} (height x width), and the network takes {network}; see --fit.", remedy=fit
        )
    if found > channels and not rule.recolour:
        raise DataError("is in colour, and the network takes grey; see --fit.", remedy=fit)


def _answer(
    network: Classifier,
    class_names: Sequence[str],
    verifier: Verifier | None,
    inputs: Tensor,
    radius: float | None,
    generator: torch.Generator,
) -> list[Prediction]:
    with torch.no_grad():
        scores = network(inputs.to(network.device, network.dtype)).double().cpu()
    if verifier is None:
        labels = scores.argmax(1).tolist()
        return [
            Prediction(name="", label=label, class_name=_class(class_names, label), scores=tuple(row.tolist()))
            for label, row in zip(labels, scores, strict=True)
        ]
    found = verifier.verify(inputs, generator) if radius is not None else verifier.verify_farthest(inputs, generator)
    radii = found.columns()[best_kind(verifier.kinds).column]
    answers = []
    for place, label in enumerate(found.label.tolist()):
        abstains = bool(found.abstain[place])
        size = 0.0 if abstains else float(radii[place])
        answers.append(
            Prediction(
                name="",
                label=label,
                class_name=_class(class_names, label),
                abstains=abstains,
                scores=tuple(scores[place].tolist()),
                radius=size,
                radius_of_255=size / _PIXEL,
                is_safe=None if radius is None else size > 0 and size >= radius,
            )
        )
    return answers


def _class(class_names: Sequence[str], label: int) -> str:
    return class_names[label] if label < len(class_names) else str(label)
