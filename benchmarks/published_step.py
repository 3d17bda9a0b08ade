"""A step of a published recipe with this source beside that of another commit, taking turns on one device.

    git worktree add BASE COMMIT
    python benchmarks/published_step.py --device cuda --precision bfloat16 --base BASE/src
    python benchmarks/published_step.py --attack-steps 200 --steps 2     # the training of Figure 8
    python benchmarks/published_step.py --recipe tiny_imagenet --steps 2

Each source works in a process of its own, on the same made-up images and seeds; while one makes its steps the other
waits. A turn is timed from its first step to the end of its last, with the device's queue empty at both ends.
`--profile` lists where the device's time goes in a turn of this source.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from stobatch.config import RunConfig

HERE = Path(__file__).resolve()


SHAPES = {"cifar10": ((3, 28, 28), 10), "tiny_imagenet": ((3, 64, 64), 30)}
"""Of an input, and the number of classes."""


def stepper(config: RunConfig, shape: tuple[int, int, int], rows: int, classes: int = 10) -> Callable[[], None]:
    """Return what makes the next step of a published training on made-up images, as the training loop makes it."""
    from stobatch.data import DatasetInfo, Examples
    from stobatch.models import build
    from stobatch.published.training import Published
    from stobatch.seeds import Seeds
    from stobatch.training.descent import Descent
    from stobatch.training.device import use_device
    from stobatch.training.engines import InProcessEngine
    from stobatch.training.trainable import working_precision

    here = use_device(config.machine)
    generator, seeds = torch.Generator().manual_seed(0), Seeds.reproducible(1)
    images = torch.randint(256, (rows, *shape), generator=generator) / 127.5 - 1
    train = Examples(images, torch.arange(rows) % classes, classes)
    info = DatasetInfo("made up", shape, classes, rows, 0, tuple(map(str, range(classes))))
    network = build(config.model, shape, classes, generator).to(here)
    trainable = Published().prepare(config, Published().plan(config, info, None), network, train, seeds)
    # A base may be older than what reads answers of a GPU later.
    later = import_module("stobatch.later").Later() if find_spec("stobatch.later") else None
    trainable.later = later
    parameters, asks = dict(network.named_parameters()), [later] if later else []
    descent = Descent(config.training, parameters, trainable.optimisers(config), *asks)
    engine, made = InProcessEngine(), 0

    def step() -> None:
        nonlocal made
        before = len(later) if later is not None else 0
        with working_precision(config.machine.precision, here):
            gradients = trainable.release(made, engine).gradients
        descent.step(made, gradients)
        trainable.after_update()
        if later is not None:
            later.look(leave=len(later) - before)
        made += 1

    return step


def of_recipe(options: argparse.Namespace) -> Callable[[], None]:
    """Return what makes the next step of the recipe that the command line names."""
    from stobatch_recipes import published

    recipe, (shape, classes) = getattr(published, options.recipe)(), SHAPES[options.recipe]
    changes = {"batch_size": options.batch_size, "train_attack_steps": options.attack_steps}
    method = recipe.method.replace(**{key: value for key, value in changes.items() if value})
    machine = recipe.machine.replace(device=options.device, precision=options.precision, memory_mb=options.memory_mb)
    return stepper(recipe.replace(method=method, machine=machine), shape, 3 * method.batch_size, classes)


def turn(step: Callable[[], None], steps: int, device: str) -> float:
    """Milliseconds a step."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return 1e3 * (time.perf_counter() - start) / steps


def work(options: argparse.Namespace) -> None:
    """Make a turn for every line of standard input, and answer with its time."""
    step = of_recipe(options)
    turn(step, options.steps, options.device)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(turn(step, options.steps, options.device), flush=True)


def profile(options: argparse.Namespace) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    step = of_recipe(options)
    turn(step, options.steps, options.device)
    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        turn(step, options.steps, options.device)
    on_gpu = options.device.startswith("cuda")
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=70))


def compare(options: argparse.Namespace) -> None:
    sources = {"this source": HERE.parents[1] / "src"} | ({"base": options.base} if options.base else {})
    workers: dict[str, subprocess.Popen[str]] = {}
    for name, source in sources.items():
        command = [sys.executable, str(HERE), *sys.argv[1:], "--work"]
        path = os.pathsep.join([str(source.resolve()), os.environ.get("PYTHONPATH", "")])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        workers[name] = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, text=True, **pipes)
        assert workers[name].stdout.readline() == "ready\n", name
    times: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(options.rounds):
        for name, worker in workers.items():
            worker.stdin.write("go\n")
            worker.stdin.flush()
            times[name].append(float(worker.stdout.readline()))
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu"
    medians = {name: round(statistics.median(values), 1) for name, values in times.items()}
    for name, values in times.items():
        print(f"{name:<12} {medians[name]:8.1f} ms a step, turns of {options.steps}: {[round(v, 1) for v in values]}")
    print(json.dumps({"device": device, "torch": torch.__version__, "precision": options.precision, "ms": medians}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--recipe", choices=SHAPES, default="cifar10")
    parser.add_argument("--batch-size", type=int, help="the recipe's, unless given")
    parser.add_argument("--memory-mb", type=int, default=60_000)
    parser.add_argument("--attack-steps", type=int, help="T_μ; the recipe's, unless given")
    parser.add_argument("--steps", type=int, default=10, help="in a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", type=Path, help="the src folder of the commit to compare with")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    (work if options.work else profile if options.profile else compare)(options)


if __name__ == "__main__":
    main()
