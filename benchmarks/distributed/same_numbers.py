"""The MNIST recipes in one and in two processes: the same parameters, to the last bit, and the same accuracies.

    python benchmarks/distributed/same_numbers.py > results/distributed_mnist.json

The recipes' own batches, networks and attacks, for so many steps as two cores make in a few minutes; a step depends on
the parameters, the seeds and its number alone, so what holds for these holds for the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

RECIPES = {
    "paper.mnist": ["--set", "training.steps=12", "--set", "training.monitor_every=6"],
    "sound.mnist": ["--set", "training.steps=100", "--set", "training.monitor_every=25"],
}


def trained(recipe: str, changes: list[str], processes: int, out: Path) -> dict[str, Any]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [*launcher, "-m", "stobatch", "train", "--recipe", recipe, "--seed", "1", *changes]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    call = [sys.executable, *command, "--set", "machine.threads=1", "--out", str(out)]
    subprocess.run(call, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    digest = hashlib.sha256()
    for name, value in sorted(load_file(out / "model.safetensors").items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    training = json.loads((out / "training.json").read_text())
    guarantee = json.loads((out / "plan.json").read_text())["guarantee"]
    return {
        "processes": processes,
        "seconds": training["seconds_since_last_start"],
        "parameters_sha256": digest.hexdigest(),
        "test_accuracy": [row["test_accuracy"] for row in training["history"]],
        "epsilon": guarantee.get("proved_epsilon", guarantee.get("claimed_epsilon")),
        "status": guarantee["status"],
    }


def main() -> None:
    found = []
    for recipe, changes in RECIPES.items():
        with tempfile.TemporaryDirectory() as folder:
            rows = [trained(recipe, changes, n, Path(folder) / str(n)) for n in (2, 1)]
        same = all(rows[0][key] == rows[1][key] for key in ("parameters_sha256", "test_accuracy", "epsilon", "status"))
        found.append({"recipe": recipe, "changes": changes[1::2], "the_same": same, "runs": rows})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
