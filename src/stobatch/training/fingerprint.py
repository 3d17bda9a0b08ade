"""What decides the bits of a training step, so that a resumed run knows whether it repeats a step or makes another."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from stobatch import streams
from stobatch.config import MachineConfig
from stobatch.settings import content_hash
from stobatch.training.engines import Engine
from stobatch.training.engines.launch import code_digest


@dataclass(frozen=True)
class Fingerprint:
    """Of the arithmetic of all processes together."""

    digest: str
    repeatable: bool
    """Whether the same fingerprint means the same bits: on CPUs of one kind, with sums that do not depend on order."""


@cache
def processor() -> str:
    """The CPU's model, where the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def fingerprint(machine: MachineConfig, device: torch.device, engine: Engine) -> Fingerprint:
    """Compare this process with the others, and say what their steps depend on beside the state they start from."""
    own = content_hash(
        {
            "code": code_digest(),
            "stream": streams.VERSION,
            "torch": torch.__config__.show(),
            "version": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "system": [platform.system(), platform.machine(), platform.libc_ver()],
            "processor": processor(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "libraries": [torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()],
            "matrix products": torch.get_float32_matmul_precision(),
            "device": device.type,
            "threads": torch.get_num_threads(),
            "settings": [machine.pieces, machine.memory_mb, machine.precision],
        }
    )
    kinds = sorted(set(engine.exchange("arithmetic", own)))
    exact = machine.exact_sums or engine.processes == 1
    return Fingerprint(content_hash(kinds), device.type == "cpu" and len(kinds) == 1 and exact)
