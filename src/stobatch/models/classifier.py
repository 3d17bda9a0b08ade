"""What the rest of the library asks of a network: its sizes, its place, and that it maps inputs to class scores."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


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


@torch.no_grad()
def bytes_per_row(network: Classifier) -> int:
    """Return the size of everything that one example's pass produces, layer by layer."""
    sizes: list[int] = []

    def note(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel() * output.element_size())

    hooks = [module.register_forward_hook(note) for module in network.modules() if not list(module.children())]
    try:
        network(torch.zeros(2, *network.input_shape, device=network.device, dtype=network.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(sizes) // 2


def rows_in_memory(network: Classifier, memory_mb: int, *, most: int) -> int:
    """Return rows that fit the budget with their gradients; on a CPU at most `most`, beyond which the cache suffers."""
    rows = max(1, memory_mb * 2**20 // (2 * bytes_per_row(network)))
    return min(rows, most) if network.device.type == "cpu" else rows
