"""Trainers spread over the processes that torchrun started: a mesh of trainers x devices of each trainer.

A step needs one message: each process sums what it computed into one flat buffer, and one all-reduce adds the buffers
of all. The parameters are everywhere; every process makes the same descent.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from math import gcd
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from stobatch.config import MachineConfig, RunConfig
from stobatch.dp.noise import Grid
from stobatch.errors import SettingError
from stobatch.files import PRIVATE, make_folder, open_private
from stobatch.processes import started_by_torchrun
from stobatch.settings import content_hash
from stobatch.training.device import use_device
from stobatch.training.engines.base import (
    Averaged,
    DeviceRank,
    Engine,
    InProcessEngine,
    Parts,
    Stop,
    TrainerTask,
    never,
)
from stobatch.training.engines.group import Group
from stobatch.training.exact_sum import ExactSum


def mesh_shape(processes: int, trainers: int, devices_per_trainer: int | None) -> tuple[int, int]:
    """Return how many trainers work at once, and devices of each, so that every process has equally much to do.

    >>> mesh_shape(4, 1, None), mesh_shape(4, 2, None), mesh_shape(4, 8, 1)
    ((1, 4), (2, 2), (4, 1))
    """
    devices = processes // gcd(processes, trainers) if devices_per_trainer is None else devices_per_trainer
    if processes % devices:
        raise SettingError(
            f"{processes} processes do not divide into trainers of {devices} devices.",
            remedy=f"Start a multiple of {devices} processes, or leave machine.devices_per_trainer unset.",
        )
    rows = processes // devices
    if trainers % rows:
        raise SettingError(
            f"{processes} processes with {devices} for each trainer are {rows} trainers at once, and a step has "
            f"{trainers}.",
            why="Some processes would have nothing to do.",
            remedy="Leave machine.devices_per_trainer unset, or start as many processes as trainers x devices.",
        )
    return rows, devices


@final
class DistributedEngine(Engine):
    """`torch.distributed` under torchrun: gloo between CPUs, NCCL between GPUs.

    **Guarantee.** With `exact_sums`, on CPUs of one kind with equally many threads, the parameters have the bits that
    the in-process engine gives them, for any number of processes. Without it, and on GPUs, they differ by rounding.
    """

    def __init__(self, group: Group, machine: MachineConfig, device: torch.device) -> None:
        self.group, self.machine, self.device = group, machine, device
        self.rank, self.processes = group.rank, group.processes
        self.log: Path | None = None
        self.total: ExactSum | None = None
        self.computing_s = self.waiting_s = 0.0

    def arrange(self, tasks: int) -> DeviceRank:
        """Lay the processes out as a mesh for steps of this many trainers; return which device of a trainer this is."""
        shape = mesh_shape(self.processes, tasks, self.machine.devices_per_trainer)
        if self.device.type == "cpu" and shape[1] > self.machine.pieces:
            raise SettingError(
                f"a trainer's work is cut into {self.machine.pieces} pieces, too few for {shape[1]} processes.",
                why="Pieces do not depend on the number of processes, so that its results do not.",
                remedy=f"Set machine.pieces={shape[1]}, here and wherever the same bits are wanted.",
            )
        with self.group.contact("arranging the mesh"):
            self.mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("trainer", "replica"))
        self.row, replica = self.mesh.get_local_rank("trainer"), self.mesh.get_local_rank("replica")
        self.rows, self.share = shape[0], DeviceRank(replica, shape[1])
        return self.share

    def average(
        self,
        tasks: Sequence[TrainerTask],
        parts: Parts,
        targets: Mapping[str, Tensor],
        stop: Stop = never,
        grid: Grid | None = None,
    ) -> Averaged:
        started = time.perf_counter()
        if self.total is None or self.total.parameters.keys() != targets.keys():
            self.total = ExactSum(targets)
        total = self.total
        total.grid = grid
        total.clear()
        for position, task in enumerate(tasks):
            if position % self.rows == self.row:
                for part in parts(task, self.share):
                    total.add(part)
        total.votes.fill_(stop())
        computed = time.perf_counter()
        self._all_reduce(total)
        self.computing_s += computed - started
        self.waiting_s += time.perf_counter() - computed
        return Averaged(total.mean(len(tasks)), bool(total.votes))

    def _all_reduce(self, total: ExactSum) -> None:
        with self.group.contact("adding up gradients"):
            if self._is_exact(total):
                total.carry()
                dist.all_reduce(total.message)
                return
            # A quarter of the bytes: sums are rounded to float32 once here and once by each addition.
            rounded = torch.cat([total.buffer.sum(0), total.votes]).float()
            dist.all_reduce(rounded)
            total.take(rounded)

    def _is_exact(self, total: ExactSum) -> bool:
        """Return whether the sum keeps all its bits on the way, as what is released under noise must."""
        return self.machine.exact_sums or total.grid is not None

    @property
    def message_bytes(self) -> int:
        """Return the size of what one process hands to the all-reduce of a step."""
        assert self.total is not None
        exact = self._is_exact(self.total)
        return self.total.message.numel() * 8 if exact else (self.total.size + 1) * 4

    def common_root(self, own: int) -> int:
        """Draw a common root by a collective: what goes through the store stays there, for all who reach its port."""
        words = torch.tensor([own >> 32 * word & 0xFFFFFFFF for word in range(4)], device=self.device)
        with self.group.contact("sharing seeds"):
            dist.broadcast(words, 0)
        return sum(word << 32 * index for index, word in enumerate(words.tolist()))

    def exchange(self, topic: str, text: str) -> list[str]:
        return self.group.exchange(topic, text)

    def require_equal(self, topic: str, own: Mapping[str, str], remedies: Mapping[str, str]) -> None:
        self.group.require_equal(topic, own, remedies)

    def open_log(self, run: Path) -> None:
        """Open one log per process, for the owner alone: how long a step takes tells how many examples it had."""
        folder = run / PRIVATE / "logs"
        make_folder(folder, private=True)
        self.log = folder / f"process-{self.rank:05d}.log"
        self.note(f"process {self.rank} of {self.processes} on {os.uname().nodename}, pid {os.getpid()}")

    def note(self, line: str) -> None:
        if self.log is None:
            return
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        spent = f"computing {self.computing_s:.2f} s, waiting {self.waiting_s:.2f} s"
        with os.fdopen(open_private(self.log, os.O_WRONLY | os.O_APPEND), "a") as out:
            out.write(f"{stamp} {line} ({spent})\n")


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
    """Return the settings for this process: `cuda` means a GPU of its own."""
    local = os.environ.get("LOCAL_RANK")
    return machine.replace(device=f"cuda:{local}") if local and machine.device == "cuda" else machine


@contextmanager
def engine_for(config: RunConfig) -> Iterator[Engine]:
    """Yield an engine for this training.

    Several processes have compared themselves before, and end together: the first that fails says why.
    """
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
        group.require_clocks_agree()
        yield engine


@cache
def code_digest() -> str:
    """Return a digest of the library's source files, independent of their version."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
