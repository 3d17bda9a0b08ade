"""A hundred thousand hostile requests: none ends in 500 or in silence, and whole ones between get the right answer.

python benchmarks/serving/fuzz.py RUN --cases 100000 --seed 1
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from serving_process import cpu_seconds, resident_mb, server, write_record  # isort: split

from request_fuzz import Fuzz

import stobatch
from stobatch import data
from stobatch.config import DataConfig

RADIUS = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run on MNIST with certificates by bounds, as of the recipe demo")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4)
    given = parser.parse_args()
    model = stobatch.load(given.run, threads=1)
    pictures = data.load(DataConfig(name="mnist", train_limit=1, test_limit=16)).test.inputs
    rows = model.predict(pictures, radius=RADIUS).rows
    right = [(int(row.label or 0), float(row.radius or 0)) for row in rows]
    with server(given.run) as (host, pid):
        fuzzes = [Fuzz(host, pictures.numpy(), right, RADIUS, given.seed) for _ in range(given.clients)]
        started, used, memory = time.monotonic(), cpu_seconds(pid), [resident_mb(pid)]
        # In quarters: what a leak adds it adds in each of them.
        for quarter in range(4):
            first, last = (given.cases * part // 4 for part in (quarter, quarter + 1))
            threads = [
                threading.Thread(target=fuzz.run, args=(range(first + place, last, given.clients),))
                for place, fuzz in enumerate(fuzzes)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            memory.append(resident_mb(pid))
        seconds, used = time.monotonic() - started, cpu_seconds(pid) - used
    counts = sum((fuzz.counts for fuzz in fuzzes), Counter[str]())
    findings = [finding for fuzz in fuzzes for finding in fuzz.findings]
    found = {
        "cases": given.cases,
        "findings": findings[:50],
        "num_findings": len(findings),
        "counts": dict(sorted(counts.items())),
        "slowest_s": round(max(fuzz.slowest_s for fuzz in fuzzes), 2),
        "seconds": round(seconds),
        "server_cpu_s": round(used),
        "memory_mb": [round(one, 1) for one in memory],
    }
    write_record("fuzz", found)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
