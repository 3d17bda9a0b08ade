"""Which engine a training runs on: this process alone, or all those that torchrun started."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from stobatch.config import MachineConfig, RunConfig
from stobatch.processes import started_by_torchrun
from stobatch.settings import content_hash
from stobatch.training.device import use_device
from stobatch.training.engines.base import Engine
from stobatch.training.engines.distributed import DistributedEngine
from stobatch.training.engines.group import Group
from stobatch.training.engines.in_process import InProcessEngine

SAME = ("precision", "memory_mb", "checkpoint_every", "pieces", "exact_sums", "devices_per_trainer")
"""Of the machine's settings, those that processes must share to do the same steps and to stop at the same ones."""

REMEDIES = {
    "seed": "Give every process the same --seed, or none.",
    "configuration": "Start every process with the same command.",
    "machine settings": f"Give every process the same machine settings ({', '.join(SAME)}).",
    "code": "Install the same version of stobatch on every node.",
    "torch version": "Install the same version of torch on every node.",
    "training data": "Give every node the same data.",
    "first parameters": "Start every process with the same command, and the same network where you hand one over.",
    "step": "Let every process see the same run directory.",
}


def placed(machine: MachineConfig) -> MachineConfig:
    """The settings for this process: `cuda` means a GPU of its own."""
    local = os.environ.get("LOCAL_RANK")
    return machine.replace(device=f"cuda:{local}") if local and machine.device == "cuda" else machine


@contextmanager
def engine_for(config: RunConfig) -> Iterator[Engine]:
    """An engine for this training. Where there are several processes, they have compared themselves, and they end
    together: the first that fails says why."""
    if not started_by_torchrun():
        yield InProcessEngine()
        return
    device = use_device(config.machine)
    group = Group(device, config.machine.timeout_s)
    with group.ending_together():
        engine = DistributedEngine(group, config.machine, device)
        machine = config.machine.to_dict()
        passport = {
            "seed": str(config.seed),
            "configuration": config.training_hash,
            "machine settings": content_hash({name: machine[name] for name in SAME}),
            "code": code_digest(),
            "torch version": f"{torch.__version__} on Python {platform.python_version()}",
        }
        group.require_equal("passport", passport, REMEDIES)
        group.require_one_time()
        yield engine


@cache
def code_digest() -> str:
    """Identifies the library's source files, whatever their version says."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
