"""Points of figures on disk: `figure-N.jsonl`, one object a line, and the numbers that the paper states."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from stobatch import strict_json
from stobatch.errors import RunError
from stobatch.figures.catalogue import METHODS, PaperFigure
from stobatch.files import write_atomically
from stobatch.results import WORST, Document, FigurePoint, LearningCurve, PaperNumber

PAPER, CURVES = "paper.json", "learning-curves.jsonl"
_NAMES = {method.label.casefold(): name for name, method in METHODS.items()}
_LOOKS = ("training.monitor_every=", "training.monitor_examples=")
"""Settings that are hashed and change no weight."""


def file_of(folder: Path, figure: PaperFigure, scale: str) -> Path:
    """Return where the points of a figure are; those of a smoke run never share a file with others."""
    return folder / f"figure-{figure.number}{'' if scale == 'full' else f'-{scale}'}.jsonl"


def read_points(path: Path, figure: PaperFigure, scale: str) -> list[FigurePoint]:
    """Return the points of a file, none where there is no file; whatever is foreign or cut off is refused."""
    if not path.exists():
        return []
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _foreign(path, f"It cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            content = strict_json.read(line)
        except ValueError:
            raise _foreign(path, f"Line {number} is no whole JSON object") from None
        if not isinstance(content, dict):
            raise _foreign(path, f"Line {number} is no object")
        point = FigurePoint.from_dict(content, f"line {number} of {path}")
        if (point.figure, point.data, point.scale) != (figure.number, figure.data, scale):
            what = f"Figure {point.figure}, {point.data}, {point.scale}"
            raise _foreign(
                path, f"Line {number} is of {what}; here it is Figure {figure.number}, {figure.data}, {scale}"
            )
        if point.method not in METHODS:
            raise _foreign(
                path, f"Line {number} is of the method '{point.method}', which Figure {figure.number} has not"
            )
        found.append(point)
    return found


def write_points(path: Path, points: Iterable[FigurePoint]) -> None:
    """Write all points of a file, whole or not at all."""
    _write_lines(path, points)


def add_curves(path: Path, curves: Iterable[LearningCurve]) -> None:
    """Add learning curves to a file; of two of one training the later one counts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    every = [LearningCurve.from_dict(strict_json.read(line), path) for line in lines]
    # The hash does not know a public start; the settings do.
    found = {(curve.training_hash, curve.settings): curve for curve in (*every, *curves)}
    _write_lines(path, found.values())


def _write_lines(path: Path, documents: Iterable[Document]) -> None:
    text = "".join(json.dumps(document.to_dict(), ensure_ascii=False) + "\n" for document in documents)
    write_atomically(path, lambda out: out.write(text.encode()))


def merged(*groups: Sequence[FigurePoint]) -> list[FigurePoint]:
    """Return points of several places; of two of the same configuration and measurement the one of more images counts,
    or the later one.
    """
    found: dict[object, FigurePoint] = {}
    for point in (point for group in groups for point in group):
        before = found.get(_identity(point))
        if before is None or point.images >= before.images:
            found[_identity(point)] = point
    return list(found.values())


def _identity(point: FigurePoint) -> object:
    about = (point.figure, point.method, own_settings(point), point.epsilon, point.seed)
    how = (point.protocol, point.kind_of_accuracy, point.certificate, point.attack, point.radius, point.steps)
    return about, how


def own_settings(point: FigurePoint) -> tuple[str, ...]:
    """Return what was changed of the recipe, without how often the training was looked at."""
    return shown_settings(point.settings)


def shown_settings(settings: Iterable[str]) -> tuple[str, ...]:
    """Return changes without those that change no weight.

    >>> shown_settings(["training.monitor_every=50", "training.optimiser=adam"])
    ('training.optimiser=adam',)
    """
    return tuple(change for change in settings if not change.startswith(_LOOKS))


def read_paper(folder: Path, figure: PaperFigure) -> list[PaperNumber]:
    """Return the accuracies that the paper states of a figure's own methods; none where nobody wrote them down."""
    path = folder / PAPER
    if not path.exists():
        return []
    try:
        content = strict_json.read(path.read_bytes())
        every = [PaperNumber.model_validate(entry) for entry in content]
    except (ValueError, TypeError) as error:
        raise _foreign(path, f"It is no list of the paper's numbers: {str(error).splitlines()[0]}") from None
    return [
        one.replace(method=named)
        for one in every
        if one.figure == figure.number and one.accuracy is not None and (named := _name(one.method)) is not None
    ]


def _name(method: str | None) -> str | None:
    """The library's name of a method, by that name or by the paper's."""
    if method is None or method in METHODS:
        return method
    return _NAMES.get(method.casefold())


def _foreign(path: Path, why: str) -> RunError:
    return RunError(
        f"{path} does not hold points of this figure.",
        why=f"{why}.",
        remedy="Restore it, remove the line, or name another folder with --records or --out.",
    )


def main_attack(point: FigurePoint) -> bool:
    """Whether a point stands for its protocol: the worst attack, or a certificate of clean inputs."""
    return point.attack == ("none" if point.protocol == "proved" else WORST)
