"""Kill one of two processes of a training, as torchrun starts them, at a random step; continue, and compare the bits.

python benchmarks/reliability/ranks.py --kills 30 --seed 1 --jobs 5
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

from common import added_up, in_lanes, left_over, write_record
from support.groups import Server, arguments, differences

from stobatch import load

STEPS = 6


def rank_kills(folder: Path, numbers: Sequence[int], seed: int) -> dict[str, int]:
    """Kills by number, and how the training went on afterwards."""
    keys = ("kills", "one_line", "same_bits", "undercounted", "overcounted", "left_over")
    counts = dict.fromkeys(keys, 0)
    alone, run, released = folder / "alone", folder / "run", folder / "released"
    with closing(Server(folder)) as group:
        assert group(0, "train", "--out", alone, *arguments()).codes == [0]
        for number in numbers:
            rng = Random(f"{seed}/{number}")
            victim, step = rng.randrange(2), rng.randrange(STEPS)
            released.write_text("")
            accidents: dict[int, dict[str, Any]] = {0: {"keep_releases": str(released)}}
            accidents.setdefault(victim, {})["signal_at_step"] = [int(signal.SIGKILL), step]
            ended = group(2, "train", "--out", run, *arguments(machine__timeout_s=4), accidents=accidents)
            processes = rng.choice((1, 2))
            again = group(processes, "train", "--out", run, "--resume", accidents={0: {"keep_releases": str(released)}})
            counts["kills"] += 1
            if ended.codes[victim] != -signal.SIGKILL or set(again.codes) != {0}:
                print(number, ended.codes, ended.err, again.codes, again.err, file=sys.stderr)
                shutil.rmtree(run, ignore_errors=True)
                continue
            counts["one_line"] += len(ended.said) == 1 and "Traceback" not in ended.err
            counts["same_bits"] += not differences(alone, run)
            # A step that was repeated has the same bits here, so it is one release.
            accounted, made = load(run).accounted_steps, len(set(released.read_text().splitlines()))
            counts["undercounted"] += accounted < made
            counts["overcounted"] += accounted > made
            counts["left_over"] += bool(left_over(run))
            shutil.rmtree(run)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, of two processes each")
    given = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stobatch-ranks-") as name:
        lanes = in_lanes(
            given.jobs, Path(name), lambda folder, numbers: rank_kills(folder, numbers, given.seed), range(given.kills)
        )
    counts = added_up(lanes)
    write_record("ranks", started, {"seed": given.seed, "processes": 2, **counts})
    good = counts["same_bits"] == counts["one_line"] == counts["kills"]
    return int(not good or any(counts[key] for key in ("undercounted", "overcounted", "left_over")))


if __name__ == "__main__":
    sys.exit(main())
