"""`doctor`: whether this machine's back-ends work, before somebody starts a long or a many-process training.

Every check tries the thing itself: a file is written for good, processes add up, a gradient is computed twice. None of
them reads private data, and what they say names no folder and no host.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stobatch.doctor import gpus, machine, numbers, processes, storage
from stobatch.doctor.check import Examination, Outcome, examine
from stobatch.errors import SettingError
from stobatch.progress import progress
from stobatch.results import Health, HealthReport

__all__ = ["Examination", "Health", "Outcome", "doctor", "examinations", "examine"]

_REINSTALL = "Install again with the versions that are tested: pip install -c constraints.txt ."
_LOOPBACK = (
    "Let processes connect on 127.0.0.1 (firewall, container), and set GLOO_SOCKET_IFNAME to an interface that is up."
)
_DRIVER = "Try `nvidia-smi`; restart the driver, or hide the GPU with CUDA_VISIBLE_DEVICES."


def examinations(out: Path) -> list[Examination]:
    """All of them, in the order in which a failure explains later ones. `out` is where runs will be written."""
    data_root = os.environ.get("STOBATCH_DATA")
    return [
        Examination("packages", machine.packages, _REINSTALL),
        Examination("torch", numbers.torch_works, _REINSTALL),
        Examination("cores", machine.cores_and_threads, _REINSTALL),
        Examination("memory", machine.memory, "End other programs, or lower machine.memory_mb."),
        Examination("shared memory", machine.shared_memory, "Mount a tmpfs at /dev/shm.", needed=False),
        Examination("disk", partial(storage.disk, out), "Free some space, or give --out a folder that can be written."),
        Examination("clock", partial(storage.clock, out), "Set the clock of this machine (NTP)."),
        Examination("determinism", numbers.determinism, "Set OMP_NUM_THREADS=1; then install torch again."),
        Examination("accountant", numbers.accountant, _REINSTALL),
        Examination("clipping", numbers.clipping, _REINSTALL),
        Examination("noise", numbers.noise, _REINSTALL),
        Examination("mnist", storage.embedded_mnist, _REINSTALL),
        Examination(
            "data folder", partial(storage.data_folder, data_root), "Point STOBATCH_DATA at a folder you can read."
        ),
        Examination("distributed", processes.available, _REINSTALL, needed=False),
        Examination("gloo", processes.gloo, _LOOPBACK, seconds=60),
        Examination("absent peer", processes.absent_peer, _LOOPBACK, seconds=60),
        Examination("torchrun", processes.torchrun, _LOOPBACK, seconds=60),
        Examination("cuda", gpus.cuda, _DRIVER, seconds=60),
        Examination("nccl", gpus.nccl, "Try NCCL_DEBUG=INFO; use gloo meanwhile.", seconds=60),
        *(
            Examination(f"extra {name}", partial(machine.extra, name), command, needed=False)
            for name, (_, command) in machine.EXTRAS.items()
        ),
    ]


def _chosen(available: Sequence[Examination], only: Sequence[str]) -> list[Examination]:
    names = [one.name for one in available]
    if unknown := [name for name in only if name not in names]:
        raise SettingError(f"there is no check '{unknown[0]}'.", remedy=f"Choose from: {', '.join(names)}.")
    return [one for one in available if not only or one.name in only]


def doctor(out: str | Path = "runs", *, only: Sequence[str] = (), quiet: bool = False) -> HealthReport:
    """Make every check, or only those named, and say whether training here can begin."""
    chosen = _chosen(examinations(Path(out)), only)
    checks = []
    with progress("doctor", len(chosen), quiet=quiet) as advance:
        for examination in chosen:
            advance(0, note=examination.name)
            checks.append(examine(examination))
            advance(1)
    return HealthReport(
        complete=not only,
        ready=not any(check.stops_training for check in checks),
        seconds=round(sum(check.seconds for check in checks), 3),
        checks=tuple(checks),
    )
