"""Search settings of the sound method by successive halving, then train the best with seeds that nobody selected on.

    python results/search_sound.py --task fashion_mnist mnist_strict --minutes 40 [--device cuda] [--finals OUT]

Settings are drawn at random from a task's space and trained at a sixteenth of their cost; the best quarter goes on at a
quarter of it, and the best quarter of those at full cost. Scores are certified accuracies on training records that no
trial was trained on, never on test records. Every trial is a line of the log; what is there already is not made again,
so a search that was stopped goes on where it was.

A trial at a share s of its cost has batches of s·B and noise of s·σ: the noise in a mean gradient is that of the whole
training, σC/B, and only the sampling of the batch is coarser (Sander et al., 2023). Such a trial protects nobody; no
trial does, since seeds are public and settings are compared on the data. The guarantee of the finals says so.

`--finals OUT` trains the winner of each task on all training records with seeds 1, 2, 3, certifies and attacks it, and
appends its record to OUT/records.jsonl. `--minutes` are shared equally by tasks, and by the rungs of a task; where they
run out, the best of what was measured goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from collect_sound import record
from prior_table import certified

import stobatch
from stobatch.config import DataConfig, RunConfig
from stobatch.data import Dataset, from_tensors, load
from stobatch.dp.plan import DpSgdPlan
from stobatch.errors import ModelError
from stobatch_recipes import sound

LOG = Path(__file__).parent / "sound_halving.jsonl"
SHARES = (1 / 16, 1 / 4, 1.0)
KEPT = 4
LEAST_NOISE = 0.3
"""A trial's σ; below it a small batch no longer stands for a large one."""
FINAL_SEEDS = (1, 2, 3)
Values = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What is searched from where, and the radii whose certified accuracies are averaged as score.

    `named` are settings to try before any that are drawn.
    """

    start: RunConfig
    radii: tuple[float, ...]
    space: dict[str, tuple[Any, ...]]
    named: tuple[Values, ...] = ({},)

    def draw(self, number: int, seed: str, changes: int | None) -> Values:
        """Return the named settings first, then others at random, the same for the same seed."""
        if number < len(self.named):
            return self.named[number]
        dice = random.Random(f"{seed} {number}")
        keys = list(self.space) if changes is None else dice.sample(list(self.space), changes)
        return {key: dice.choice(self.space[key]) for key in keys}


LOSSES = {
    "method.box_loss": ("box", "sabr", "sabr", "cc_ibp", "mtl_ibp"),
    "method.box_share": (0.3, 0.5, 0.7, 0.9),
    "method.natural_weight": (0.0, 0.3, 0.6),
    "model.first_weights": ("fan_in", "box"),
}
"""Searched everywhere."""
MNIST_LAYERS = tuple(
    f"squash {slope}, conv {maps} {window}, relu, linear{gain}"
    for slope in (3, 4)
    for maps in (32, 64, 128)
    for window in ("5/3", "7/3")
    for gain in ("", " *0.3")
)
FASHION_LAYERS = tuple(
    f"{squash}conv {maps} {window}, relu, linear{gain}"
    for squash in ("squash 1.5, ", "squash 2 -0.4 0.4, ", "squash 4 -0.6 0 0.6, ", "")
    for maps in (32, 64)
    for window in ("5/3", "7/3")
    for gain in ("", " *0.3")
)
NEAR_LAYERS = tuple(
    f"squash {squash}, conv {maps} {window}, relu{pool}, linear"
    for squash in ("4", "2 -0.4 0.4", "3 -0.6 0 0.6")
    for maps in (16, 32)
    for window, pool in (("5/3", ""), ("5/2", ", avgpool 2"))
)
PHOTOGRAPHS = tuple(
    f"{squash}conv {maps} {window}, relu, linear{gain}"
    for squash in ("squash 1.5, ", "")
    for maps in (64, 128)
    for window in ("5/3", "4/2", "7/4")
    for gain in ("", " *0.3")
)


def around(start: RunConfig, radii: tuple[float, ...], layers: tuple[str, ...], **others: tuple[Any, ...]) -> Task:
    """A task around a recipe: its losses, layers, training radius, descent, steps and batches."""
    largest, method, training = max(radii), start.method.to_dict(), start.training
    space = {
        **LOSSES,
        "model.architecture": layers,
        "method.radius": tuple(round(factor * largest, 6) for factor in (0.6, 0.8, 1.0, 1.2)),
        "training.learning_rate": tuple(round(training.learning_rate * factor, 6) for factor in (0.5, 1.0, 2.0)),
        "training.schedule": ("constant", "linear"),
        "method.clip_norm": (0.1, 0.3, 1.0),
        "method.average_decay": (0.9, method["average_decay"]),
        "training.steps": (training.steps, 2 * training.steps),
        "method.batch_size": (method["expected_batch_size"], 2 * method["expected_batch_size"]),
    }
    return Task(start, radii, space | others)


FEW_STEPS = {
    "method.box_loss": ("box", "sabr", "sabr", "cc_ibp", "mtl_ibp"),
    "method.box_share": (0.5, 0.7, 0.9),
    "method.radius": (0.16, 0.2, 0.24),
    "method.clip_norm": (0.3, 1.0),
    "method.average_decay": (0.9, 0.95),
    "model.architecture": tuple(
        f"squash {squash}, conv {maps} {window}, relu, linear{gain}"
        for squash in ("2 -0.4 0.4", "4 -0.5 0.3", "4 -0.6 0 0.6", "4 -0.5")
        for maps in (32, 64)
        for window in ("5/3", "7/3")
        for gain in ("", " *0.3")
    ),
    "training.steps": (146, 200),
    "method.batch_size": (4096,),
    "training.learning_rate": (4.0, 8.0, 12.0),
}
"""What a CPU can afford: about as many examples as `sound.mnist_strict` reads."""
MARGINS = {
    "method.radius": (0.2, 0.35, 0.5, 0.7, 1.0),
    "method.clip_norm": (3.0, 6.0, 12.0, 24.0),
    "method.ramp": (0.0, 0.3),
    "method.momentum": (0.0, 0.9),
    "method.average_decay": (0.9, 0.98),
    "method.batch_size": (4096, 8192, 16384),
    "method.augmentations": (None, ("flip",), ("crop", "flip")),
    "method.augmented_views": (1, 2, 4),
    "training.learning_rate": (0.04, 0.08, 0.16, 0.32, 0.64),
    "training.schedule": ("constant", "linear"),
    "training.steps": (200, 400, 800),
}
"""Searched for a linear layer behind scattering."""
SMALL_RADII = {
    "method.radius": (0.05, 0.06, 0.08, 0.1),
    "method.natural_weight": (0.3, 0.5, 0.7),
    "method.clip_norm": (0.3, 1.0, 3.0),
    "method.average_decay": (0.95, 0.98, 0.99),
    "training.schedule": ("constant", "linear", "cosine"),
    "training.steps": (200, 293, 586),
    "training.learning_rate": (3.0, 6.0, 8.0, 12.0),
}
"""Searched for a radius of 0.05, where accuracy is what is short."""
OF_MNIST = {
    "model.architecture": "squash 4, conv 64 5/3, relu, linear",
    "method.radius": 0.125,
    "method.natural_weight": 0.7,
    "method.clip_norm": 0.3,
    "training.learning_rate": 6.0,
    "training.steps": 586,
}
"""What `sound.mnist` has, which is for larger radii."""
SHARP = {"training.steps": 146, "model.architecture": "squash 8, conv 32 5/2, relu, avgpool 2, linear"}
COARSE = {
    "training.steps": 73,
    "model.architecture": "squash 4, conv 32 5/2, relu, avgpool 3, linear",
    "method.batch_size": 2048,
}
POOLED = {
    "model.architecture": tuple(
        f"squash {squash}, conv {maps} {window}, relu, avgpool {pool}, linear"
        for squash in ("3", "4")
        for maps in (16, 32, 64)
        for window in ("5/2", "7/2")
        for pool in (2, 3)
    ),
    "model.first_weights": ("fan_in", "box"),
    "method.clip_norm": (0.1, 0.3, 1.0),
    "method.average_decay": (0.95, 0.98),
    "training.steps": (73, 146, 293),
    "training.learning_rate": (4.0, 6.0, 12.0),
}
"""Searched for means of closer windows at radii of 0.2 and more."""


def _pooled(radius: float, epsilon: float) -> RunConfig:
    """Where searches around means of windows began: `sound.mnist_near` with another radius and budget."""
    strict = epsilon < 0.5
    changes = {
        "model.architecture": f"squash {4 if strict else 3}, conv 32 5/2, relu, avgpool 2, linear",
        "method.epsilon": epsilon,
        "method.radius": 0.16 if strict else radius,
        "training.steps": 146 if strict else 293,
        "certification.attack_radius": radius,
    }
    return sound.mnist_near().override_all(changes)


TASKS = {
    "mnist": around(sound.mnist(), (0.2,), MNIST_LAYERS),
    "mnist_0.4": around(sound.mnist(radius=0.4), (0.4,), MNIST_LAYERS),
    "mnist_0.6": around(sound.mnist(radius=0.6), (0.6,), MNIST_LAYERS),
    "mnist_strict": around(sound.mnist_strict(), (0.2,), MNIST_LAYERS),
    "fashion_mnist": around(sound.mnist().override("data.name", "fashion_mnist"), (0.05, 0.2), FASHION_LAYERS),
    "fashion_mnist_cpu": Task(
        sound.mnist().override_all({"data.name": "fashion_mnist", "method.batch_size": 4096, "training.steps": 200}),
        (0.05, 0.2),
        around(sound.mnist(), (0.2,), FASHION_LAYERS).space | FEW_STEPS,
    ),
    "mnist_near": Task(
        sound.mnist_near(),
        (0.05,),
        SMALL_RADII | {"model.architecture": (*MNIST_LAYERS, *NEAR_LAYERS)},
        named=(
            {},
            {"model.architecture": "squash 4, conv 64 5/3, relu, linear"},
            OF_MNIST,
            {"method.clip_norm": 0.3},
            {"model.architecture": "squash 4, conv 16 5/2, relu, avgpool 2, linear"},
        ),
    ),
    "mnist_far": Task(
        _pooled(0.6, epsilon=1.0),
        (0.6,),
        POOLED | {"method.radius": (0.4, 0.5, 0.6)},
        named=(
            {},
            SHARP,
            SHARP | {"model.architecture": "squash 8, conv 32 5/2, relu, linear"},
            SHARP | {"method.clip_norm": 0.1},
            SHARP | {"model.first_weights": "box"},
            SHARP | {"method.clip_norm": 0.1, "method.natural_weight": 0.1},
            SHARP | {"method.clip_norm": 0.1, "method.radius": 0.4},
            SHARP | {"method.clip_norm": 0.1, "training.steps": 586},
        ),
    ),
    "mnist_far_steady": Task(
        sound.mnist_wide().override("model.architecture", "squash 3, conv 32 5/2, relu, avgpool 2, linear"),
        (0.6,),
        POOLED
        | {
            "model.architecture": tuple(
                f"squash {squash}, conv {maps} {window}, relu, {pool}linear"
                for squash in ("3", "5", "8")
                for maps, window, pool in (
                    *((32, "5/2", "avgpool 2, "), (64, "5/2", "avgpool 2, "), (32, "7/2", "avgpool 2, ")),
                    *((64, "5/2", ""), (32, "5/2", ""), (64, "7/3", "")),
                )
            ),
            "method.radius": (0.5, 0.55, 0.6, 0.65),
            "method.natural_weight": (0.3, 0.5, 0.7),
            "method.clip_norm": (0.03, 0.1, 0.3),
            "training.steps": (293, 586, 1172),
            "training.learning_rate": (2.0, 4.0, 8.0),
        },
        named=(
            {},
            {"model.first_weights": "box"},
            {"training.learning_rate": 2.0},
            {"training.schedule": "cosine"},
        ),
    ),
    "mnist_far_sharp": Task(
        sound.mnist_wide(),
        (0.6,),
        {},
        named=(
            {},
            {"model.architecture": "squash 8, conv 64 5/2, relu, linear"},
            {"model.architecture": "squash 8 -0.25 0.25, conv 64 5/2, relu, linear"},
            *(
                {"model.architecture": "squash 8, conv 64 5/2, relu, linear", **change}
                for change in (
                    {"method.natural_weight": 0.3},
                    {"training.schedule": "linear"},
                    {"method.radius": 0.55},
                    {"method.average_decay": 0.997},
                    {"training.steps": 586},
                    {"training.learning_rate": 8.0},
                    {"method.natural_weight": 0.7},
                    {"training.learning_rate": 2.0},
                    {"method.clip_norm": 0.03},
                    {"method.radius": 0.65},
                )
            ),
            {"model.architecture": "squash 8, conv 32 5/2, relu, linear"},
            {"model.architecture": "squash 8, conv 128 5/2, relu, linear"},
        ),
    ),
    "mnist_middle_pooled": Task(
        _pooled(0.4, epsilon=1.0),
        (0.4,),
        POOLED | {"method.radius": (0.2, 0.3, 0.4)},
        named=(
            {"method.batch_size": 2048, "method.radius": 0.3},
            {"method.batch_size": 2048, "method.radius": 0.2},
            {
                "method.batch_size": 2048,
                "method.radius": 0.3,
                "model.architecture": "squash 4, conv 32 5/2, relu, avgpool 2, linear",
            },
            {"method.batch_size": 2048, "method.radius": 0.4},
            {"method.batch_size": 2048, "method.radius": 0.4, "method.clip_norm": 0.1},
        ),
    ),
    "mnist_strict_pooled": Task(
        _pooled(0.2, epsilon=0.2),
        (0.2,),
        POOLED | {"method.radius": (0.12, 0.16, 0.2, 0.24)},
        named=(
            {},
            {"training.steps": 73},
            {"training.steps": 40},
            {"training.steps": 73, "method.radius": 0.2},
            {"training.steps": 73, "training.learning_rate": 24.0},
            {"training.steps": 73, "model.architecture": "squash 4, conv 32 5/2, relu, avgpool 3, linear"},
            {"training.steps": 73, "model.architecture": "squash 4, conv 16 5/2, relu, avgpool 2, linear"},
            {"training.steps": 73, "method.clip_norm": 0.3},
            {"training.steps": 73, "method.radius": 0.12},
            COARSE,
            COARSE | {"method.average_decay": 0.95},
            COARSE | {"training.learning_rate": 8.0},
        ),
    ),
    "fashion_mnist_near": Task(
        sound.fashion_mnist_near().override("training.learning_rate", 8.0),
        (0.05,),
        SMALL_RADII | {"model.architecture": (*FASHION_LAYERS, *NEAR_LAYERS)},
        named=(
            {},
            {"model.architecture": "squash 1.5, conv 64 5/3, relu, linear"},
            OF_MNIST,
            {"training.learning_rate": 6.0},
            {"method.clip_norm": 0.3},
        ),
    ),
    "fashion_mnist_wide": Task(
        sound.fashion_mnist_wide().override("method.radius", 0.16),
        (0.2,),
        around(sound.fashion_mnist_wide(), (0.2,), (*FASHION_LAYERS, *NEAR_LAYERS)).space,
        named=({}, {"method.radius": 0.2}, {"training.learning_rate": 6.0}),
    ),
    "cifar10": around(sound.cifar10(), (4 / 255,), PHOTOGRAPHS),
    "cifar10_wide": around(sound.cifar10_wide(), (16 / 255,), PHOTOGRAPHS),
    "cifar10_strict": around(sound.cifar10_strict(), (4 / 255,), PHOTOGRAPHS),
    "cifar10_strict_wide": around(sound.cifar10_strict_wide(), (16 / 255,), PHOTOGRAPHS),
    "cifar10_scattering_strict": Task(sound.cifar10_scattering_strict(), (0.5,), MARGINS),
    "cifar10_scattering": Task(sound.cifar10_scattering(), (32 / 255,), MARGINS),
}


class Records:
    """A task's training records: all but the last ones, which are the test of trials."""

    def __init__(self, name: str, held_out: int) -> None:
        train = load(DataConfig(name=name)).train.in_memory()
        kept = len(train) - held_out
        parts = (train.take(slice(0, kept)), train.take(slice(kept, len(train))))
        tensors = (tensor for part in parts for tensor in (part.inputs, part.labels))
        self.dataset: Dataset = from_tensors(*tensors, num_classes=train.num_classes, name=name)


