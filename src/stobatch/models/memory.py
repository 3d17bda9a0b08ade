"""How many examples may pass at once within a memory budget, measured on the network itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stobatch.models.classifier import Classifier


@torch.no_grad()
def bytes_per_row(network: Classifier) -> int:
    """The size of everything that one example's pass produces, layer by layer."""
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
    """Rows that fit the budget with their gradients; on a CPU at most `most`, beyond which the cache suffers."""
    rows = max(1, memory_mb * 2**20 // (2 * bytes_per_row(network)))
    return min(rows, most) if network.device.type == "cpu" else rows
