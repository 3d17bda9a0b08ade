"""The checks that `doctor` makes: each tries one part that a training rests on and says what was measured.

Arithmetic is tried on small cases whose answers are known by other means. Each check takes as an argument what it
tries, so that a broken one can be put in its place.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from scipy.special import ndtr
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.config import MachineConfig
from stobatch.data import cifar10, mnist, tiny_imagenet
from stobatch.doctor.probes import ProbeError, ask_gpus, ask_ranks
from stobatch.dp.accounting import PoissonGaussian, gaussian_epsilon
from stobatch.dp.clipping import Batch, Clipper, clipped_sum_by_example, clipped_sum_in_one_pass
from stobatch.dp.noise import Grid, rounded_normal
from stobatch.errors import RunError
from stobatch.files import write_atomically
from stobatch.models import budget_mb
from stobatch.models.layered import build_layered
from stobatch.results import Health
from stobatch.seeds import Seeds


@dataclass(frozen=True)
class Outcome:
    """What a check measured. Without a remedy of its own it has that of its `Examination`."""

    status: Health
    said: str
    remedy: str = ""


EXTRAS = {
    "flwr": ("flwr", "pip install 'stobatch[flower]', in an environment of its own"),
    "foolbox": ("foolbox", "pip install foolbox"),
    "art": ("art", "pip install adversarial-robustness-toolbox"),
    "torchattacks": ("torchattacks", "pip install --no-deps torchattacks"),
}
"""Optional libraries: the module, and how to get it."""
_MODULES = {"pillow": "PIL"}
"""Modules that are not called like the package that brings them."""
MIB = 2**20
CGROUP = Path("/sys/fs/cgroup")


def requirements() -> dict[str, str]:
    """Return the packages that the installed stobatch depends on and their least versions; none if not installed."""
    try:
        lines = metadata.requires("stobatch") or []
    except metadata.PackageNotFoundError:
        return {}
    plain = (re.fullmatch(r"([\w-]+)>=([\d.]+)", line) for line in lines)
    return {match[1]: match[2] for match in plain if match}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def packages(required: Mapping[str, str] | None = None) -> Outcome:
    """Import every dependency; a version alone would not show a library that does not load."""
    versions, wrong = [], []
    for package, least in (requirements() if required is None else required).items():
        try:
            import_module(_MODULES.get(package, package.replace("-", "_")))
            version = metadata.version(package)
        except Exception as error:
            wrong.append(package)
            versions.append(f"{package} does not load ({type(error).__name__})")
            continue
        old = _version(version) < _version(least)
        versions.append(f"{package} {version}{' is too old' if old else ''}")
        wrong += [package] if old else []
    detail = f"Python {sys.version.split()[0]}; imported {', '.join(versions)}"
    if wrong:
        return Outcome(Health.BROKEN, detail, f"pip install --upgrade --force-reinstall {' '.join(wrong)}")
    return Outcome(Health.OK, detail)


def extra(name: str) -> Outcome:
    """Say whether an optional library is installed."""
    module, command = EXTRAS[name]
    there = find_spec(module) is not None
    return Outcome(Health.OK, "installed") if there else Outcome(Health.MISSING, "not installed", command)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def available_cores() -> int:
    """Return the cores that this process may use: its affinity, and the share that a container was given."""
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
    """Hold the threads of all processes against the cores: threads that wait for a core cost more than they bring."""
    have, use = cores(), threads()
    local = environment.get("LOCAL_WORLD_SIZE", "")
    processes = int(local) if local.isdigit() and int(local) else 1
    omp = environment.get("OMP_NUM_THREADS", "")
    asked = omp if omp.isdigit() else "not a number" if omp else "unset"
    detail = f"cores: {have}; processes on this machine: {processes}; threads of each: {use} (OMP_NUM_THREADS: {asked})"
    if processes * use > have:
        least = max(1, have // processes)
        fewer = f"Set OMP_NUM_THREADS={least} (or --set machine.threads={least})"
        return Outcome(Health.WARNING, detail, f"{fewer}{'' if processes <= have else ', and start fewer processes'}.")
    return Outcome(Health.OK, detail)


def free_memory() -> int:
    """Return the bytes that can still be taken, of the machine and of its container."""
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
    """Hold what is free against twice what the hot loops may take by default."""
    wanted, left = 2 * budget_mb(MachineConfig()) * MIB, free()
    detail = f"{left / 1e9:.1f} GB free; a training takes about {wanted / 1e9:.1f} GB"
    return Outcome(Health.OK if left >= wanted else Health.BROKEN, detail)


Write = Callable[[Path, Callable[[Any], object]], object]
LEAST_FREE, FEW_FREE = 256 * MIB, 2048 * MIB
"""A run of the largest recipe with its checkpoints takes tens of MiB; a sweep takes gigabytes."""


def disk(folder: Path, write: Write = write_atomically, free: Callable[[Path], int] | None = None) -> Outcome:
    """Write, flush to the device, rename and read back, the way every file of a run is written; leave nothing."""
    place, block = folder.expanduser().absolute(), os.urandom(4 * MIB)
    while not place.exists() and place != place.parent:
        place = place.parent
    left = free(place) if free else shutil.disk_usage(place).free
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".doctor-") as scratch:
            file = Path(scratch) / "probe"
            started = time.perf_counter()
            write(file, lambda out: out.write(block))
            seconds = time.perf_counter() - started
            reason = "" if file.read_bytes() == block else "what is read back is not what was written"
    except RunError as error:
        reason = getattr(error.__cause__, "strerror", None) or error.what
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        return Outcome(Health.BROKEN, f"a file cannot be written where runs go: {reason}")
    detail = f"4 MiB written, flushed, renamed and read back in {1e3 * seconds:.0f} ms; {left / 1e9:.1f} GB free"
    if left < LEAST_FREE:
        return Outcome(Health.BROKEN, detail)
    if left < FEW_FREE:
        return Outcome(Health.WARNING, detail, "Free some space before a long training.")
    return Outcome(Health.OK, detail)


def embedded_mnist(folder: Path = mnist.FOLDER) -> Outcome:
    """Unpack every file and compare its digest; a difference is refused there."""
    files = mnist.FILES
    total = sum(files.unpack(folder, name).numel() for name in files.md5)
    return Outcome(Health.OK, f"{len(files.md5)} files, {total / 1e6:.0f} MB unpacked, have the right digests")


def data_folder(root: str | None) -> Outcome:
    """List the folder that STOBATCH_DATA names."""
    if not root:
        return Outcome(Health.ABSENT, "STOBATCH_DATA is not set; data other than MNIST are looked for in ./data")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        return Outcome(Health.BROKEN, "STOBATCH_DATA names no folder")
    entries = {entry.name for entry in folder.iterdir()}
    known = {cifar10.FOLDER: "CIFAR-10", tiny_imagenet.FOLDER: "Tiny ImageNet"}
    sets = ", ".join(name for entry, name in known.items() if entry in entries)
    return Outcome(Health.OK, f"STOBATCH_DATA has {len(entries)} entries; known data sets: {sets or 'none'}")


def torch_works(multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> Outcome:
    """Compare a product of matrices with NumPy's."""
    left, right = torch.rand(2, 192, 192, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    known = left.numpy() @ right.numpy()
    error = float(np.abs(multiply(left.float(), right.float()).double().numpy() - known).max() / np.abs(known).max())
    detail = f"torch {torch.__version__}: a product of matrices differs from NumPy's by {error:.1g}"
    return Outcome(Health.OK if error < 1e-5 else Health.BROKEN, detail)


def _public_case() -> tuple[nn.Module, Batch]:
    """Return a small network and a batch of noise: the same everywhere."""
    generator = torch.Generator().manual_seed(1)
    network = build_layered("conv 8 5/2, relu, linear 32, relu, linear", (1, 28, 28), 10, generator)
    return network, (torch.rand(32, 1, 28, 28, generator=generator) * 2 - 1, torch.arange(32) % 10)


def _losses(network: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(network(batch[0]), batch[1], reduction="none")


def _gradient() -> list[Tensor]:
    network, batch = _public_case()
    return list(torch.autograd.grad(_losses(network, batch).sum(), list(network.parameters())))


def determinism(gradient: Callable[[], list[Tensor]] = _gradient) -> Outcome:
    """Compare gradients bit by bit: a resumed run repeats an undisturbed one only if they are the same every time."""
    digests = {hashlib.sha256(b"".join(g.numpy().tobytes() for g in gradient())).hexdigest() for _ in range(3)}
    threads = f"on {torch.get_num_threads()} threads" if torch.get_num_threads() > 1 else "on one thread"
    if len(digests) > 1:
        return Outcome(Health.BROKEN, f"one gradient computed three times {threads} has {len(digests)} sets of bits")
    return Outcome(Health.OK, f"one gradient computed three times {threads} has the same bits")


def accountant(epsilon: Callable[[PoissonGaussian, float], float] = PoissonGaussian.epsilon) -> Outcome:
    """Compare two known numbers: a closed form where every record takes part, and one of DP-SGD as usual.

    The accountant may round up by a thousandth and never down. The second number is the limit of ever finer grids.
    """
    known = (
        (PoissonGaussian(1.0, 11.8, 10), gaussian_epsilon(11.8, 10, 1e-5)),
        (PoissonGaussian(0.01, 1.0, 10_000), 6.1877),
    )
    excess = [epsilon(steps, 1e-5) / truth - 1 for steps, truth in known]
    detail = f"two known privacy budgets are overcounted by {excess[0]:.1e} and {excess[1]:.1e} of themselves"
    right = all(-1e-9 <= over <= 1e-3 for over in excess)
    return Outcome(Health.OK if right else Health.BROKEN, f"{detail}; 0 to 1e-3 is right")


def clipping(fast: Clipper = clipped_sum_in_one_pass) -> Outcome:
    """Compare the fast sum of clipped gradients with one that forms every example's gradient."""
    network, batch = _public_case()

    def flat(clipper: Clipper) -> Tensor:
        done = clipper(network, _losses, batch, 0.5)
        return torch.cat([done.norms, *(done.gradients[name].flatten() for name in sorted(done.gradients))])

    formed = flat(clipped_sum_by_example)
    error = float((flat(fast) - formed).norm() / formed.norm())
    detail = f"clipped sums of {len(batch[0])} examples differ from formed gradients by {error:.1g}"
    return Outcome(Health.OK if error < 1e-4 else Health.BROKEN, detail)


DRAWS = 100_000


def _draw(name: str) -> NDArray[np.float64]:
    return rounded_normal(Seeds.reproducible(0).stream("doctor", name), DRAWS, 1.0, Grid.for_noise(1.0).step)


def noise(draw: Callable[[str], NDArray[np.float64]] = _draw) -> Outcome:
    """Compare draws with the normal distribution, and streams with each other: one name has one stream of its own.

    The seed is fixed, so a sound generator passes always. For a random seed the limit would be passed by mistake with
    a probability of about 1e-6.
    """
    values = draw("a")
    distance = float(np.abs(ndtr(np.sort(values)) - (np.arange(DRAWS) + 0.5) / DRAWS).max()) * math.sqrt(DRAWS)
    detail = f"{DRAWS:,} draws of noise: Kolmogorov-Smirnov {distance:.2f} (below 2.7)"
    if not np.array_equal(values, draw("a")) or np.array_equal(values, draw("b")):
        return Outcome(Health.BROKEN, f"{detail}; streams do not go with their names")
    return Outcome(Health.OK if distance < 2.7 else Health.BROKEN, detail)


def _sums(answer: dict[str, Any]) -> str:
    speeds = (f"{size} MB at {float(size) / seconds:,.0f} MB/s" for size, seconds in answer["sums"].items())
    return f"summed {', '.join(speeds)}; {1e6 * answer['latency']:,.0f} µs for one number"


def gloo(ask: Callable[[int, str], Any] = ask_ranks) -> Outcome:
    """Start two processes by torchrun that add 1 and 16 MB of float64, and check the sum."""
    if not (dist.is_available() and dist.is_gloo_available()):
        remedy = "Install a build of torch that has it; one process trains without."
        return Outcome(Health.MISSING, "this torch is built without torch.distributed or gloo", remedy)
    try:
        answer = ask(2, "gloo")
    except ProbeError as error:
        return Outcome(Health.BROKEN, f"torchrun could not start two processes that add up: {error}")
    if answer["world"] != 2:
        return Outcome(Health.BROKEN, f"torchrun was asked for two processes and started {answer['world']}")
    return Outcome(Health.OK, f"two processes that torchrun started {_sums(answer)}")


LARGEST_ERROR, LARGEST_BFLOAT16_ERROR = 1e-5, 2e-2
"""Of a product of 1024 x 1024 matrices, over its largest number: float32 has 24 bits, bfloat16 has 8."""
DRIVER = Path("/dev/nvidiactl")
_NO_GPU = Outcome(Health.ABSENT, "no GPU that torch could use")


def visible() -> int:
    """Return the number of GPUs that torch sees."""
    return torch.cuda.device_count()


def cuda(count: Callable[[], int] = visible, ask: Callable[[], Any] = ask_gpus, driver: Path = DRIVER) -> Outcome:
    """Try every visible GPU in a process of its own, which a driver that hangs takes with it."""
    gpus = count()
    if not gpus and driver.exists():
        detail = f"there is a driver for GPUs, and torch {torch.__version__} sees none"
        return Outcome(Health.WARNING, detail, "Unset CUDA_VISIBLE_DEVICES, or install a build of torch for CUDA.")
    if not gpus:
        return _NO_GPU
    try:
        answers = ask()
    except ProbeError as error:
        return Outcome(Health.BROKEN, f"a GPU is visible and could not multiply: {error}")
    if len(answers) != gpus:
        return Outcome(Health.BROKEN, f"torch counts {gpus} GPUs here and {len(answers)} in a process of its own")
    detail = "; ".join(
        f"cuda:{number} {gpu['name']}: a product differs from the CPU's by {gpu['error']:.1g} "
        f"({gpu['bfloat16_error']:.1g} in bfloat16), {gpu['free'] / 1e9:.0f} of {gpu['total'] / 1e9:.0f} GB free"
        for number, gpu in enumerate(answers)
    )
    # Written so that NaN counts as wrong.
    exact = all(gpu["error"] < LARGEST_ERROR for gpu in answers)
    if not (exact and all(gpu["bfloat16"] and gpu["bfloat16_error"] < LARGEST_BFLOAT16_ERROR for gpu in answers)):
        return Outcome(Health.BROKEN, detail)
    full = any(gpu["free"] < 1024 * MIB for gpu in answers)
    remedy = "Another program holds the GPU's memory: end it, or choose another GPU." if full else ""
    return Outcome(Health.WARNING if full else Health.OK, detail, remedy)


def nccl(count: Callable[[], int] = visible, ask: Callable[[int, str], Any] = ask_ranks) -> Outcome:
    """Start one process for each GPU by torchrun; a group of one still loads and starts the library."""
    gpus = count()
    if not gpus:
        return _NO_GPU
    if not (dist.is_available() and dist.is_nccl_available()):
        return Outcome(Health.MISSING, "this torch is built without NCCL", "Install a build of torch for CUDA.")
    try:
        answer = ask(gpus, "nccl")
    except ProbeError as error:
        return Outcome(Health.BROKEN, f"processes, one for each GPU ({gpus}), could not add up: {error}")
    return Outcome(Health.OK, f"processes, one for each GPU ({gpus}), {_sums(answer)}")
