"""Search settings of smoothed networks on training records that no trial was trained on.

    python results/search_votes.py --task cifar10 --minutes 2 [--part 0/3] [--log FILE] [--set 'machine.device="cuda"']
    python results/search_votes.py --task cifar10 --best [--log FILE]

A task's starts are tried first; then, again and again, one setting of the best trial so far is changed at random.
Several processes may share a log, a `--part` each: what one finds the others go on from. A trial is trained at a share
of its cost as in `search_sound.py` (smaller batches, noise to match) on all training records but the last 5,000, of
which 2,000 are voted on with a few draws. What it says of a radius is an estimate: the share of inputs whose label has
so many of the draws that the radius would follow if the share were the probability. `--best` prints the winner as
options of `stobatch train`.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import norm
from search_sound import Records, at_share
from torch import Tensor

from stobatch.config import RunConfig
from stobatch.errors import StobatchError
from stobatch.loading import make_network, make_plan
from stobatch.methods import method_of
from stobatch.seeds import Seeds
from stobatch.training.descent import Descent
from stobatch.training.device import use_device
from stobatch.training.engines import InProcessEngine
from stobatch.training.trainable import Trainable, working_precision
from stobatch_recipes import sound

LOG = Path(__file__).parent / "votes_search.jsonl"
Values = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A recipe, what of it is tried first, what else its settings may be, and what is to be large."""

    recipe: RunConfig
    starts: tuple[Values, ...]
    space: dict[str, tuple[Any, ...]]
    radii: tuple[str, ...]

    def score(self, found: Values) -> float:
        """The mean of what is estimated at the radii asked about, 0 of a trial that failed."""
        return sum(found["estimated"][radius] for radius in self.radii) / len(self.radii) if "clean" in found else 0.0


SMALL = "avgpool 2, centred 32 3+1, residual 64 16, residual 128 16/2, groupnorm 16, relu, avgpool 7, linear"
DEEPER = (
    "avgpool 2, centred 48 3+1, residual 64 16, residual 128 16/2, residual 128 16/2, groupnorm 16, relu, avgpool 4, "
    "linear"
)
SCATTERED = (
    "scatter 8 2 3, groupnorm 27, centred 128 3+1, groupnorm 16, relu, maxpool 2, centred 128 3+1, groupnorm 16, relu, "
    "avgpool 3, linear"
)
PLAIN = "conv 32 5/2+2, groupnorm 8, relu, conv 64 3/2+1, groupnorm 8, relu, linear"
WIDER = (
    "centred 32 5/2+2, groupnorm 8, relu, centred 64 3/2+1, groupnorm 8, relu, centred 128 3+1, groupnorm 8, relu, "
    "avgpool 7, linear"
)
BLOCKS = "centred 32 5/2+2, residual 64 8, residual 64 8/2, groupnorm 8, relu, avgpool 7, linear"
HEAD = "scatter 8 2 3, groupnorm 9, linear"
FEATURES = "scatter 8 2 3, groupnorm 9, centred 64 3+1, groupnorm 8, relu, linear"
MORE_FEATURES = (
    "scatter 8 2 3, groupnorm 9, centred 128 3+1, groupnorm 8, relu, centred 64 3+1, groupnorm 8, relu, linear"
)

CIFAR10 = Task(
    sound.cifar10_smoothed_strict(),
    (
        {"model.architecture": DEEPER},
        {"method.views_radius": 0.5, "method.smoothing_stddev": 0.4},
        {"training.learning_rate": 8.0},
        {"model.architecture": SCATTERED, "training.learning_rate": 2.0},
    ),
    {
        "model.architecture": (SMALL, DEEPER, SCATTERED),
        "training.learning_rate": (0.5, 1.0, 2.0, 4.0, 8.0),
        "training.schedule": ("constant", "cosine"),
        "training.steps": (800, 1600),
        "method.clip_norm": (0.3, 1.0),
        "method.smoothing_stddev": (0.3, 0.4, 0.5, 0.6),
        "method.views_radius": (0.0, 0.25, 0.5),
        "method.augmentations": (("flip",), ("crop", "flip")),
        "method.crop_shift": (2, 4),
    },
    ("0.5",),
)
MNIST = Task(
    sound.mnist_l2_scattering(),
    (
        {"method.views_radius": 0.5},
        {"model.architecture": MORE_FEATURES},
        {"method.num_views": 4},
        {"method.batch_size": 8192},
        {"training.learning_rate": 4.0},
    ),
    {
        "model.architecture": (PLAIN, BLOCKS, FEATURES, MORE_FEATURES, HEAD),
        "training.learning_rate": (0.5, 1.0, 2.0, 4.0),
        "method.smoothing_stddev": (0.5, 0.6, 0.7),
        "method.momentum": (0.0, 0.9),
        "method.batch_size": (4096, 8192),
        "training.steps": (586, 1172),
        "training.schedule": ("constant", "cosine"),
        "method.clip_norm": (0.1, 0.3, 1.0),
        "method.num_views": (1, 2, 4),
        "method.augmentations": (None, ("crop",)),
        "method.augmented_views": (1, 4),
        "method.crop_shift": (1, 2),
        "method.views_radius": (0.0, 0.25, 0.5),
    },
    ("0.5", "1"),
)
TASKS = {"cifar10": CIFAR10, "mnist": MNIST}