def weighed(config: RunConfig, settings: Values) -> RunConfig:
    """The recipe with what was drawn; where there is a loss on boxes, its weight and the natural one have the sum 1."""
    changed = config.override_all(settings)
    if not changed.method.to_dict()["certified_weight"]:
        return changed
    natural = changed.method.to_dict()["natural_weight"]
    return changed.override("method.certified_weight", round(1 - natural, 6))


def at_share(config: RunConfig, share: float, dataset: Dataset | None) -> tuple[RunConfig, float]:
    """The same training with smaller batches and noise to match, and which share of the cost it has."""
    plan = stobatch.plan(config, dataset=dataset)
    assert isinstance(plan, DpSgdPlan)
    share = min(1.0, max(share, LEAST_NOISE / plan.noise_multiplier))
    if share == 1:
        return config, share
    size = round(share * plan.expected_batch_size)
    smaller = {"method.batch_size": size, "method.noise_multiplier": share * plan.noise_multiplier}
    return config.override_all(smaller | {"method.epsilon": 100.0}), share


def trial(task: Task, settings: Values, share: float, dataset: Dataset, machine: Values) -> Values:
    """Train and measure once, in a folder that is thrown away."""
    started = time.monotonic()
    quiet = {"training.monitor_every": 10**6, "machine.checkpoint_every": 10**6, "seed": 0}
    config, share = at_share(weighed(task.start, settings).override_all(machine | quiet), share, dataset)
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = stobatch.train(config, Path(folder) / "run", dataset=dataset, quiet=True)
        except ModelError as error:
            return {"score": 0.0, "failure": str(error), "seconds": round(time.monotonic() - started, 1)}
    found = certified(model.config, model.network, dataset.test, dataset, task.radii)
    return {
        "score": sum(found["certified"].values()) / len(task.radii),
        "cost": share,
        **found,
        "device": str(model.network.device),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - started, 1),
    }


