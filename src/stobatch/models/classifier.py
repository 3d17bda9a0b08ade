"""What the rest of the library asks of a network: its sizes, its place, and that it maps inputs to class scores."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn


class Classifier(nn.Module, ABC):
    """A function from inputs in [-1, 1] to one score per class, each example for itself."""

    input_shape: tuple[int, ...]

    @property
    @abstractmethod
    def num_classes(self) -> int: ...

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def calibrate(self) -> None:
        """Refresh what depends on the parameters alone; most networks have nothing of the kind."""
