"""Two processes on two cores against one process on one: what sharing a trainer's work costs.

    python benchmarks/distributed/throughput.py

The paper's CIFAR-10 network, a whole step of the published method (crafting, both gradients, the descent), and the
sound method's; the sides alternate, medians over rounds. 1.00 means that two cores do twice the work of one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = Path(__file__).with_name("steps.py")
CASES = {
    "published, paper.cifar10": ("--recipe", "paper.cifar10", "--batch", "192"),
    "sound, sound.cifar10": ("--recipe", "sound.cifar10", "--batch", "4096"),
}


def run(processes: int, threads: int, case: tuple[str, ...], steps: int) -> dict[str, object]:
    """One measurement in fresh processes; one process is plain Python, without torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
        )
        command = [sys.executable, *launcher, str(STEPS), *case, "--steps", str(steps), "--out", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
        return dict(json.loads(out.read_text())[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    given = parser.parse_args()
    print("per-core throughput of two processes against one process with one thread, alternating, medians")
    for name, case in CASES.items():
        seconds: dict[tuple[int, int], list[float]] = {(1, 1): [], (2, 1): [], (1, 2): []}
        ratios, waiting, message, gradients = [], [], 0, 0
        for _ in range(given.rounds):
            for (processes, threads), taken in seconds.items():
                found = run(processes, threads, case, given.steps)
                taken.append(statistics.median(found["seconds"]))  # type: ignore[arg-type]
                if processes == 2:
                    waiting.append(float(found["waiting_s"]))  # type: ignore[arg-type]
                    message, gradients = int(found["message_bytes"]), int(found["gradient_bytes"])  # type: ignore[call-overload]
            ratios.append(seconds[1, 1][-1] / (2 * seconds[2, 1][-1]))
        one, two, threads_only = (statistics.median(found) for found in seconds.values())
        print(
            f"{name}: {one:.2f} s a step alone, {two:.2f} s with two processes, {threads_only:.2f} s with two threads; "
            f"per core {statistics.median(ratios):.2f} (rounds {', '.join(f'{ratio:.2f}' for ratio in ratios)}); "
            f"waiting {statistics.median(waiting):.3f} s; message {message / 1e6:.1f} MB, gradients "
            f"{gradients / 1e6:.1f} MB"
        )


if __name__ == "__main__":
    main()
