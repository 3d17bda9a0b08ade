"""Watching a training: what may be seen of it as it goes on, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """What may be seen of a training: released or public numbers, never a loss or a norm of private examples."""

    step: int
    """Steps that have been made."""
    steps: int
    """All that will be made."""
    learning_rate: float
    """Of the latest step; a function of the settings."""
    test_accuracy: float
    """On held-out test images, of the parameters at this step: it depends on the training data through them alone."""
    monitored: Mapping[str, float]
    """What the method watches, from parameters and plan: `epsilon_spent`, for those that descend by DP-SGD."""

    def to_dict(self) -> dict[str, float]:
        """Return every number by its name."""
        return {"learning_rate": self.learning_rate, "test_accuracy": self.test_accuracy, **self.monitored}


class Observer:
    """Told of a training as it goes on, in the process that writes; an error that it raises ends the training."""

    def begin(self, first: int, last: int) -> None:
        """Steps from `first` to `last` (excluded) are counted, and about to be made."""

    def look(self, look: Look) -> None:
        """Every `training.monitor_every` steps, and after the last."""


Callback = Callable[[Look], object]


@dataclass(frozen=True)
class CallingBack(Observer):
    """Hands every look to a function."""

    callback: Callback

    def look(self, look: Look) -> None:
        self.callback(look)
