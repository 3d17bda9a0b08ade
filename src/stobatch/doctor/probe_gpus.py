"""Every GPU that torch sees multiplies matrices, which are compared with the CPU's. Run as a script."""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any

import torch

SIZE = 1024


def measure(device: torch.device) -> dict[str, Any]:
    """Largest differences from the CPU's product, as shares of its largest number; speed, memory, name."""
    left, right = torch.rand(2, SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.5
    known = left @ right
    there = left.float().to(device), right.float().to(device)
    product = there[0] @ there[1]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        rough = there[0] @ there[1]
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(10):
        there[0] @ there[1]
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": torch.cuda.get_device_name(device),
        "error": float((product.double().cpu() - known).abs().max() / known.abs().max()),
        "bfloat16": rough.dtype is torch.bfloat16,
        "bfloat16_error": float((rough.double().cpu() - known).abs().max() / known.abs().max()),
        "gflops": 10 * 2 * SIZE**3 / seconds / 1e9,
        "free": free,
        "total": total,
    }


def main() -> None:
    signal.alarm(int(sys.argv[1]))  # whoever started this may be gone by then
    torch.backends.cuda.matmul.allow_tf32 = False
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    print(json.dumps([measure(device) for device in devices]), flush=True)


if __name__ == "__main__":
    main()
