"""What the programs of this folder share: a model, the server as a process of its own, and records."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "results" / "serving"
sys.path.insert(0, str(ROOT / "tests" / "unit" / "serving"))


@contextmanager
def server(run: Path, *options: str) -> Iterator[tuple[str, int]]:
    """Serve a run as `digits` in a process of its own; gives its host and its process id, and ends it by SIGTERM."""
    command = [sys.executable, "-m", "stobatch", "serve", f"digits={run}", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield line.split("//")[1].strip().rstrip("/"), process.pid
    finally:
        process.terminate()
        code = process.wait(90)
    assert code == 0, f"the server ended with {code}"


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def machine() -> dict[str, Any]:
    """Return where this was measured, and how busy it was with other work."""
    model = next((line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_lines() -> list[str]:
    return Path("/proc/cpuinfo").read_text().splitlines()


def write_record(name: str, found: Mapping[str, Any]) -> None:
    RECORDS.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", f"benchmarks/serving/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    text = json.dumps({"command": command, "machine": machine(), **found}, indent=2)
    (RECORDS / f"{name}.json").write_text(f"{text}\n")
    print(text)
