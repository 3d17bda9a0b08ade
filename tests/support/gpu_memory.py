"""What two steps of a method take on a GPU beside its parameters and its data, counted in bytes.

python tests/support/gpu_memory.py     # all methods and networks, as a table
"""

from __future__ import annotations

import sys
import time

import torch

from stobatch.config import RunConfig
from stobatch.data import DatasetInfo, Examples
from stobatch.figures.catalogue import FIGURES
from stobatch.figures.configurations import recipe_of
from stobatch.loading import make_network
from stobatch.methods import method_of
from stobatch.seeds import Seeds
from stobatch.training.descent import Descent
from stobatch.training.device import use_device
from stobatch.training.engines import InProcessEngine
from stobatch.training.trainable import working_precision

MIB = 2**20
SHAPES = {2: ((1, 28, 28), 10), 3: ((3, 28, 28), 10), 9: ((3, 64, 64), 30)}
CASES = [
    *((3, method, 512, "float32") for method in ("published", "dpsgd", "securesgd", "sound", "pixeldp")),
    *((3, method, 4096, "float32") for method in ("published", "dpsgd", "securesgd", "sound", "pixeldp")),
    *((figure, "published", 4096, "bfloat16") for figure in (3, 9)),
    *((9, method, 4096, "float32") for method in ("securesgd", "sound")),
]
"""Figure, method, MiB, precision."""


def step_bytes(figure: int, method: str, memory_mb: int, precision: str) -> tuple[int, int, float]:
    """Return the most that two steps take beyond what is there before them, the rows that pass at once, and seconds."""
    torch.cuda.empty_cache()
    shape, classes = SHAPES[figure]
    config = recipe_of(FIGURES[figure], method, 5.0)
    machine = config.machine.replace(device="cuda", memory_mb=memory_mb, precision=precision)
    config: RunConfig = config.replace(machine=machine).override("training.steps", 2)
    device, rows = use_device(machine), 2 * getattr(config.method, "batch_size", 256)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(rows, *shape, generator=generator) * 2 - 1
    info = DatasetInfo("made up", shape, classes, rows, 0, tuple(map(str, range(classes))))
    network, made = make_network(config, info, Seeds.reproducible(0), None).to(device), method_of(config)
    train = Examples(images, torch.arange(rows) % classes, classes)
    trainable = made.prepare(config, made.plan(config, info, None), network, train, Seeds.reproducible(1))
    descent = Descent(config.training, dict(network.named_parameters()), trainable.optimisers(config))
    before, most = torch.cuda.memory_allocated(), 0
    for step in range(2):
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        with working_precision(precision, device):
            released = trainable.release(step, InProcessEngine()).gradients
        most = max(most, torch.cuda.max_memory_allocated() - before)
        descent.step(step, released)
        trainable.after_update()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    return most, trainable.chunk, seconds


def main() -> None:
    for case in CASES:
        try:
            most, rows, seconds = step_bytes(*case)
            kept = "kept" if most <= case[2] * MIB else "BROKEN"
            sys.stdout.write(
                f"{kept:7} {most / MIB:9.0f} of {case[2]:5} MiB, {rows:6} rows at once, {seconds:6.2f} s: {case}\n"
            )
        except Exception as error:  # the table says so and goes on
            sys.stdout.write(f"failed  {type(error).__name__} {str(error)[:150]}: {case}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
