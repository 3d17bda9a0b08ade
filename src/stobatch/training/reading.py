"""Training examples on the device that trains."""

from __future__ import annotations

import torch
from torch import Tensor

from stobatch.data import Examples, TrainingExamples


class Reader:
    """Examples by position. Those in memory move to the device once; those on disk are read when they are needed."""

    def __init__(self, examples: TrainingExamples, device: torch.device, dtype: torch.dtype) -> None:
        self.examples, self.device, self.dtype = examples, device, dtype
        if isinstance(examples, Examples):
            self.kept = examples.inputs.to(device, dtype), examples.labels.to(device)

    def fetch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels at these positions."""
        if isinstance(self.examples, Examples):
            there = rows.to(self.device)
            return self.kept[0][there], self.kept[1][there]
        inputs, labels = self.examples.fetch(rows)
        return inputs.to(self.device, self.dtype), labels.to(self.device)
