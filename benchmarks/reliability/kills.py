"""Kill `stobatch` at random moments (SIGKILL) and continue: the same bits, the same count, nothing left behind.

python benchmarks/reliability/kills.py --train 200 --others 50 --seed 1 --jobs 16
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

from common import (
    TINY,
    Ended,
    Server,
    added_up,
    differing,
    in_lanes,
    left_over,
    options,
    without_times,
    write_record,
)


def train_kills(server: Server, folder: Path, numbers: Sequence[int], seed: int) -> dict[str, int]:
    """Kills of training. What was released is taken down by the process itself, a digest for each step."""
    run, whole, releases = folder / "run", folder / "whole", folder / "releases"
    started = time.monotonic()
    _done(server("train", "--out", run, *TINY, "--json"))
    duration = time.monotonic() - started
    # In the same place each time: a document may say where it lies.
    run.rename(whole)
    counts = dict.fromkeys(("kills", "killed_at_work", "same_bits", "undercounted", "overcounted", "left_over"), 0)
    for number in numbers:
        moment = Random(f"{seed}/train/{number}").uniform(0, duration)
        releases.write_text("")
        killed = server(
            *("train", "--out", run, *TINY, "--json", "--resume"),
            releases=str(releases), signal=signal.SIGKILL, signal_after=moment,
        )  # fmt: skip
        again = server("train", "--out", run, *TINY, "--json", "--resume", releases=str(releases))
        counts["kills"] += 1
        counts["killed_at_work"] += killed.code == -signal.SIGKILL
        counts["left_over"] += bool(left_over(run))
        if not _same("train", number, _failure(again) or differing(whole, run)):
            shutil.rmtree(run, ignore_errors=True)
            continue
        counts["same_bits"] += 1
        # A repetition on the same machine has the same bits, so it is the same release.
        released = len(set(releases.read_text().splitlines()))
        accounted = json.loads((run / "training.json").read_text())["accounted_steps"]
        counts["undercounted"] += accounted < released
        counts["overcounted"] += accounted > released
        shutil.rmtree(run)
    return counts


_SHARD = ["--set", "data.train_limit=2000", "--set", "data.test_limit=60", "--num-shards", "4"]
_COMPARE = ["--epsilon", "3", *options("evaluation.radii", "method.epsilon")]
CALLS: dict[str, Callable[[Path], list[Any]]] = {
    "certify": lambda out: ["certify", out, "--resume"],
    "attack": lambda out: ["attack", out, "--resume"],
    "evaluate": lambda out: ["evaluate", out, "--resume"],
    "audit": lambda out: ["audit", out, "--seed", "1", "--instrument", "certificates", "--resume"],
    "report": lambda out: ["report", out],
    "verify": lambda out: ["verify", out, "--seed", "1"],
    "shard": lambda out: ["shard", "--out", out / "shards", "--recipe", "sound.mnist", *_SHARD],
    "compare": lambda out: ["compare", "--out", out / "compared", "--methods", "sound", "--seeds", "1", *_COMPARE],
}
"""Everything else that takes its time; each starts from a run in which all verbs before it have ended."""


def verb_kills(server: Server, folder: Path, numbers: Sequence[int], seed: int) -> dict[str, dict[str, int]]:
    run = folder / "run"
    _done(server("train", "--out", run, *TINY, "--json"))
    return {verb: _killed(server, folder, run, verb, numbers, seed) for verb in CALLS}


def _killed(server: Server, folder: Path, run: Path, verb: str, numbers: Sequence[int], seed: int) -> dict[str, int]:
    before, whole, words = folder / f"before-{verb}", folder / f"whole-{verb}", [*CALLS[verb](run), "--json"]
    shutil.copytree(run, before)
    started = time.monotonic()
    undisturbed = server(*words, tile=20)
    _done(undisturbed, accepted=(0, 1))
    duration = time.monotonic() - started
    shutil.copytree(run, whole)
    counts = {"kills": 0, "killed_at_work": 0, "same_bits": 0, "left_over": 0}
    for number in numbers:
        shutil.rmtree(run)
        shutil.copytree(before, run)
        moment = Random(f"{seed}/{verb}/{number}").uniform(0, duration)
        killed = server(*words, tile=20, signal=signal.SIGKILL, signal_after=moment)
        # What had ended before it could be killed is not asked for again: shards are not written twice.
        again = killed if killed.code == undisturbed.code else server(*words, tile=20)
        counts["kills"] += 1
        counts["killed_at_work"] += killed.code == -signal.SIGKILL
        wrong = _failure(again, undisturbed.code) or [*differing(whole, run), *_other_words(undisturbed, again)]
        counts["same_bits"] += _same(verb, number, wrong)
        counts["left_over"] += bool(left_over(run))
    return counts


def _done(ended: Ended, accepted: tuple[int, ...] = (0,)) -> None:
    if ended.code not in accepted:
        raise SystemExit(f"a call that was not disturbed ended with {ended.code}: {ended.err}")


def _failure(ended: Ended, wanted: int = 0) -> list[str]:
    return [] if ended.code == wanted else [f"exit code {ended.code}", ended.err]


def _other_words(one: Ended, other: Ended) -> list[str]:
    """Whether two calls print different documents, but for times."""
    first, second = (without_times(json.loads(ended.out)) for ended in (one, other))
    return [] if first == second else ["what it says"]


def _same(verb: str, number: int, different: list[str]) -> bool:
    if different:
        print(f"{verb} {number}: {different}", file=sys.stderr)
    return not different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=int, default=200)
    parser.add_argument("--others", type=int, default=50)
    parser.add_argument("--only-train", action="store_true", help="into a record of its own, kills_train.json")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; moments follow from the seed alone")
    given = parser.parse_args()
    started = time.monotonic()

    def lane(folder: Path, kills: Sequence[tuple[str, int]]) -> dict[str, dict[str, int]]:
        (folder / "train").mkdir()
        (folder / "others").mkdir()
        train, others = ([number for kind, number in kills if kind == wanted] for wanted in ("train", "others"))
        with closing(Server(folder)) as server:
            found = {"train": train_kills(server, folder / "train", train, given.seed)}
            return found | (verb_kills(server, folder / "others", others, given.seed) if others else {})

    kills = [("train", number) for number in range(given.train)]
    kills += [("others", number) for number in range(0 if given.only_train else given.others)]
    with tempfile.TemporaryDirectory(prefix="stobatch-kills-") as name:
        lanes = in_lanes(given.jobs, Path(name), lane, kills)
    found = {verb: added_up(one[verb] for one in lanes if verb in one) for verb in ("train", *CALLS)}
    found = {verb: counts for verb, counts in found.items() if counts}
    wrong = ("left_over", "undercounted", "overcounted")
    bad = any(c["same_bits"] != c["kills"] or any(c.get(key) for key in wrong) for c in found.values())
    write_record("kills_train" if given.only_train else "kills", started, {"seed": given.seed, "verbs": found})
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
