"""Certify runs of the sound method with more and more effort, beside what attacks leave; a record per run.

`python results/verified_table.py RUN... --limit 1000 --branches 200 > results/sound_mnist_verified.json`: the first
`limit` test images, at each radius the share that is right and proved by plain bounds, with slopes that are climbed on,
and with branches; the share that is right after attacks; and how many proved balls an attack broke.
"""

import argparse
import json
import time
from dataclasses import replace

import torch
from torch import Tensor

from stobatch.attacks import attack
from stobatch.bounds.branching import Effort
from stobatch.bounds.certifier import BoxCertifier
from stobatch.evaluation.tables import test_examples
from stobatch.loading import TrainedModel, load

RADII = (0.05, 0.2, 0.4, 0.6)
ATTACKS = ("apgd_ce", "apgd_t", "square")


def resisting(model: TrainedModel, inputs: Tensor, labels: Tensor, radius: float) -> Tensor:
    """Return where no attack changes the label, which has to be the model's own."""
    left = torch.arange(len(inputs))
    for name in ATTACKS:
        generator = torch.Generator().manual_seed(1)
        found = attack(model.network, inputs[left], labels[left], radius, name=name, steps=40, generator=generator)
        left = left[~found.success]
    return torch.zeros(len(inputs), dtype=torch.bool).index_fill(0, left, True)


def record(path: str, limit: int, branches: int) -> dict[str, object]:
    model = load(path, device="cpu")
    test = test_examples(model, None, limit, quiet=True)
    certifier = BoxCertifier.of(model.network, model.config.machine.memory_mb)
    right = certifier.predict(test.inputs) == test.labels
    efforts = {"plain": Effort(), "slopes": Effort(20), "branches": Effort(20, branches)}
    proved, seconds, known = {}, {}, torch.zeros(len(test), len(RADII), dtype=torch.bool)
    for name, effort in efforts.items():
        started = time.process_time()
        known = replace(certifier, effort=effort).certified_at(test.inputs, RADII)
        proved[name], seconds[name] = known & right[:, None], time.process_time() - started
    stood = torch.zeros_like(known)
    alive = right.nonzero().squeeze(1)
    for column, radius in enumerate(RADII):
        alive = alive[resisting(model, test.inputs[alive], test.labels[alive], radius)]
        stood[alive, column] = True
    return {
        "config_hash": model.config.training_hash,
        "seed": model.config.seed,
        "test_examples": len(test),
        "clean": float(right.double().mean()),
        "slope_steps": 20,
        "branches": branches,
        "certified": {name: shares(found) for name, found in proved.items()},
        "cpu_seconds_per_image": {name: round(spent / len(test), 4) for name, spent in seconds.items()},
        "attacks": list(ATTACKS),
        "attacked": shares(stood),
        "broken_certificates": int((proved["branches"] & ~stood).sum()),
        "device": "cpu",
        "torch": torch.__version__,
        "command": f"python results/verified_table.py RUN --limit {limit} --branches {branches}",
    }


def shares(flags: Tensor) -> dict[str, float]:
    return {f"{radius:g}": float(share) for radius, share in zip(RADII, flags.double().mean(0), strict=True)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--branches", type=int, default=200)
    given = parser.parse_args()
    print(json.dumps([record(run, given.limit, given.branches) for run in given.runs], indent=1))