@dataclass
class Log:
    """What was measured, on disk as soon as it was."""

    path: Path

    def __post_init__(self) -> None:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.known: dict[str, Values] = {self.key(found): found for found in map(json.loads, lines)}

    @staticmethod
    def key(found: Values) -> str:
        return json.dumps([found["task"], found["share"], found["settings"]], sort_keys=True)

    def add(self, found: Values) -> None:
        self.known[self.key(found)] = found
        with self.path.open("a") as file:
            file.write(json.dumps(found) + "\n")


def search(name: str, options: argparse.Namespace, log: Log, seconds: float) -> list[Values]:
    """Return the trials of the last rung that was reached, the best first."""
    task, machine = TASKS[name], {"machine.device": options.device, "machine.memory_mb": options.memory_mb}
    dataset = Records(task.start.data.name, options.held_out).dataset
    shares = options.shares
    first, of = map(int, options.part.split("/"))
    numbers = range(first, options.settings, of)
    candidates = [task.draw(number, f"{name} {options.draw}", options.changes) for number in numbers]
    rung: list[Values] = []
    for share in shares:
        ends, done = time.monotonic() + seconds / len(shares), []
        for settings in candidates:
            row = {"task": name, "share": share, "settings": settings}
            if Log.key(row) not in log.known:
                if time.monotonic() > ends:
                    continue
                log.add(row | trial(task, settings, share, dataset, machine))
                print(json.dumps(log.known[Log.key(row)]), flush=True)
            done.append(log.known[Log.key(row)])
        if not done:
            break
        rung = sorted(done, key=lambda found: -found["score"])
        candidates = [found["settings"] for found in rung[: -(-len(rung) // KEPT)]]
    return rung


def finals(name: str, settings: Values, options: argparse.Namespace) -> Iterator[Values]:
    """Train the winner on all training records; certify and attack the test set."""
    machine = {"machine.device": options.device, "machine.memory_mb": options.memory_mb}
    config = weighed(TASKS[name].start, settings).override_all(machine)
    attacks = {"evaluation.adaptive_attacks": ["madry", "apgd_ce", "apgd_t"], "evaluation.restarts": 1}
    for seed in FINAL_SEEDS:
        run = Path(options.finals) / f"{name}-{seed}"
        stobatch.train(config.override("seed", seed), run, resume=(run / "config.json").exists(), quiet=True)
        stobatch.certify(run, resume=True, device=options.device)
        stobatch.evaluate(run, overrides=attacks, resume=True, device=options.device)
        yield {"task": name, "settings": settings, **record(run)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", nargs="+", choices=TASKS, required=True)
    parser.add_argument("--settings", type=int, default=64, help="drawn for the first rung")
    parser.add_argument("--part", default="0/1", help="which of several processes this is, each with a log of its own")
    parser.add_argument("--draw", type=int, default=1, help="another number draws others")
    parser.add_argument("--changes", type=int, help="settings of the recipe that a draw changes; all if not given")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the cost, a rung each")
    parser.add_argument("--held-out", type=int, default=5000)
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory-mb", type=int, default=512)
    parser.add_argument("--finals", help="a folder for the runs of winners")
    options = parser.parse_args()
    log, each = Log(options.log), 60 * options.minutes / len(options.task)
    for name in options.task:
        best = search(name, options, log, (0.6 if options.finals else 1.0) * each)[0]
        print(f"{name}: {best['score']:.4f} with {best['settings']}")
        for found in finals(name, best["settings"], options) if options.finals else ():
            with (Path(options.finals) / "records.jsonl").open("a") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
