"""How long the training of each recipe takes: results/recipe_times.json, from which the reference is made.

    python benchmarks/recipe_times.py [--data-root DIR] [--only PATTERN]

On a CPU: the processor time of a few steps with one thread, times the recipe's steps; work of other programs does not
count into it. On a GPU: the median over committed records of whole trainings with the recipe's settings and some public
seed. A recipe whose data are not there keeps what the file has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

import stobatch
from stobatch.config import RunConfig
from stobatch.errors import DataError, SettingError
from stobatch_recipes import RECIPES, recipe

ROOT = Path(__file__).parents[1]
FILE = ROOT / "results" / "recipe_times.json"
FEW, MORE = 2, 4
"""Steps of the two trainings whose difference is the cost of a step."""
SEEDS = range(20)


def cpu_seconds_per_step(config: RunConfig, data_root: str | None) -> float:
    """Return the processor time of one step, without set-up and saving."""
    spent = []
    # AdLM's first steps estimate relevances, and are like the others.
    first = getattr(config.method, "relevance_steps", -1) + 1
    for steps in (first + FEW, first + MORE):
        short = config.override_all(
            {"training.steps": steps, "training.monitor_every": 10**6, "machine.threads": 1}
            | ({"machine.data_root": data_root} if data_root else {})
        )
        with tempfile.TemporaryDirectory() as folder:
            before = time.process_time()
            train = stobatch.federate if config.method.title == "federated" else stobatch.train
            train(short, Path(folder) / "run", quiet=True)
            spent.append(time.process_time() - before)
    return max(spent[1] - spent[0], 0.0) / (MORE - FEW)


def recorded_seconds() -> dict[str, list[float]]:
    """Return the seconds of trainings on a GPU by the hash of their settings, from the committed records."""
    found: dict[str, list[float]] = {}
    for file in sorted((ROOT / "results").glob("*.json")):
        records = json.loads(file.read_text(encoding="utf-8"))
        for record in records if isinstance(records, list) else []:
            seconds = record.get("training_seconds", record.get("seconds"))
            name = record.get("training_hash") or record.get("config_hash")
            if isinstance(seconds, int | float) and name and str(record.get("device", "")).startswith("cuda"):
                found.setdefault(name, []).append(float(seconds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-root")
    parser.add_argument("--only", default="*")
    arguments = parser.parse_args()
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"recipes": {}}
    recorded = recorded_seconds()
    cpu_seconds_per_step(recipe("demo"), arguments.data_root)  # imports and first uses, which are nobody's step
    for name in RECIPES:
        config, own = recipe(name), content["recipes"].setdefault(name, {})
        hashes = {config.override("seed", seed).training_hash for seed in SEEDS}
        on_gpu = [seconds for one in hashes for seconds in recorded.get(one, [])]
        if on_gpu:
            own["gpu"] = round(statistics.median(on_gpu) / 60, 3)
        if fnmatchcase(name, arguments.only):
            try:
                own["cpu"] = round(cpu_seconds_per_step(config, arguments.data_root) * config.training.steps / 60, 3)
            except (DataError, SettingError) as error:
                print(f"{name}: {error}")
        print(name, own, flush=True)
        content |= {
            "command": "python benchmarks/recipe_times.py --data-root DIR",
            "cpu": f"minutes of processor time, one thread, torch {torch.__version__}",
            "gpu": "minutes, median over records of one H200",
        }
        FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
