"""What may crash, hang or need several processes is tried in processes of its own: `ask` starts them and hears them.

They run this very file as a script, which needs torch alone and so starts in half the time of the whole package.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

LIMIT = 45
"""Seconds after which a probe ends itself: a cold start from a slow disk takes a good part of it."""
_LAUNCHER = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|TORCH_NCCL_.*"
)
_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", re.M)
_SIZE = 1024
_MEGABYTES = (1, 16)


class ProbeError(Exception):
    """A probe crashed, hung or said nothing that could be read."""


def ask_gpus() -> Any:
    """Return what `measure_gpu` says of every GPU."""
    return ask([__file__, "gpus", str(LIMIT)])


def ask_ranks(world: int, backend: str) -> Any:
    """Return what `measure_sums` says where torchrun starts `processes` processes, as for a training."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    return ask([*launch, __file__, backend, str(LIMIT)])


def ask(arguments: Sequence[str], *, seconds: float = LIMIT + 5) -> Any:
    """Run this interpreter and return the JSON document that it prints as its last line. Nothing is left running."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", env=environment(),
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise ProbeError(f"no answer within {seconds:g} s") from None
        finally:
            _end(process)
    if process.returncode:
        raise ProbeError(_reason(process.returncode, err))
    try:
        return json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        raise ProbeError("the probe ended without an answer") from None


def environment() -> dict[str, str]:
    """Return this process's variables without those of a launcher, and one thread for each probe."""
    kept = {name: value for name, value in os.environ.items() if not _LAUNCHER.fullmatch(name)}
    # Other files of this folder must not hide modules of the same name.
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _end(process: subprocess.Popen[str]) -> None:
    """End a process. Ask first: a launcher takes its own children along, which live in sessions of their own."""
    for stop in (process.terminate, process.kill):
        if process.poll() is None:
            stop()
            with suppress(subprocess.TimeoutExpired):
                process.wait(3)


def _reason(code: int, errors: str) -> str:
    """Return one line: the exception if there was one, else the last line printed, else how the process ended."""
    if named := _ERROR.findall(errors):
        return str(named[0])
    if code == -signal.SIGALRM:
        return "a probe hung and ended itself"
    ended = f"a probe was killed by {signal.Signals(-code).name}" if code < 0 else f"a probe ended with code {code}"
    last = [line for line in errors.splitlines() if line.strip()][-1:]
    return ": ".join([ended, *last])


def measure_gpu(index: int) -> dict[str, Any]:
    """Multiply matrices; return the largest differences from the CPU's product, as shares of its largest number."""
    import torch

    device = torch.device("cuda", index)
    torch.backends.cuda.matmul.allow_tf32 = False
    left, right = torch.rand(2, _SIZE, _SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.5
    known = left @ right
    there = left.float().to(device), right.float().to(device)
    product = there[0] @ there[1]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        rough = there[0] @ there[1]
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": torch.cuda.get_device_name(device),
        "error": float((product.double().cpu() - known).abs().max() / known.abs().max()),
        "bfloat16": rough.dtype is torch.bfloat16,
        "bfloat16_error": float((rough.double().cpu() - known).abs().max() / known.abs().max()),
        "free": free,
        "total": total,
    }


def measure_sums(backend: str) -> dict[str, Any]:
    """Add up with the other processes of the launcher; return the seconds of a sum of one number and of megabytes."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    rank, world = dist.get_rank(), dist.get_world_size()

    def all_reduce(count: int, repeats: int) -> float:
        pattern = torch.arange(count, dtype=torch.float64, device=device) % 1000
        seconds = []
        for _ in range(repeats):
            values = pattern + rank
            dist.all_reduce(torch.zeros(1, device=device))  # so that all begin together
            started = time.perf_counter()
            dist.all_reduce(values)
            values[0].item()  # waits for a GPU
            seconds.append(time.perf_counter() - started)
            if not torch.equal(values, world * pattern + world * (world - 1) / 2):
                raise ArithmeticError(f"rank {rank} got a wrong sum of {count} numbers")
        return statistics.median(seconds)

    sums = {str(size): all_reduce(size * 1_000_000 // 8, 5) for size in _MEGABYTES}
    answer = {"world": world, "latency": all_reduce(1, 20), "sums": sums}
    dist.destroy_process_group()
    return answer if rank == 0 else {}


def main() -> None:
    what, limit = sys.argv[1:]
    signal.alarm(int(limit))  # the process that started this may be gone by then
    if what == "gpus":
        import torch

        print(json.dumps([measure_gpu(index) for index in range(torch.cuda.device_count())]), flush=True)
    elif answer := measure_sums(what):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
