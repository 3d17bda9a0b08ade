"""Gradients of a sum over many examples, in chunks that fit the memory budget."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stobatch.training.engines import Gradients


def summed_gradients(
    parameters: dict[str, nn.Parameter], size: int, chunk: int, loss: Callable[[slice], Tensor]
) -> Gradients:
    """The gradient of the sum of `loss(part)` over the parts of `size` examples; no parameter's `.grad` is touched."""
    sums = [torch.zeros_like(parameter) for parameter in parameters.values()]
    for start in range(0, size, chunk):
        part = slice(start, min(start + chunk, size))
        torch._foreach_add_(sums, torch.autograd.grad(loss(part), list(parameters.values())))
    return dict(zip(parameters, sums, strict=True))
