"""Ctrl-C and SIGTERM to every verb at chosen moments: 130, one line, within seconds, and the command can be continued.

python benchmarks/reliability/signals.py --jobs 6
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
from typing import Any

from common import TINY, Server, in_lanes, left_over, options, write_record

WITHIN_S = 10.0
PART = "stobatch.evaluation.tables:_Ticks.__init__"
"""Called at the beginning of each part of a table; there are three, of 20 rows."""
STEP = "stobatch.training.trainable:Trainable.release"
ROUND = "stobatch.federated.server:Federation.combine"
_FEDERATED = [
    *("--seed", "1", "--set", "training.steps=5", "--set", "training.monitor_every=2"),
    *("--set", "data.train_limit=2000", "--set", "data.test_limit=60", "--set", "machine.threads=1"),
    *("--set", 'method.parties=["north:1000:200", "east:600:100", "south:400:100:3"]'),
]
_DEMO = [
    *("--recipe", "sound.mnist", "--seed", "1", *options(), "--set", "audit.num_inputs=5"),
    *("--set", "audit.attack_steps=2", "--set", "audit.restarts=1"),
]
MOMENTS: dict[str, tuple[list[str], str, int]] = {
    "train, data are read": (["train", "--out", "RUN", *TINY], "stobatch.training_run:read_data", 1),
    "train, first step": (["train", "--out", "RUN", *TINY], STEP, 1),
    "train, last step": (["train", "--out", "RUN", *TINY], STEP, 12),
    "certify, first part": (["certify", "TRAINED"], PART, 1),
    "certify, last part": (["certify", "TRAINED"], PART, 3),
    "attack, last part": (["attack", "TRAINED"], PART, 3),
    "evaluate, last part of the last table": (["evaluate", "TRAINED"], PART, 6),
    "audit, certificates, last part": (["audit", "TRAINED", "--instrument", "certificates"], PART, 1),
    "audit, many_runs, last part": (
        ["audit", "RUN", "--recipe", "audit.sound_strict", "--trainings", "40", "--set", "audit.models_at_once=16"],
        PART,
        3,
    ),
    "report": (["report", "TRAINED"], "stobatch.reporting.report:write_report", 1),
    "shard": (["shard", "--out", "RUN", "--recipe", "demo"], "stobatch.data.shard_writing:ShardWriter.finish", 1),
    "compare, training": (
        ["compare", "--out", "RUN", "--methods", "sound", "--epsilon", "3",
         *options("evaluation.radii", "method.epsilon")],
        STEP,
        3,
    ),
    "compare, page": (
        ["compare", "--out", "RUN", "--methods", "sound", "--epsilon", "3",
         *options("evaluation.radii", "method.epsilon")],
        "stobatch.reporting.comparison:write_comparison",
        1,
    ),
    "plan, accounting": (["plan", *TINY], "stobatch.dp.accounting:_renyi_epsilon", 1),
    "verify, documents": (["verify", "TRAINED"], "stobatch.verification:_documents", 1),
    "verify, rows again": (["verify", "TRAINED"], "stobatch.verification.sampling:_Again.bounds", 1),
    "doctor, a check": (["doctor", "--out", "RUN", "--only", "noise"], "stobatch.doctor.checks:noise", 1),
    "doctor, its processes at work": (
        ["doctor", "--out", "RUN", "--only", "gloo"],
        "stobatch.doctor.probes:subprocess.Popen.communicate",
        1,
    ),
    "federate, first round": (["federate", "--out", "RUN", *_FEDERATED], ROUND, 1),
    "federate, last round": (["federate", "--out", "RUN", *_FEDERATED], ROUND, 5),
    "demo, training": (["demo", "--out", "RUN", *_DEMO], STEP, 5),
    "demo, verifying": (["demo", "--out", "RUN", *_DEMO], "stobatch.verification:_documents", 2),
}  # fmt: skip
RESUMES = ("train", "certify", "attack", "evaluate", "audit", "federate")


def tried(server: Server, folder: Path, trained: Path, moment: str, number: signal.Signals) -> dict[str, Any]:
    """One signal at one moment; how it ended, after how long, and whether the command ends well afterwards."""
    words, place, call = MOMENTS[moment]
    own = folder / "own"
    run, copy, told = own / "run", own / "trained", own / "told"
    own.mkdir()
    shutil.copytree(trained, copy)
    arguments = [{"RUN": run, "TRAINED": copy}.get(word, word) for word in words]
    ended = server(*arguments, tile=20, signal_in=[place, call, int(number), str(told)])
    seconds = time.monotonic() - float(told.read_text()) if told.exists() else None
    lines = [line for line in ended.err.splitlines() if line.startswith("stobatch: ")]
    again = server(*arguments, *(["--resume"] if words[0] in RESUMES else []), tile=20)
    found = {
        "code": ended.code,
        "seconds": round(seconds, 2) if seconds is not None else None,
        "one_line": len(lines) == 1 and "interrupted" in lines[0] and "Traceback" not in ended.err,
        "left_over": left_over(own),
        "continued": again.code in (0, 1),
    }
    found["obeyed"] = bool(
        found["code"] == 130 and seconds is not None and seconds < WITHIN_S and found["one_line"]
        and not found["left_over"] and found["continued"]
    )  # fmt: skip
    if not found["obeyed"]:
        print(moment, number.name, found, ended.err[-500:], again.err[-500:], file=sys.stderr)
    shutil.rmtree(own)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    given = parser.parse_args()
    started = time.monotonic()

    def lane(folder: Path, moments: Sequence[tuple[str, signal.Signals]]) -> dict[tuple[str, signal.Signals], Any]:
        trained = folder / "trained"
        with closing(Server(folder)) as server:
            for words in (["train", "--out", trained, *TINY], ["certify", trained], ["evaluate", trained]):
                assert server(*words, "--json").code == 0
            return {(moment, number): tried(server, folder, trained, moment, number) for moment, number in moments}

    both = [(moment, number) for moment in MOMENTS for number in (signal.SIGINT, signal.SIGTERM)]
    with tempfile.TemporaryDirectory(prefix="stobatch-signals-") as name:
        lanes = in_lanes(given.jobs, Path(name), lane, both)
    results = {key: one for lane in lanes for key, one in lane.items()}
    found = {f"{moment}, {number.name}": results[moment, number] for moment, number in both}
    obeyed = sum(one["obeyed"] for one in found.values())
    slowest = max(one["seconds"] or 0.0 for one in found.values())
    write_record("signals", started, {"tried": len(found), "obeyed": obeyed, "slowest_s": slowest, "moments": found})
    return int(obeyed < len(found))


if __name__ == "__main__":
    sys.exit(main())
