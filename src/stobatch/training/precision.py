"""In which precision networks are passed through while training. By contract it changes no guarantee.

Clipping reads a layer's inputs and output gradients as they are and does its own arithmetic in float32 or better, so
what it bounds is the very contribution that is added, however roughly it was computed (docs/guarantees.md, section 9).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def parameter_precision(name: str) -> torch.dtype:
    """What the parameters are kept in. Mixed precision keeps them in float32."""
    return torch.float64 if name == "float64" else torch.float32


def working_precision(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Passes in bfloat16 where PyTorch thinks it safe, or as the parameters are."""
    return torch.autocast(device.type, torch.bfloat16) if name == "bfloat16" else nullcontext()
