"""Checks of noise that raise a false alarm with a probability below `FALSE_ALARM` each."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import torch
from scipy.stats import binom, kstwo, norm
from torch import Tensor

from stobatch.seeds import Stream

FALSE_ALARM = 1e-9


def normal_of(stream: Stream, count: int) -> Tensor:
    """The standard normal numbers of a stream, before they are rounded to a grid: Box and Muller, block by block."""
    drawn = []
    for words in stream.blocks(count + count % 2):
        uniform, turn = np.split(words, 2)
        radius = np.sqrt(-2 * np.log((uniform.astype(float) + 0.5) / 2**64))
        angle = np.pi * turn.view(np.int64).astype(float) / 2**63
        drawn += [radius * np.cos(angle), radius * np.sin(angle)]
    return torch.from_numpy(np.concatenate(drawn)[:count])


def dependent(streams: list[Tensor]) -> bool:
    """Whether the signs of two streams agree more or less often than those of independent ones, over all pairs."""
    pairs = list(combinations([stream > 0 for stream in streams], 2))
    share, count = FALSE_ALARM / len(pairs) / 2, len(streams[0])
    low, high = binom.ppf(share, count, 0.5), binom.isf(share, count, 0.5)
    return any(not low <= int((one == other).sum()) <= high for one, other in pairs)


def not_gaussian(sample: Tensor, stddev: float) -> bool:
    """Kolmogorov-Smirnov, with the exact law of its distance."""
    ordered = norm.cdf(np.sort(sample.numpy()), 0, stddev)
    ranks = np.arange(len(ordered) + 1) / len(ordered)
    distance = max((ranks[1:] - ordered).max(), (ordered - ranks[:-1]).max())
    return bool(distance > kstwo.isf(FALSE_ALARM, len(ordered)))