@torch.no_grad()
def shares_of_votes(
    network: torch.nn.Module, inputs: Tensor, labels: Tensor, stddev: float, draws: int
) -> tuple[Tensor, Tensor]:
    """How often the label, and the most frequent other class, is named under noise."""
    votes = torch.zeros(len(inputs), 10, device=inputs.device)
    generator = torch.Generator(inputs.device).manual_seed(0)
    for _ in range(draws):
        noise = torch.randn(inputs.shape, generator=generator, device=inputs.device)
        votes.scatter_add_(1, network(inputs + stddev * noise).argmax(1, keepdim=True), torch.ones_like(votes[:, :1]))
    own = votes.gather(1, labels[:, None])[:, 0]
    return own / draws, votes.scatter(1, labels[:, None], -1.0).amax(1) / draws


def descend(trainable: Trainable, config: RunConfig) -> None:
    """The steps of a training. Autocast keeps copies of weights until it ends, so each step has its own."""
    network, engine = trainable.network, InProcessEngine()
    descent = Descent(config.training, dict(network.named_parameters()), trainable.optimisers(config))
    for step in range(config.training.steps):
        with working_precision(config.machine.precision, network.device):
            released = trainable.release(step, engine).gradients
        descent.step(step, released)
        trainable.after_update()
    trainable.use_average()


def trial(config: RunConfig, share: float, records: Records, voted: int, draws: int) -> Values:
    """Train once without writing anything, and vote."""
    dataset, device = records.dataset, use_device(config.machine)
    config, share = at_share(config, share, dataset)
    seeds, started = Seeds.reproducible(0), time.monotonic()
    network = make_network(config, dataset.info, seeds, None, None).to(device)
    plan = make_plan(config, dataset.info, None)
    trainable = method_of(config).prepare(config, plan, network, dataset.train, seeds)
    ready = time.monotonic()
    descend(trainable, config)
    if device.type == "cuda":
        torch.cuda.synchronize()
    trained = time.monotonic()
    test = dataset.test.take(slice(0, voted))
    stddev = float(config.method.to_dict()["smoothing_stddev"])
    own, other = shares_of_votes(network.eval(), test.inputs.to(device), test.labels.to(device), stddev, draws)
    estimates = {
        f"{radius:g}": round(float((own >= norm.cdf(radius / stddev)).float().mean()), 4)
        for radius in config.evaluation.radii
    }
    return {
        "clean": round(float((own > other).float().mean()), 4),
        "estimated": estimates,
        "parameters": sum(p.numel() for p in network.parameters()),
        "cost": share,
        "clipped": trainable.clip.__name__,
        "ms_a_step": round(1000 * (trained - ready) / config.training.steps, 1),
        "seconds": round(time.monotonic() - started, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def done(log: Path, name: str) -> list[Values]:
    """What all processes have found so far for a task."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [found for found in map(json.loads, lines) if found["task"] == name]


def best(task: Task, found: list[Values]) -> Values:
    return max(found, key=task.score)


def proposals(task: Task, name: str, options: argparse.Namespace) -> Iterator[Values]:
    """The starts, of which several processes take turns; then neighbours of the best so far."""
    first, of = map(int, options.part.split("/"))
    yield from task.starts[first::of]
    dice = random.Random(f"{name} {options.part} {options.draw}")
    while True:
        found = done(options.log, name)
        centre = best(task, found)["settings"] if found else {}
        key = dice.choice(list(task.space))
        yield centre | {key: dice.choice(task.space[key])}


def search(name: str, options: argparse.Namespace, everywhere: Values) -> None:
    task, ends = TASKS[name], time.monotonic() + 60 * options.minutes
    records = Records(task.recipe.data.name, options.held_out)
    where = {key: value for key, value in everywhere.items() if not key.startswith("machine.")}
    for proposed in proposals(task, name, options):
        if time.monotonic() > ends:
            return
        settings = json.loads(json.dumps(proposed))
        tried = [found["settings"] for found in done(options.log, name) if found["set"] == where]
        if settings in tried:
            continue
        row: Values = {"task": name, "share": options.share, "set": where, "settings": settings}
        try:
            config = task.recipe.override_all(everywhere | settings)
            row |= trial(config, options.share, records, options.voted, options.draws)
        except StobatchError as error:
            row |= {"failure": str(error)}
        print(json.dumps(row), flush=True)
        with options.log.open("a") as file:
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", nargs="+", choices=TASKS, required=True)
    parser.add_argument("--best", action="store_true", help="print the settings of the best trial, and stop")
    parser.add_argument("--part", default="0/1", help="which of several processes this is")
    parser.add_argument("--draw", type=int, default=1, help="another number changes other settings")
    parser.add_argument("--share", type=float, default=0.125)
    parser.add_argument("--held-out", type=int, default=5000)
    parser.add_argument("--voted", type=int, default=2000, help="of those held out")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60.0, help="of each task; no trial begins later")
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--set", nargs="*", default=[], help="KEY=JSON, of every trial")
    options = parser.parse_args()
    everywhere = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in options.set)}
    for name in options.task:
        if options.best:
            found = best(TASKS[name], done(options.log, name))
            pairs = found["set"] | found["settings"]
            print(" ".join(f"--set {shlex.quote(f'{key}={_plain(value)}')}" for key, value in pairs.items()))
        else:
            search(name, options, everywhere)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    main()
