"""Random views of an example: crops, mirror images, noise. However many there are, they are one contribution.

Views are drawn anew in every step, from the example alone and from coins of its own, and the mean of their losses is
what is descended on. So they cost no privacy, where augmented copies stored as records of their own would.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.sound.losses import NormalSampler
from stobatch.types import PAPER_RANGE

KINDS = ("crop", "flip", "noise")


@dataclass(frozen=True)
class RandomViews:
    """What is done to each view, in the order of `KINDS`; nothing where no kind is named."""

    kinds: tuple[str, ...]
    num: int
    most_shift: int
    stddev: float

    def draw(self, inputs: Tensor, labels: Tensor, coins: NormalSampler) -> tuple[Tensor, Tensor]:
        """Return the views of each example, one after the other, with its label.

        `coins` are asked for one row per view, so that a view is the same however a sample is cut into pieces.
        """
        if not self.kinds:
            return inputs, labels
        views, count = inputs.repeat_interleave(self.num, 0), len(inputs) * self.num
        if "crop" in self.kinds and self.most_shift:
            views = _shifted(views, self.most_shift, coins((count, 2)).to(views.device))
        if "flip" in self.kinds:
            mirrored = coins((count,)).to(views.device) < 0
            views = torch.where(mirrored.view(-1, 1, 1, 1), views.flip(3), views)
        if "noise" in self.kinds:
            noise = coins(tuple(views.shape)).to(views)
            views = (views + self.stddev * noise).clamp(PAPER_RANGE.low, PAPER_RANGE.high)
        return views, labels.repeat_interleave(self.num)


def _shifted(images: Tensor, most: int, normal: Tensor) -> Tensor:
    """Move each image by up to `most` pixels down and to the right, or back; the edge is repeated behind it."""
    # Φ makes a normal number a uniform one, and each of the 2 most + 1 moves is equally likely.
    uniform = torch.special.ndtr(normal.double())
    moves = (uniform * (2 * most + 1)).long().clamp(max=2 * most)
    count, channels, height, width = images.shape
    wide = F.pad(images, (most, most, most, most), mode="replicate")
    rows = moves[:, 0].view(-1, 1, 1, 1) + torch.arange(height, device=images.device).view(1, 1, -1, 1)
    columns = moves[:, 1].view(-1, 1, 1, 1) + torch.arange(width, device=images.device).view(1, 1, 1, -1)
    each = torch.arange(count, device=images.device).view(-1, 1, 1, 1)
    return wide[each, torch.arange(channels, device=images.device).view(1, -1, 1, 1), rows, columns]
