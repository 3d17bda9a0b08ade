"""Kill one of two processes of a training, as torchrun starts them, at a random step; continue, and compare the bits.

python benchmarks/reliability/ranks.py --kills 30 --seed 1
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from common import left_over, write_record
from support.groups import Server, arguments, differences

STEPS = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    started = time.monotonic()
    from stobatch import load

    counts = {"kills": 0, "one_line": 0, "same_bits": 0, "undercounted": 0, "left_over": 0}
    with tempfile.TemporaryDirectory(prefix="stobatch-ranks-") as name:
        folder = Path(name)
        group, alone, run, released = Server(folder), folder / "alone", folder / "run", folder / "released"
        assert group(0, "train", "--out", alone, *arguments()).codes == [0]
        for number in range(given.kills):
            rng = Random(f"{given.seed}/{number}")
            victim, step = rng.randrange(2), rng.randrange(STEPS)
            released.write_text("")
            accidents: dict[int, dict[str, Any]] = {0: {"count_steps": str(released)}}
            accidents.setdefault(victim, {})["signal_at_step"] = [int(signal.SIGKILL), step]
            ended = group(2, "train", "--out", run, *arguments(machine__timeout_s=4), accidents=accidents)
            assert ended.codes[victim] == -signal.SIGKILL, ended.err
            processes = rng.choice((1, 2))
            again = group(processes, "train", "--out", run, "--resume", accidents={0: {"count_steps": str(released)}})
            assert set(again.codes) == {0}, again.err
            counts["kills"] += 1
            counts["one_line"] += len(ended.said) == 1 and "Traceback" not in ended.err
            counts["same_bits"] += not differences(alone, run)
            # A step that was repeated has the same bits here, so it is one release.
            counts["undercounted"] += load(run).accounted_steps < len(set(released.read_text().split()))
            counts["left_over"] += bool(left_over(run))
            shutil.rmtree(run)
        group.close()
    write_record("ranks", started, {"seed": given.seed, "processes": 2, **counts})
    good = counts["same_bits"] == counts["one_line"] == counts["kills"]
    return int(not good or counts["undercounted"] > 0 or counts["left_over"] > 0)


if __name__ == "__main__":
    sys.exit(main())
