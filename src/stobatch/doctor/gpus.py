"""GPUs: each multiplies as the CPU does, and all of them can add up together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stobatch.doctor.check import Outcome
from stobatch.doctor.children import GPUS, LIMIT, ProbeError, ask, python
from stobatch.doctor.processes import Ask, Meet, meeting_point, ranks, spoken
from stobatch.results import Health

Count = Callable[[], int]

DRIVER = Path("/dev/nvidiactl")
FEW_FREE = 2**30
LARGEST_ERROR, LARGEST_BFLOAT16_ERROR = 1e-5, 2e-2
"""Of a product of 1024 x 1024 matrices, over its largest number: float32 has 24 bits, bfloat16 has 8."""
NO_GPU = Outcome(Health.ABSENT, "no GPU that torch could use")


def visible() -> int:
    """The GPUs that torch sees."""
    return torch.cuda.device_count()


def cuda(count: Count = visible, asking: Ask = ask, driver: Path = DRIVER) -> Outcome:
    """A process that tries every visible GPU; a driver that hangs takes only that process with it."""
    gpus = count()
    if not gpus:
        if driver.exists():
            said = f"there is a driver for GPUs, and torch {torch.__version__} sees none"
            return Outcome(Health.WARNING, said, "Unset CUDA_VISIBLE_DEVICES, or install a build of torch for CUDA.")
        return NO_GPU
    try:
        found = asking([python(GPUS, LIMIT)])
    except ProbeError as error:
        return Outcome(Health.BROKEN, f"a GPU is visible and could not multiply: {error}")
    return _judged(found, gpus)


def _judged(found: list[dict[str, Any]], gpus: int) -> Outcome:
    if len(found) != gpus:
        return Outcome(Health.BROKEN, f"torch counts {gpus} GPUs here and {len(found)} in a process of its own")
    said = "; ".join(f"cuda:{number} {_spoken(gpu)}" for number, gpu in enumerate(found))
    if not all(map(_right, found)):
        return Outcome(Health.BROKEN, said)
    if any(gpu["free"] < FEW_FREE for gpu in found):
        return Outcome(Health.WARNING, said, "Another program holds the GPU's memory: end it, or choose another GPU.")
    return Outcome(Health.OK, said)


def _right(gpu: dict[str, Any]) -> bool:
    # Written so that a number that is none counts as wrong.
    exact = gpu["error"] < LARGEST_ERROR
    return bool(exact and gpu["bfloat16"] and gpu["bfloat16_error"] < LARGEST_BFLOAT16_ERROR)


def _spoken(gpu: dict[str, Any]) -> str:
    return (
        f"{gpu['name']}: a product differs from the CPU's by {gpu['error']:.1g} ({gpu['bfloat16_error']:.1g} in "
        f"bfloat16), {gpu['gflops']:,.0f} GFLOP/s, {gpu['free'] / 1e9:.0f} of {gpu['total'] / 1e9:.0f} GB free"
    )


def nccl(count: Count = visible, asking: Ask = ask, meet: Meet = meeting_point) -> Outcome:
    """One process for each GPU; with one GPU a group of one, which still loads and starts the library."""
    gpus = count()
    if not gpus:
        return NO_GPU
    if not (dist.is_available() and dist.is_nccl_available()):
        return Outcome(Health.MISSING, "this torch is built without NCCL", "Install a build of torch for CUDA.")
    with meet() as port:
        try:
            answer = asking(ranks("sum", port, gpus, backend="nccl"))
        except ProbeError as error:
            return Outcome(Health.BROKEN, f"{gpus} processes, one for each GPU, could not add up: {error}")
    if gpus == 1:
        return Outcome(Health.OK, f"NCCL {answer['version']}: a group of one process summed 1 and 16 MB on its GPU")
    return Outcome(Health.OK, f"NCCL {answer['version']}: {gpus} processes, one for each GPU, {spoken(answer)}")
