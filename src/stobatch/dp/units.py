"""Losses of units: what is clipped as one vector may be made of several rows, such as the records of a person."""

from __future__ import annotations

from torch import Tensor, nn

from stobatch.dp.clipping import Batch, Losses


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
