"""2,000 steps of PGD on the whole MNIST test set, on a GPU: `python benchmarks/long_attack.py RUN`, a trained run.

Claim: under a minute on an H200, every step for every image, in as much memory as 20 steps.
"""

from __future__ import annotations

import json
import sys
import time

import torch

import stobatch
from stobatch.attacks import Ball, Madry, craft
from stobatch.data import load
from stobatch.types import Radius


def main(run: str, device: str = "cuda") -> None:
    model = stobatch.load(run, device=device)
    test = load(model.config.data).test
    inputs, labels = test.inputs.to(device), test.labels.to(device)
    ball, measured = Ball.around(inputs, Radius(0.2)), {}
    for steps in (5, 20, 2000):  # the first one warms up
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        points = craft(
            model.network, ball, [Madry(steps)], torch.Generator().manual_seed(0), labels=labels, chunk=len(inputs)
        )
        accuracy = float((model.network(points).argmax(1) == labels).float().mean())
        seconds, peak = time.perf_counter() - started, torch.cuda.max_memory_allocated() // 2**20
        measured[steps] = {"seconds": round(seconds, 2), "peak_mib": peak, "accuracy": round(accuracy, 4)}
    name = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"PGD, linf 0.2 over [-1, 1], {len(inputs)} images, {name}, training {model.config.training_hash}")
    for steps, values in measured.items():
        print(
            f"  {steps:5d} steps {values['seconds']:8.2f} s  {values['peak_mib']:6d} MiB  accuracy {values['accuracy']}"
        )
    print(json.dumps({"benchmark": "long attack", "ratios": {}, "steps": measured}))


if __name__ == "__main__":
    main(*sys.argv[1:])
