"""What an attack maximises, and what counts as success: leave a label, or reach one.

Losses take n x K logits and n labels, return n values, and are larger the better for the attack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.errors import DataError, SettingError

Loss = Callable[[Tensor, Tensor], Tensor]

_SMALLEST_SPREAD = 1e-12
"""Keeps a ratio and its gradient finite where all logits are equal."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Return max_{k≠y} z_k - z_y, which is positive where the label is not predicted."""
    own = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return others.amax(1) - own[:, 0]


def difference_of_logits_ratio(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the DLR loss (Croce and Hein, 2020): the margin over z_π1 - z_π3, so that scaling logits changes nothing.

    With two classes there is no third logit and the ratio would be constant: return the margin itself.
    """
    if logits.shape[1] < 3:
        return margin(logits, labels)
    top = logits.topk(3, dim=1).values
    return margin(logits, labels) / (top[:, 0] - top[:, 2]).clamp(min=_SMALLEST_SPREAD)


def targeted_dlr(logits: Tensor, labels: Tensor, aims: Tensor) -> Tensor:
    """Return the targeted DLR loss (z_t - z_y)/(z_π1 - (z_π3 + z_π4)/2) for the target classes `aims`."""
    lead = (logits.gather(1, aims[:, None]) - logits.gather(1, labels[:, None]))[:, 0]
    if logits.shape[1] < 3:
        return lead
    top = logits.topk(min(4, logits.shape[1]), dim=1).values
    spread = top[:, 0] - top[:, -2:].mean(1)
    return lead / spread.clamp(min=_SMALLEST_SPREAD)


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "margin": margin,
    "dlr": difference_of_logits_ratio,
}


@dataclass(frozen=True)
class Goal:
    """Leave `labels`, or reach them if `targeted`. Without labels: leave the model's prediction at each step (Eq. 8).

    With an `aim`, a class for each example, the loss points from the label to that class; any other class still counts
    as success.
    """

    labels: Tensor | None = None
    targeted: bool = False
    loss: str = "cross_entropy"
    aim: Tensor | None = None

    def objective(self, logits: Tensor, which: slice | Tensor) -> Tensor:
        """Return what the attack maximises, for the examples `which` that the logits belong to."""
        labels = logits.detach().argmax(1) if self.labels is None else self.labels[which]
        if self.aim is not None:
            return targeted_dlr(logits, labels, self.aim[which])
        value = LOSSES[self.loss](logits, labels)
        return -value if self.targeted else value

    def reached(self, logits: Tensor) -> Tensor:
        """Return which predictions are a success."""
        if self.labels is None:
            raise SettingError("an attack without labels has no success.", remedy="Give the labels it should leave.")
        return (logits.argmax(1) == self.labels) == self.targeted

    def part(self, which: slice | Tensor) -> Self:
        """Return the goal for some of the examples."""
        if self.labels is None:
            return self
        return replace(self, labels=self.labels[which], aim=None if self.aim is None else self.aim[which])

    def check_labels(self, num_examples: int, num_classes: int) -> None:
        """Raise unless there is one label in range for each example."""
        if self.labels is None:
            return
        if self.labels.shape != (num_examples,):
            raise DataError(
                f"{num_examples} inputs come with labels of shape {tuple(self.labels.shape)}.",
                remedy="Give one label for each input.",
            )
        if self.labels.dtype != torch.int64:
            raise DataError(f"labels are {self.labels.dtype}.", remedy="Give them as 64-bit integers: labels.long().")
        if num_examples and not (int(self.labels.min()) >= 0 and int(self.labels.max()) < num_classes):
            raise DataError(
                f"labels run from {int(self.labels.min())} to {int(self.labels.max())}, the model has "
                f"{num_classes} classes.",
                remedy=f"Number the classes 0 to {num_classes - 1}.",
            )
