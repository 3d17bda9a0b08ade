"""What an attack wants: away from a label, or towards one; and the losses that lead there.

All losses take logits and are larger the better for the attack.
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
"""Where all logits are equal, the gradient of a ratio still has to be a number."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the best other class minus the label's own: positive where the label has lost."""
    own = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return others.amax(1) - own[:, 0]


def difference_of_logits_ratio(logits: Tensor, labels: Tensor) -> Tensor:
    """The margin over the spread of the top three logits (Croce and Hein, 2020): scale does not hide its gradient.

    Two classes have no third; there the spread is the margin itself, and the ratio would be constant.
    """
    if logits.shape[1] < 3:
        return margin(logits, labels)
    top = logits.topk(3, dim=1).values
    return margin(logits, labels) / (top[:, 0] - top[:, 2]).clamp(min=_SMALLEST_SPREAD)


def towards(logits: Tensor, labels: Tensor, aims: Tensor) -> Tensor:
    """Return how far the aim is above the label, over the spread of the top four logits; one class at a time."""
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
    """Leave `labels`, or reach them if `targeted`. Without labels: leave what the model says at each step (Eq. 8).

    With an `aim` the labels are left in the direction of one other class; to end in any other still counts.
    """

    labels: Tensor | None = None
    targeted: bool = False
    loss: str = "cross_entropy"
    aim: Tensor | None = None

    def objective(self, logits: Tensor, which: slice | Tensor) -> Tensor:
        """Return what the attack maximises, for these of its examples."""
        labels = logits.detach().argmax(1) if self.labels is None else self.labels[which]
        if self.aim is not None:
            return towards(logits, labels, self.aim[which])
        value = LOSSES[self.loss](logits, labels)
        return -value if self.targeted else value

    def reached(self, logits: Tensor) -> Tensor:
        """Return where the prediction is what the attack wants."""
        if self.labels is None:
            raise SettingError("an attack without labels has no success.", remedy="Give the labels it should leave.")
        return (logits.argmax(1) == self.labels) == self.targeted

    def part(self, which: slice | Tensor) -> Self:
        if self.labels is None:
            return self
        return replace(self, labels=self.labels[which], aim=None if self.aim is None else self.aim[which])

    def require(self, num_examples: int, num_classes: int) -> None:
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
