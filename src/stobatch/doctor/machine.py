"""What the machine is made of: packages, cores, memory, and what is not there but could be."""

from __future__ import annotations

import math
import mmap
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from stobatch.config import MachineConfig
from stobatch.doctor.check import Outcome
from stobatch.results import Health

PACKAGES = {
    "torch": "torch",
    "numpy": "numpy",
    "scipy": "scipy",
    "mpmath": "mpmath",
    "dp-accounting": "dp_accounting",
    "safetensors": "safetensors",
    "pyarrow": "pyarrow",
    "pillow": "PIL",
    "typer": "typer",
    "rich": "rich",
    "matplotlib": "matplotlib",
}
"""What stobatch depends on, and the module that each package brings."""

EXTRAS = {
    "flwr": ("flwr", "pip install flwr"),
    "foolbox": ("foolbox", "pip install foolbox"),
    "art": ("art", "pip install adversarial-robustness-toolbox"),
    "torchattacks": ("torchattacks", "pip install --no-deps torchattacks"),
}
"""Optional libraries: the module, and how to get it."""

MIB = 2**20
SHARED, FEW_SHARED = 32 * MIB, 128 * MIB
"""What is really taken of shared memory, and what a container has to offer for NCCL to live well."""
CGROUP = Path("/sys/fs/cgroup")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _required() -> dict[str, tuple[int, ...]]:
    """The least versions that the installed stobatch asks for; none where it runs uninstalled."""
    try:
        lines = metadata.requires("stobatch") or []
    except metadata.PackageNotFoundError:
        return {}
    plain = (re.fullmatch(r"([\w-]+)>=([\d.]+)", line) for line in lines)
    return {match[1]: _version(match[2]) for match in plain if match}


def packages(
    modules: Mapping[str, str] | None = None, required: Mapping[str, tuple[int, ...]] | None = None
) -> Outcome:
    """Import every dependency; a version alone would not show a library that does not load."""
    least = _required() if required is None else required
    versions, wrong = [], []
    for package, module in (modules or PACKAGES).items():
        try:
            import_module(module)
            version = metadata.version(package)
        except Exception as error:
            wrong.append(package)
            versions.append(f"{package} does not load ({type(error).__name__})")
            continue
        old = _version(version) < least.get(package, ())
        versions.append(f"{package} {version}{' is too old' if old else ''}")
        wrong += [package] if old else []
    said = f"Python {sys.version.split()[0]}; imported {', '.join(versions)}"
    if wrong:
        return Outcome(Health.BROKEN, said, f"pip install --upgrade --force-reinstall {' '.join(wrong)}")
    return Outcome(Health.OK, said)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def available_cores() -> int:
    """The cores that this process may use: its affinity, and the share that a container was given."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _text(CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, math.ceil(int(quota[0]) / int(quota[1]))))
    return cores


def cores_and_threads(
    environment: Mapping[str, str] = os.environ,
    cores: Callable[[], int] = available_cores,
    threads: Callable[[], int] = torch.get_num_threads,
) -> Outcome:
    """Threads of all processes against cores: threads that wait for a core cost far more than they bring."""
    have, use = cores(), threads()
    local = environment.get("LOCAL_WORLD_SIZE", "")
    processes = int(local) if local.isdigit() and int(local) else 1
    omp = environment.get("OMP_NUM_THREADS", "")
    square = torch.ones(512, 512)
    torch.matmul(square, square)
    started = time.perf_counter()
    for _ in range(8):
        torch.matmul(square, square)
    speed = 8 * 2 * 512**3 / (time.perf_counter() - started) / 1e9
    asked = omp if omp.isdigit() else "not a number" if omp else "unset"
    said = (
        f"cores: {have}; processes on this machine: {processes}; threads of each: {use} (OMP_NUM_THREADS: {asked}); "
        f"{speed:.0f} GFLOP/s"
    )
    if processes * use > have:
        least = max(1, have // processes)
        fewer = f"Set OMP_NUM_THREADS={least} (or --set machine.threads={least})"
        return Outcome(Health.WARNING, said, f"{fewer}{'' if processes <= have else ', and start fewer processes'}.")
    return Outcome(Health.OK, said)


def free_memory() -> int:
    """Bytes that can still be taken, of the machine and of its container."""
    numbers = dict(re.findall(r"^(\w+):\s+(\d+) kB", _text(Path("/proc/meminfo")), re.M))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = int(numbers["MemAvailable"]) * 1024 if "MemAvailable" in numbers else total
    limit, used = _text(CGROUP / "memory.max").strip(), _text(CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        # Cached files count as used and are given up on demand.
        cached = re.search(r"^inactive_file (\d+)", _text(CGROUP / "memory.stat"), re.M)
        free = min(free, int(limit) - int(used) + (int(cached[1]) if cached else 0))
    return free


def memory(free: Callable[[], int] = free_memory) -> Outcome:
    """Take and touch what the hot loops may take by default."""
    wanted, left = MachineConfig().memory_mb * MIB, free()
    said = f"{left / 1e9:.1f} GB free"
    if left < 2 * wanted:
        return Outcome(Health.BROKEN, f"{said}; a training takes about {2 * wanted / 1e9:.1f} GB")
    taken = mmap.mmap(-1, wanted)
    started = time.perf_counter()
    for start in range(0, wanted, mmap.PAGESIZE):
        taken[start] = 1
    seconds = time.perf_counter() - started
    taken.close()
    return Outcome(Health.OK, f"{said}; {wanted // MIB} MiB taken and touched in {1e3 * seconds:.0f} ms")


def shared_memory(folder: Path = Path("/dev/shm")) -> Outcome:
    """Take a piece for good, map it and write to it: containers often have almost none."""
    if not folder.is_dir():
        return Outcome(Health.ABSENT, "this system has no /dev/shm")
    state = os.statvfs(folder)
    left = state.f_bavail * state.f_frsize
    remedy = "Start the container with --shm-size=1g (or --ipc=host)."
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, SHARED)  # raises; writing to a map without room would kill
            with mmap.mmap(file.fileno(), SHARED) as mapped:
                mapped[SHARED - 1] = 1
    except OSError as error:
        return Outcome(Health.BROKEN, f"32 MiB of /dev/shm cannot be had: {error.strerror}", remedy)
    said = f"32 MiB of /dev/shm taken and mapped; {left / 1e9:.2f} GB free"
    return Outcome(Health.OK, said) if left >= FEW_SHARED else Outcome(Health.WARNING, said, remedy)


def extra(name: str) -> Outcome:
    """Whether an optional library is installed."""
    module, command = EXTRAS[name]
    if find_spec(module) is None:
        return Outcome(Health.MISSING, "not installed", command)
    return Outcome(Health.OK, "installed")
