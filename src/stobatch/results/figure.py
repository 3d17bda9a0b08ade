"""A figure of the paper made again: its points, one JSON object a line, and what `figure` says of plan and files."""

from __future__ import annotations

from typing import Literal

from stobatch.results.accuracy import TTest
from stobatch.results.document import Count, Document, Flag, Number, Part, Size, Text, Whole
from stobatch.results.training import HistoryRow
from stobatch.types import Status

PointStatus = Literal["measured", "claimed", "proved"]
"""Of an accuracy: what attacks left, what a certificate claims, what a certificate proves."""
AccuracyKind = Literal["conventional", "certified"]
Axis = Literal["epsilon", "radius"]


class FigurePoint(Document):
    """One measured or certified accuracy, with all one must know to draw it and to make it again."""

    figure: Count
    scale: Literal["full", "smoke"]
    data: Text
    method: Text
    settings: tuple[Text, ...]
    """What was changed of the recipe, as KEY=VALUE."""
    protocol: Literal["published protocol", "adaptive protocol", "proved"]
    kind_of_accuracy: AccuracyKind
    status: PointStatus
    certificate: Text | None
    """Of a certified accuracy: the rule."""
    axis: Axis
    epsilon: Number | None
    privacy: Status
    """Who vouches for ε with secret seeds; where `seed` is public it is void all the same."""
    attack: Text
    """`worst` is the worst of all for each example; `none` are clean inputs."""
    radius: Size
    unit: Text
    steps: Count
    """Gradient steps of the attack, T_a; 0 where nothing was attacked."""
    accuracy: Number
    images: Count
    training_hash: Text
    training_steps: Count
    seed: Whole | None
    device: Text
    seconds: Size | None
    """Of the training, since its last start."""
    source: Text
    """The record that it was taken from, or the run."""

    @property
    def at(self) -> float | None:
        """Return its place on the axis; None where a method ignores ε, and so stands everywhere."""
        return self.epsilon if self.axis == "epsilon" else self.radius


class LearningCurve(Document):
    """How accuracy on test images went while a run of a figure was trained."""

    data: Text
    method: Text
    settings: tuple[Text, ...]
    epsilon: Number | None
    privacy: Status
    seed: Whole | None
    training_hash: Text
    device: Text
    seconds: Size | None
    history: tuple[HistoryRow, ...]


class PaperNumber(Part):
    """A number that the paper states in its text."""

    figure: Count | None
    claim: Text
    dataset: Text | None
    method: Text | None
    epsilon: Number | None
    radius: Size | None
    steps: Count | None
    kind: AccuracyKind | None
    accuracy: Number | None
    where: Text


class FigureRun(Part):
    """A training that a figure needs: what is there of it, and what the rest would cost."""

    run: Text
    method: Text
    epsilon: Number | None
    privacy: Status
    seed: Whole
    settings: tuple[Text, ...]
    training_hash: Text
    state: Literal["recorded", "measured", "trained", "half-trained", "not begun"]
    recorded_points: Count
    wanted_points: Count
    minutes: Size | None
    """An estimate for this machine, where it was asked for."""


class FigureTest(Part):
    """A two-tailed t-test over seeds between the published mechanism and a baseline."""

    baseline: Text
    protocol: Text
    epsilon: Number | None
    radius: Size
    t_test: TTest


class FigureMade(Part):
    """One figure: its plan, its files, and what is missing in it."""

    figure: Count
    scale: Text
    caption: Text
    runs: tuple[FigureRun, ...]
    minutes: Size | None
    points: Count
    missing: tuple[Text, ...]
    files: tuple[Text, ...]
    t_tests: tuple[FigureTest, ...]


class FiguresMade(Document):
    """What `figure` planned or made."""

    dry_run: Flag
    device: Text
    figures: tuple[FigureMade, ...]

    def lines(self) -> list[str]:
        return [
            f"figure {one.figure}: {one.points} points, {len(one.missing)} missing curves or parts of them"
            for one in self.figures
        ]
