"""The device that a process works on: how it is set up, what it took of memory, and what a manifest says of it."""

from __future__ import annotations

import ctypes
import gc
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stobatch.bounds.arithmetic import use_plain_float32
from stobatch.config import MachineConfig
from stobatch.errors import SettingError

_MIB = 2**20
_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def use_device(machine: MachineConfig) -> torch.device:
    """Return the configured device, tried out; also sets threads and has products made in float32."""
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
        # Collectives work on the current GPU, wherever their tensors are.
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


def environment(device: torch.device | str) -> dict[str, Any]:
    """Return versions, platform, CPU capability and device, as a manifest keeps them."""
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


@dataclass(frozen=True)
class PeakMemory:
    """A measurement of peak memory that has begun.

    On a GPU what PyTorch's tensors took on it; else the resident size of the whole process, libraries and data
    included.
    """

    device: torch.device
    of: str
    """What is measured: "gpu tensors", "process", or where the system cannot forget an older peak "process since its
    start"."""

    @classmethod
    def begin(cls, device: torch.device) -> PeakMemory:
        """Begin a measurement: forget what was reached before."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return cls(device, "gpu tensors")
        _trim_memory()
        try:
            _RESET.write_text("5")
        except OSError:
            return cls(device, "process since its start")
        return cls(device, "process")

    def mebibytes(self) -> float | None:
        """Return the most since the beginning; None where the system does not tell."""
        if self.of == "gpu tensors":
            return torch.cuda.max_memory_allocated(self.device) / _MIB
        return _resident_peak() if self.of == "process" else _peak_since_start()

    def to_dict(self) -> dict[str, float | str | None]:
        mebibytes = self.mebibytes()
        return {"peak_memory_mb": None if mebibytes is None else round(mebibytes, 1), "peak_memory_of": self.of}


def _trim_memory() -> None:
    """Hand memory that is free to the system: what was done before in this process must not count."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _resident_peak() -> float:
    lines = _STATUS.read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kibibytes) / 1024


def _peak_since_start() -> float | None:
    try:
        import resource
    except ImportError:  # no such counts on this system
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / _MIB if sys.platform == "darwin" else most / 1024
