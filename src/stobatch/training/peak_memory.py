"""How much memory a training took at most, and of what: sizes of different things must not be compared."""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

_MIB = 2**20
_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class PeakMemory:
    """A measurement that has begun.

    On a GPU what PyTorch's tensors took on it; else the resident size of the whole process, libraries and data
    included.
    """

    device: torch.device
    of: str
    """What is measured: "gpu tensors", "process", or where the system cannot forget an older peak "process since its
    start"."""

    @classmethod
    def begin(cls, device: torch.device) -> PeakMemory:
        """Forget what was reached before."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return cls(device, "gpu tensors")
        _give_back()
        try:
            _RESET.write_text("5")
        except OSError:
            return cls(device, "process since its start")
        return cls(device, "process")

    def mebibytes(self) -> float | None:
        """The most since the beginning; None where the system does not tell."""
        if self.of == "gpu tensors":
            return torch.cuda.max_memory_allocated(self.device) / _MIB
        return _resident_peak() if self.of == "process" else _peak_since_start()

    def to_dict(self) -> dict[str, float | str | None]:
        found = self.mebibytes()
        return {"peak_memory_mb": None if found is None else round(found, 1), "peak_memory_of": self.of}


def _give_back() -> None:
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
