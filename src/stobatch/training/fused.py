"""Passes as fused kernels: what a pass of single layers writes to memory after each of them stays on the chip."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Pass = Callable[[Tensor], Tensor]


def fuse(function: Pass, *, backend: str | Callable[..., object] = "inductor") -> Pass:
    """Return the function compiled at its first call; where PyTorch cannot compile it, as it is."""
    # The compiler takes seconds to import.
    from torch._dynamo.exc import TorchDynamoException

    compiled: Pass | None = torch.compile(function, backend=backend)

    def call(values: Tensor) -> Tensor:
        nonlocal compiled
        if compiled is not None:
            try:
                return compiled(values)
            except TorchDynamoException as error:
                reason = " ".join(str(error).split())[:200]
                warnings.warn(f"passes are not fused, which costs time and nothing else: {reason}", stacklevel=2)
                compiled = None
        return function(values)

    return call


@contextmanager
def frozen(network: nn.Module) -> Iterator[None]:
    """Let no parameter want a gradient in the block: a compiled pass computes all that are wanted, asked for or not."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
