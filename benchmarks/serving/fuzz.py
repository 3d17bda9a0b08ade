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

from serving_process import cpu_seconds, resident_mb, server, write_record
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
        Fuzz(host, pictures.numpy(), right, RADIUS, given.seed).run(range(2000))
        started, memory, used = time.monotonic(), resident_mb(pid), cpu_seconds(pid)
        threads = [
            threading.Thread(target=fuzz.run, args=(range(place, given.cases, given.clients),))
            for place, fuzz in enumerate(fuzzes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds, grown = time.monotonic() - started, resident_mb(pid) - memory
        used = cpu_seconds(pid) - used
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
        "memory_mb": {"after_2000": round(memory), "grown": round(grown, 1)},
    }
    write_record("fuzz", found)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
