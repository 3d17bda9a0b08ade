"""One process of a benchmark: some training steps of a recipe on random images; the leader writes what they took.

    torchrun --standalone --nproc-per-node=2 benchmarks/distributed/steps.py --recipe paper.cifar10 --out two.json

The images are random: what a step costs does not depend on what they show. Nothing but the steps is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

from stobatch.config import RunConfig
from stobatch.data import describe, from_tensors
from stobatch.loading import make_network, make_plan
from stobatch.methods import method_of
from stobatch.seeds import Seeds
from stobatch.training.descent import Descent
from stobatch.training.device import use_device
from stobatch.training.engines.distributed import DistributedEngine, engine_for, placed
from stobatch.training.trainable import working_precision
from stobatch_recipes import recipe


def measured(config: RunConfig, steps: int) -> dict[str, object]:
    """Seconds of each step after a first one that nobody counts, and what the processes waited and sent."""
    with engine_for(config) as engine:
        device = use_device(config.machine)
        info = describe(config.data)
        images = torch.rand(info.num_train + 10, *info.input_shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        labels = torch.arange(len(images)) % info.num_classes
        cut = info.num_train
        data = from_tensors(images[:cut], labels[:cut], images[cut:], labels[cut:], num_classes=info.num_classes)
        seeds = Seeds.reproducible(0)
        network = make_network(config, data.info, seeds, None).to(device)
        trainable = method_of(config).prepare(config, make_plan(config, data.info, None), network, data.train, seeds)
        engine.arrange(len(trainable.tasks(0)))
        descent = Descent(config.training, dict(network.named_parameters()), trainable.optimisers(config))
        taken: list[float] = []
        for step in range(steps + 1):
            if step == 1 and isinstance(engine, DistributedEngine):
                engine.computing_s = engine.waiting_s = 0.0
            started = time.perf_counter()
            with working_precision(config.machine.precision, device):
                released = trainable.release(step, engine).gradients
            descent.step(step, released)
            trainable.after_update()
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
        spread = isinstance(engine, DistributedEngine)
        return {
            "processes": engine.processes,
            "rank": engine.rank,
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "precision": config.machine.precision,
            "seconds": taken[1:],
            "computing_s": engine.computing_s / steps if spread else None,
            "waiting_s": engine.waiting_s / steps if spread else None,
            "message_bytes": engine.message_bytes if spread else 0,
            "gradient_bytes": sum(p.numel() * 4 for p in network.parameters()),
        }


def settings(given: argparse.Namespace, batch: int | None, precision: str) -> RunConfig:
    config = recipe(given.recipe)
    batch = batch or config.method.batch_size
    changed = config.override_all(
        {
            "method.batch_size": batch,
            "data.train_limit": 4 * batch if config.method.name == "sound" else max(2 * batch, 1000),
            "data.augment": False,
            "machine.device": given.device,
            "machine.precision": precision,
            "machine.pieces": given.pieces,
            "machine.exact_sums": not given.rounded,
            "machine.memory_mb": 512 if given.device == "cpu" else 16_000,
            "training.steps": max(given.steps + 1, 20),
        }
    )
    return changed.replace(machine=placed(changed.machine))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="paper.cifar10")
    parser.add_argument("--batch", type=int, nargs="*", default=[None], help="examples of a step; else the recipe's")
    parser.add_argument("--precision", nargs="*", default=["float32"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pieces", type=int, default=4, help="machine.pieces")
    parser.add_argument("--rounded", action="store_true", help="sums rounded on the way, at a quarter of the bytes")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = []
    for precision in given.precision:
        for batch in given.batch:
            found = measured(settings(given, batch, precision), given.steps)
            rows.append({"recipe": given.recipe, "batch": batch, **found})
            if found["rank"] == 0:
                given.out.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
