"""What one flat all-reduce costs, by size: one process of a benchmark, under torchrun.

torchrun --standalone --nproc-per-node=2 benchmarks/distributed/all_reduce.py --out two.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

SIZES = (1, 2**10, 2**14, 2**17, 2**20, 2**22, 10_537_217)
"""Numbers of eight bytes; the last is the message of the CIFAR-10 network."""
REPEATS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rows = []
    for size in SIZES:
        message = torch.ones(size, dtype=torch.float64)
        taken = []
        for _ in range(REPEATS):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(message)
            taken.append(time.perf_counter() - started)
        rows.append({"bytes": 8 * size, "seconds": statistics.median(taken)})
    if dist.get_rank() == 0:
        given.out.write_text(json.dumps({"processes": dist.get_world_size(), "all_reduce": rows}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
