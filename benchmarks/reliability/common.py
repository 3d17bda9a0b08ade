"""What the programs of this folder share: a tiny run, processes to disturb, and records of what was counted."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.disturbed import Ended, Server  # noqa: E402

__all__ = [
    "ROOT",
    "TINY",
    "Ended",
    "Server",
    "added_up",
    "differing",
    "in_lanes",
    "left_over",
    "options",
    "without_times",
    "write_record",
]

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
    "seconds",
    "seconds_since_last_start",
    "training_seconds",
    "peak_memory_mb",
    "peak_memory_of",
    "date",
    "written",
    # Under a key that each training draws for itself.
    "training_commitment",
)
"""What two runs of the same command may differ in."""


def left_over(folder: Path) -> list[str]:
    """Hidden files: all temporaries are, and nothing else is."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(".*"))


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in _MAY_DIFFER}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def differing(one: Path, other: Path) -> list[str]:
    """Files that differ: tables and weights bit for bit, documents and the ledger but for times.

    Left out are checkpoints, which are work under way, and what holds hashes of times or is drawn anew: pages, the
    manifest and the key of the commitment.
    """
    names = {path.relative_to(root) for root in (one, other) for path in root.rglob("*") if path.is_file()}
    different = []
    for name in sorted(names):
        first, second = one / name, other / name
        if "checkpoints" in name.parts:
            continue
        if not (first.exists() and second.exists()):
            different.append(str(name))
        elif name.suffix in (".html", ".svg") or name.stem in _DRAWN_ANEW:
            continue
        elif name.suffix == ".json" and "shards" not in name.parts:
            documents = [without_times(json.loads(path.read_text())) for path in (first, second)]
            if documents[0] != documents[1]:
                different.append(str(name))
        elif first.read_bytes() != second.read_bytes():
            different.append(str(name))
    return different


_DRAWN_ANEW = ("manifest", "commitment_key")


def in_lanes(jobs: int, folder: Path, work: Callable[[Path, Sequence[Any]], Any], items: Sequence[Any]) -> list[Any]:
    """Share items out among as many lanes as there are jobs, each in a folder of its own, and return what each found.

    Lanes are threads: what they wait for are the processes that they start.
    """

    def lane(number: int) -> Any:
        own = folder / f"lane-{number}"
        own.mkdir()
        return work(own, items[number::jobs])

    with ThreadPoolExecutor(jobs) as lanes:
        return list(lanes.map(lane, range(jobs)))


def added_up(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def write_record(name: str, started: float, content: dict[str, Any]) -> None:
    """Keep what was counted, with all that is needed to count it again."""
    import stobatch
    from stobatch.training.loop import processor

    record = {
        "command": f"python benchmarks/reliability/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip(),
        "version": stobatch.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "seconds": round(time.monotonic() - started, 1),
        **content,
    }
    path = ROOT / "results" / "reliability" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
