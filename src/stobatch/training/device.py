"""The device that a process works on."""

from __future__ import annotations

import torch

from stobatch.config import MachineConfig
from stobatch.errors import SettingError
from stobatch.models.arithmetic import use_plain_float32


def use_device(machine: MachineConfig) -> torch.device:
    """The configured device, tried out; also sets threads and has products made in float32."""
    try:
        device = torch.device(machine.device)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n", maxsplit=1)[0].rstrip(".")
        raise SettingError(f"device '{machine.device}' cannot be used: {reason}.", remedy="Use --device cpu.") from None
    use_plain_float32()
    if machine.threads:
        torch.set_num_threads(machine.threads)
    if device.type == "cuda" and device.index is not None:
        # Collectives work on the current GPU, whatever tensors they are given.
        torch.cuda.set_device(device)
    if device.type == "cpu":
        _keep_freed_memory()
    return device


def _keep_freed_memory() -> None:
    """Let the C library keep up to 64 MiB of freed memory instead of handing every large tensor back.

    glibc learns from the largest block that was freed, up to 32 MiB. Fresh pages cost as much as the sums written to
    them: attacks and training are a fifth faster.
    """
    torch.empty(32 * 2**20 - 2**13, dtype=torch.uint8)
