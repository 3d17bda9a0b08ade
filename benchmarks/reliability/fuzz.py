"""A million hostile inputs: no traceback, no hang, no wrong answer. The cases are those of `tests/system/fuzz`.

python benchmarks/reliability/fuzz.py --cases 1000000 --seed 1 --jobs 16
"""

from __future__ import annotations

import argparse
import sys
import time

from common import ROOT, write_record

sys.path.insert(0, str(ROOT))

from tests.system.fuzz.campaign import LIMIT_S, campaign


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes; the cases are the same for any number")
    given = parser.parse_args()
    started = time.monotonic()
    outcomes = campaign(given.cases, given.seed, jobs=given.jobs)
    found = {name: outcome.to_dict() for name, outcome in outcomes.items()}
    keys = ("cases", "accepted", "refused", "tracebacks", "wrong", "hung")
    totals = {key: sum(outcome[key] for outcome in found.values()) for key in keys}
    slowest = max(outcome["slowest_s"] for outcome in found.values())
    limits = {"seed": given.seed, "limit_s": LIMIT_S, "slowest_s": slowest}
    write_record("fuzz", started, {**limits, **totals, "surfaces": found})
    return int(totals["tracebacks"] + totals["wrong"] + totals["hung"] > 0)


if __name__ == "__main__":
    sys.exit(main())
