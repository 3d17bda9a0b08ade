"""Processor seconds of verbs that compute little, each in a process of its own: what a user waits for imports.

    python benchmarks/starts.py [--rounds 5]

Aim: two seconds for `stobatch plan` and `stobatch report`. The run that is reported is a small one that is trained,
certified and attacked first. Medians over rounds. Compiled files are kept, whatever the shell says, as where the
package is installed: compiling the sources anew takes a tenth of a report.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def processor_seconds(*arguments: str) -> float:
    """Run a command to its end, and return what it and its children computed for."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "stobatch", *arguments], check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        small = (
            "--set",
            "data.train_limit=500",
            "--set",
            "data.test_limit=50",
            "--set",
            "training.steps=3",
            "--set",
            "method.batch_size=50",
        )
        processor_seconds("train", "--recipe", "demo", "--seed", "1", "--out", run, *small)
        processor_seconds("certify", run)
        processor_seconds("evaluate", run)
        verbs = {
            "help": ("--help",),
            "plan": ("plan", "--recipe", "sound.mnist"),
            "report": ("report", run),
        }
        seconds = {
            name: statistics.median(processor_seconds(*arguments) for _ in range(options.rounds))
            for name, arguments in verbs.items()
        }
    for name, value in seconds.items():
        print(f"  {name:<8} {value:6.2f} s of a core")
    rounded = {f"{name}_processor_seconds": round(value, 2) for name, value in seconds.items()}
    print(json.dumps({"benchmark": "starts", "rounds": options.rounds, "ratios": rounded}))


if __name__ == "__main__":
    main()
