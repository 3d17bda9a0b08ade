"""A rank of a process group. Run as a script, by several processes at once; the first prints what it measured.

`sum` adds tensors and times it, `absent` waits for a peer that does not come, `launched` takes everything from the
variables that a launcher sets. It imports torch alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

PATIENCE = timedelta(seconds=30)
MEGABYTES = (1, 16)


def _all_reduce(count: int, device: torch.device, repeats: int) -> float:
    """The median of the seconds that a sum of `count` numbers takes; a wrong sum is an error."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(count, dtype=torch.float64, device=device) % 1000
    seconds = []
    for _ in range(repeats):
        values = pattern + rank
        dist.all_reduce(torch.zeros(1, device=device))
        _wait_for(device)
        started = time.perf_counter()
        dist.all_reduce(values)
        _wait_for(device)
        seconds.append(time.perf_counter() - started)
        if not torch.equal(values, world * pattern + world * (world - 1) / 2):
            raise ArithmeticError(f"rank {rank} got a wrong sum of {count} numbers")
    return statistics.median(seconds)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(device: torch.device) -> dict[str, Any]:
    """Seconds of a sum of one number, and of sums of so many megabytes."""
    sums = {str(size): _all_reduce(size * 1_000_000 // 8, device, 5) for size in MEGABYTES}
    return {"world": dist.get_world_size(), "latency": _all_reduce(1, device, 20), "sums": sums}


def wait_for_absent_peer(store: TCPStore, limit: float) -> dict[str, Any]:
    """Every rank but the first stays away from a sum; the seconds until the first one is told."""
    group = dist.new_group(timeout=timedelta(seconds=limit))
    if dist.get_rank():
        store.wait(["told"], PATIENCE)
        return {}
    started, raised = time.perf_counter(), ""
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        raised = type(error).__name__
    seconds = time.perf_counter() - started
    store.set("told", "yes")
    return {"raised": raised, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("sum", "absent", "launched"))
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--port", type=int)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--absent", type=float, default=2.0)
    parser.add_argument("--limit", type=int, required=True)
    said = parser.parse_args()
    signal.alarm(said.limit)  # whoever started this may be gone by then
    device = torch.device("cuda", said.rank) if said.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if said.what == "launched":
        dist.init_process_group(said.backend, timeout=PATIENCE)
        answer = measure(device)
    else:
        store = TCPStore("127.0.0.1", said.port, said.world, is_master=False, timeout=PATIENCE)
        dist.init_process_group(
            said.backend, store=store, rank=said.rank, world_size=said.world, timeout=PATIENCE,
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
        answer = measure(device) if said.what == "sum" else wait_for_absent_peer(store, said.absent)
    if said.backend == "nccl":
        answer["version"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if dist.get_rank() == 0:
        print(json.dumps(answer), flush=True)
    if said.what == "absent":
        os._exit(0)  # a group with a broken sum has nothing to say goodbye to
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
