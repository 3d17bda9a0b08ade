"""Losses of units: what is clipped as one vector may be made of several rows, such as a person's records or views."""

from __future__ import annotations

from torch import Tensor, nn

from stobatch.dp.clipping import Batch, Losses


def weigh_classes(losses: Losses, weights: Tensor | None) -> Losses:
    """Return each loss times the public weight of its label, the second entry of the batch."""
    if weights is None:
        return losses
    return lambda module, batch: losses(module, batch) * weights[batch[1]]


def in_units(batch: Batch, losses: Losses, per: int) -> tuple[Batch, Losses]:
    """Return the batch with one leading entry per unit of `per` consecutive rows, and the mean loss of each unit.

    The gradient of that mean is one vector per unit, so whatever clips a sum of contributions clips it as one.

    **Guarantee.** A unit's loss is a function of its own rows alone, if each row's loss is one of that row.
    """
    if per == 1:
        return batch, losses

    def mean(module: nn.Module, units: Batch) -> Tensor:
        rows = losses(module, tuple(entry.flatten(0, 1) for entry in units))
        return rows.reshape(-1, per).mean(1)

    return tuple(entry.reshape(-1, per, *entry.shape[1:]) for entry in batch), mean
