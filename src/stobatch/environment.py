"""Where a verb ran: what another machine would have to have in common to get the same bits."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import torch


def environment(device: torch.device | str) -> dict[str, Any]:
    """Versions, platform, CPU capability and device, as a manifest keeps them."""
    kind = torch.device(device)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(kind) if kind.type == "cuda" else str(kind),
        "threads": torch.get_num_threads(),
    }
