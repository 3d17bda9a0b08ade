"""What the programs of this folder share: a tiny run, processes to disturb, and records of what was counted."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.disturbed import Ended, Server  # noqa: E402

__all__ = ["ROOT", "TINY", "Ended", "Server", "left_over", "options", "same_content", "sha256", "write_record"]

_TINY: dict[str, Any] = {
    "data.train_limit": 2000,
    "data.test_limit": 60,
    "method.epsilon": 3.0,
    "method.delta": 1e-4,
    "method.expected_batch_size": 200,
    "model.architecture": "squash 3, conv 4 7/3, relu, linear",
    "training.steps": 12,
    "training.monitor_every": 4,
    "training.monitor_examples": 60,
    "certification.noise_draws": 50,
    "evaluation.radii": [0.05, 0.2],
    "evaluation.attack_steps": 2,
    "evaluation.adaptive_attacks": ["fgsm", "madry"],
    "evaluation.adaptive_steps": 4,
    "evaluation.restarts": 1,
    "evaluation.functions": ["single_pass"],
    "evaluation.num_images": 2,
    "audit.release_trials": 100,
    "machine.checkpoint_every": 3,
    "machine.threads": 1,
}


def options(*leave: str) -> list[str]:
    """The tiny settings as options, without some of them."""
    kept = {key: value for key, value in _TINY.items() if key not in leave}
    return [part for key, value in kept.items() for part in ("--set", f"{key}={json.dumps(value)}")]


TINY = ["--recipe", "sound.mnist", "--seed", "1", *options()]
"""A training of a second with the sound method; the seed is public, so that bits can be compared."""

_MAY_DIFFER = (
    # A step that was repeated may be counted twice; whether it is ever counted too low is looked at by itself.
    "accounted_steps",
    "guarantee",
    "guarantees",
    "seconds",
    "seconds_since_last_start",
    "training_seconds",
    "peak_memory_mb",
    "peak_memory_of",
    "date",
    "written",
)
"""What two runs of the same command may differ in."""


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def left_over(folder: Path) -> list[str]:
    """Hidden files: all temporaries are, and nothing else is."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(".*"))


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(inner) for key, inner in value.items() if key not in _MAY_DIFFER}
    return [_without_times(inner) for inner in value] if isinstance(value, list) else value


def same_content(one: Path, other: Path) -> list[str]:
    """Files that differ: tables and weights bit for bit, documents but for times.

    Left out is the state of work under way (checkpoints and the ledger, which knows of the kill), and what holds times
    or hashes of times: pages and the manifest.
    """
    names = {path.relative_to(root) for root in (one, other) for path in root.rglob("*") if path.is_file()}
    different = []
    for name in sorted(names):
        first, second = one / name, other / name
        if not (first.exists() and second.exists()):
            different.append(str(name))
        elif {"checkpoints", "ledger.json"} & set(name.parts) or name.suffix in (".html", ".svg"):
            continue
        elif name.suffix == ".json" and "shards" not in name.parts:
            documents = [_without_times(json.loads(path.read_text())) for path in (first, second)]
            if name.name != "manifest.json" and documents[0] != documents[1]:
                different.append(str(name))
        elif first.read_bytes() != second.read_bytes():
            different.append(str(name))
    return different


def write_record(name: str, started: float, content: dict[str, Any]) -> None:
    """Keep what was counted, with all that is needed to count it again."""
    import stobatch

    record = {
        "command": f"python benchmarks/reliability/{name}.py {' '.join(sys.argv[1:])}".strip(),
        "version": stobatch.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(time.monotonic() - started, 1),
        **content,
    }
    path = ROOT / "results" / "reliability" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
