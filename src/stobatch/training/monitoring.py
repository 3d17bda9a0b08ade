"""Accuracy on held-out test images: along the way, and of the model that is saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stobatch.config import RunConfig
from stobatch.data import Examples
from stobatch.models import Classifier

BEFORE_AVERAGING = "the parameters of that step, before averaging"
"""Whose accuracy is monitored where the saved model is an average over steps."""
_CHUNK = 1000
"""Images that pass at once."""


@dataclass(frozen=True)
class Monitored:
    """The held-out test images that a training is watched on."""

    inputs: Tensor
    labels: Tensor

    @classmethod
    def of(cls, held_out: Examples, config: RunConfig, network: Classifier) -> Monitored:
        few = held_out.limit(config.training.monitor_examples)
        return cls(few.inputs.to(network.device, network.dtype), few.labels.to(network.device))

    @torch.no_grad()
    def accuracy(self, network: nn.Module) -> float:
        """Return the share of images whose largest score is their label's."""
        parts = zip(torch.split(self.inputs, _CHUNK), torch.split(self.labels, _CHUNK), strict=True)
        return sum(int((network(x).argmax(1) == y).sum()) for x, y in parts) / len(self.labels)

    def saved(self, network: nn.Module) -> dict[str, Any]:
        """Return what `training.json` says of the model that is saved, averaged where the method averages."""
        return {"test_accuracy": self.accuracy(network), "test_examples": len(self.labels)}
