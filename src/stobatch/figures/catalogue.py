"""Figures 2 to 9 of the paper, as data: which methods, budgets, radii and attacks each shows.

The paper does not print the grid of its curves; the values here are those that its text names, and even steps between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stobatch.errors import SettingError
from stobatch.results.figure import AccuracyKind, Axis
from stobatch.types import Status

DATA_NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "tiny_imagenet": "Tiny ImageNet, 30 classes"}


@dataclass(frozen=True)
class Method:
    """A row of the figures: its name in print, and who vouches for its ε where seeds are secret."""

    label: str
    privacy: Status
    votes: bool = False
    """Whether what it deploys is a vote, which certificates are about."""

    @property
    def title(self) -> str:
        words = {Status.NONE: "no privacy", Status.PROVED: "ε proved with secret seeds", Status.REFUTED: "ε refuted"}
        return f"{self.label} ({words[self.privacy]})"


METHODS = {
    # Both claims are refuted wherever they were audited: docs/results/audits.md.
    "published": Method("StoBatch", Status.REFUTED, votes=True),
    "adlm": Method("AdLM", Status.REFUTED),
    "dpsgd": Method("DP-SGD", Status.PROVED),
    "securesgd": Method("SecureSGD", Status.PROVED, votes=True),
    "securesgd_agm": Method("SecureSGD-AGM", Status.PROVED, votes=True),
    "pixeldp": Method("PixelDP", Status.NONE, votes=True),
    "sound": Method("sound", Status.PROVED),
    "sound_wide": Method("sound, for large radii", Status.PROVED),
}
_PRIVATE = ("published", "adlm", "dpsgd", "securesgd", "securesgd_agm")
_CERTIFIED = ("published", "pixeldp", "securesgd", "securesgd_agm")
_STRONG = ("published", "securesgd")
OURS = ("sound", "sound_wide")
"""What has both guarantees."""


@dataclass(frozen=True)
class PaperFigure:
    """What one figure of the paper shows."""

    number: int
    data: str
    kinds: tuple[AccuracyKind, ...]
    axis: Axis
    epsilons: tuple[float, ...]
    radii: tuple[float, ...]
    steps: tuple[int, ...]
    """T_a: gradient steps of the published protocol's attacks."""
    compared: tuple[str, ...]
    seeds: tuple[int, ...] = (1,)
    train_attack_steps: int | None = None
    """T_μ of the published mechanism, where the figure has another than the data set's recipe."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The paper's, and what has both guarantees; at one radius there is no need of models for large ones."""
        return (*self.compared, *(OURS[:1] if self.axis == "epsilon" else OURS))

    @property
    def caption(self) -> str:
        """What the picture shows, in plain words."""
        shown = " and ".join(self.kinds)
        against = "the privacy budget ε" if self.axis == "epsilon" else "the attack radius μ_a"
        fixed = f"radius {self.radii[0]:g}" if self.axis == "epsilon" else f"ε = {self.epsilons[0]:g}"
        steps = ", ".join(f"{count:,}" for count in self.steps)
        return (
            f"Figure {self.number} of the paper, made again: {shown} accuracy on {DATA_NAMES[self.data]} against "
            f"{against}, {fixed}, l∞ over [-1, 1], T_a = {steps}. A panel for each method: what the paper states, what "
            "its own protocol leaves, what attacks on the deployed model itself leave, and what is proved."
        )


_MNIST_RADII = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
_CIFAR10_RADII = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
_STRONG_STEPS = (100, 500, 1000, 2000)
_MNIST_EPSILONS, _CIFAR10_EPSILONS = (0.2, 0.5, 1.0, 1.5, 2.0), (2.0, 4.0, 6.0, 8.0, 10.0)
_THREE = (1, 2, 3)

FIGURES = {
    figure.number: figure
    for figure in (
        PaperFigure(2, "mnist", ("conventional",), "epsilon", _MNIST_EPSILONS, (0.2,), (10,), _PRIVATE, _THREE),
        PaperFigure(3, "cifar10", ("conventional",), "epsilon", _CIFAR10_EPSILONS, (0.2,), (3,), _PRIVATE),
        PaperFigure(4, "mnist", ("conventional",), "radius", (0.2,), _MNIST_RADII, (10,), _PRIVATE, _THREE),
        PaperFigure(5, "cifar10", ("conventional",), "radius", (2.0,), _CIFAR10_RADII, (3,), _PRIVATE),
        PaperFigure(6, "mnist", ("certified",), "radius", (1.0,), _MNIST_RADII, (10,), _CERTIFIED, _THREE),
        PaperFigure(7, "cifar10", ("certified",), "radius", (2.0,), _CIFAR10_RADII, (3,), _CERTIFIED),
        PaperFigure(
            *(8, "cifar10", ("conventional", "certified"), "radius", (2.0,), _CIFAR10_RADII, _STRONG_STEPS, _STRONG),
            train_attack_steps=200,
        ),
        PaperFigure(
            *(9, "tiny_imagenet", ("conventional", "certified"), "radius", (5.0,), _CIFAR10_RADII, _STRONG_STEPS),
            _STRONG,
        ),
    )
}


def find(which: str) -> list[PaperFigure]:
    """Return the figures that a word names.

    >>> [figure.number for figure in find("4")], len(find("all"))
    ([4], 8)
    """
    if which == "all":
        return list(FIGURES.values())
    if not which.isdecimal() or int(which) not in FIGURES:
        raise SettingError(
            f"there is no figure '{which}'.",
            why="Figure 1 is a drawing; Figures 2 to 9 show measurements.",
            remedy="Name one of 2 to 9, or all.",
        )
    return [FIGURES[int(which)]]


@dataclass(frozen=True, order=True)
class Place:
    """A point of a curve that a figure wants of one training."""

    kind: AccuracyKind
    protocol: str
    radius: float
    steps: int
    """T_a of the published protocol; 0 elsewhere."""


def wanted(figure: PaperFigure, method: str) -> Iterator[Place]:
    """Yield what a figure wants of each training of a method."""
    for radius in figure.radii:
        if method in OURS:
            yield Place("conventional", "adaptive protocol", radius, 0)
            yield Place("certified", "proved", radius, 0)
            continue
        for kind in figure.kinds:
            yield from (Place(kind, "published protocol", radius, steps) for steps in figure.steps)
            yield Place(kind, "adaptive protocol", radius, 0)
        if "certified" in figure.kinds:
            yield Place("certified", "proved", radius, 0)
