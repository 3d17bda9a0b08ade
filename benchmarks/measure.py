"""Measure everything and write it down: `python benchmarks/measure.py [NAME ...]`, or `make benchmarks`.

Every benchmark runs in a process of its own, one after the other; what it prints is kept in
benchmarks/results/DATE-NAME.txt under a line that says where and how loaded the machine was. docs/results/speed.md and
docs/results/scaling.md are then made from the newest record of each number (`docs/make_results.py`). `--small` takes
few rounds and small sizes: minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = ("torch", "adversarial-robustness-toolbox", "foolbox", "torchattacks", "opacus", "auto_LiRPA")
BENCHMARKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "attacks": ("attacks.py", ("--rounds", "5", "--batch", "714")),
    "crafting": ("crafting.py", ()),
    "step": ("plain_step.py", ("--rounds", "3", "--batch", "834")),
    "verified-inference": ("verified_inference.py", ()),
    "bounds": ("bounds.py", ("--rounds", "3")),
    "clipping": ("dp/clipping.py", ("--rounds", "3")),
    "paper-networks": ("dp/paper_networks.py", ()),
    "noise": ("dp/noise.py", ()),
    "memory": ("memory.py", ()),
    "auditing": ("auditing.py", ()),
    "starts": ("starts.py", ("--rounds", "3")),
    "throughput": ("distributed/throughput.py", ()),
    "distributed-model": ("distributed/model.py", ()),
    "scaling": ("scaling.py", ("--small",)),
}
"""The script of each record, and what makes it small."""


def about_machine() -> str:
    found = []
    for name in PEERS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), load {load} at the start; {', '.join(found)}"


def measure(name: str, *, small: bool) -> bool:
    """Run one benchmark and keep what it prints, if it ends well."""
    script, fewer = BENCHMARKS[name]
    command = [sys.executable, str(HERE / script), *(fewer if small else ())]
    shown = " ".join(["python", f"benchmarks/{script}", *command[2:]])
    head = f"{shown}\n{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {about_machine()}\n"
    found = subprocess.run(command, cwd=HERE, text=True, capture_output=True, check=False)
    if found.returncode:
        print(f"{name}: failed\n{found.stderr[-2000:]}", file=sys.stderr)
        return False
    (HERE / "results" / f"{datetime.now(UTC):%Y-%m-%d}-{name}.txt").write_text(head + found.stdout)
    print(f"{name}: kept", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all of them if none")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {min(unknown)}")
    done = [measure(name, small=options.small) for name in options.names or BENCHMARKS]
    subprocess.run([sys.executable, str(HERE.parent / "docs" / "make_results.py")], check=True)
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()
