"""Proportions with confidence intervals: no accuracy is reported without how sure it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stobatch.certification.confidence import clopper_pearson

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Proportion:
    """So many of so many, with a two-sided 95% Clopper-Pearson interval over the choice of test examples.

    >>> str(Proportion(945, 1000))
    '94.5% [92.9, 95.8]'
    """

    count: int
    total: int

    @property
    def value(self) -> float:
        return self.count / self.total

    @property
    def interval(self) -> tuple[float, float]:
        lower, upper = clopper_pearson(np.array([float(self.count)]), self.total, (1 - CONFIDENCE) / 2)
        return float(lower[0]), float(upper[0])

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"

    def to_dict(self) -> dict[str, Any]:
        low, high = self.interval
        return {"value": self.value, "count": self.count, "total": self.total, "low": low, "high": high}


def proportion(flags: Any) -> Proportion:
    """The share of true entries."""
    values = np.asarray(flags, dtype=bool)
    return Proportion(int(values.sum()), len(values))
