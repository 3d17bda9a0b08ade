"""Kill `stobatch` at random moments (SIGKILL) and continue: the same bits, no release uncounted, nothing left behind.

python benchmarks/reliability/kills.py --train 200 --others 50 --seed 1
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from common import TINY, Ended, Server, left_over, options, same_content, sha256, write_record


def train_kills(server: Server, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kills of training. What was released is taken down by the process itself, a digest for each step."""
    whole = folder / "whole"
    started = time.monotonic()
    _done(server("train", "--out", whole, *TINY, "--json"))
    duration, wanted = time.monotonic() - started, sha256(whole / "model.safetensors")
    counts = {"kills": 0, "killed_at_work": 0, "same_bits": 0, "undercounted": 0, "left_over": 0}
    for number in range(kills):
        moment = Random(f"{seed}/train/{number}").uniform(0, duration)
        run, releases = folder / "run", folder / "releases"
        releases.write_text("")
        killed = server(
            *("train", "--out", run, *TINY, "--json", "--resume"),
            releases=str(releases), signal=signal.SIGKILL, signal_after=moment,
        )  # fmt: skip
        _done(server("train", "--out", run, *TINY, "--json", "--resume", releases=str(releases)))
        counts["kills"] += 1
        counts["killed_at_work"] += killed.code == -signal.SIGKILL
        counts["same_bits"] += sha256(run / "model.safetensors") == wanted
        released = set(releases.read_text().splitlines())
        accounted = json.loads((run / "training.json").read_text())["accounted_steps"]
        counts["undercounted"] += accounted < len(released)
        counts["left_over"] += bool(left_over(run))
        shutil.rmtree(run)
    return counts


def verb_kills(server: Server, folder: Path, kills: int, seed: int) -> dict[str, dict[str, int]]:
    """Kills of everything else that writes; each starts from a run in which all verbs before it have ended."""
    run = folder / "run"
    _done(server("train", "--out", run, *TINY, "--json"))
    calls: dict[str, Callable[[Path], list[Any]]] = {
        "certify": lambda out: ["certify", out, "--resume"],
        "attack": lambda out: ["attack", out, "--resume"],
        "evaluate": lambda out: ["evaluate", out, "--resume"],
        "audit": lambda out: ["audit", out, "--seed", "1", "--instrument", "certificates", "--resume"],
        "report": lambda out: ["report", out],
        "shard": lambda out: ["shard", "--out", out / "shards", "--recipe", "sound.mnist", *_SHARD],
        "compare": lambda out: ["compare", "--out", out / "compared", "--methods", "sound", "--seeds", "1", *_COMPARE],
    }
    return {
        verb: _killed(server, folder, run, verb, call, range(kills), seed)
        for verb, call in calls.items()
    }  # fmt: skip


_SHARD = ["--set", "data.train_limit=2000", "--set", "data.test_limit=60", "--num-shards", "4"]
_COMPARE = ["--epsilon", "3", *options("evaluation.radii", "method.epsilon")]


def _killed(
    server: Server, folder: Path, run: Path, verb: str, call: Callable[[Path], list[Any]], numbers: range, seed: int
) -> dict[str, int]:
    before, whole = folder / f"before-{verb}", folder / f"whole-{verb}"
    shutil.copytree(run, before)
    started = time.monotonic()
    _done(server(*call(run), "--json", tile=20), accepted=(0, 1))
    duration = time.monotonic() - started
    shutil.copytree(run, whole)
    counts = {"kills": 0, "killed_at_work": 0, "same_bits": 0, "left_over": 0}
    for number in numbers:
        # In the same place each time: a document may say where it lies.
        shutil.rmtree(run)
        shutil.copytree(before, run)
        moment = Random(f"{seed}/{verb}/{number}").uniform(0, duration)
        killed = server(*call(run), "--json", tile=20, signal=signal.SIGKILL, signal_after=moment)
        _done(server(*call(run), "--json", tile=20), accepted=(0, 1))
        counts["kills"] += 1
        counts["killed_at_work"] += killed.code == -signal.SIGKILL
        different = same_content(whole, run)
        if different:
            print(f"{verb} {number}: {different}", file=sys.stderr)
        counts["same_bits"] += not different
        counts["left_over"] += bool(left_over(run))
    return counts


def _done(ended: Ended, accepted: tuple[int, ...] = (0,)) -> None:
    if ended.code not in accepted:
        raise SystemExit(f"a call that was not disturbed ended with {ended.code}: {ended.err}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=int, default=200)
    parser.add_argument("--others", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stobatch-kills-") as name:
        folder = Path(name)
        server = Server(folder)
        (folder / "train").mkdir()
        (folder / "others").mkdir()
        found = {"train": train_kills(server, folder / "train", given.train, given.seed)}
        found |= verb_kills(server, folder / "others", given.others, given.seed)
        server.close()
    bad = any(c["same_bits"] != c["kills"] or c["left_over"] or c.get("undercounted") for c in found.values())
    write_record("kills", started, {"seed": given.seed, "verbs": found})
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
