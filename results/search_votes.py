"""Compare settings of smoothed networks on training records that no trial was trained on.

    python results/search_votes.py --task cifar10 [--trials NAME...] [--share 0.125] [--log FILE] [--device cuda]

A trial is named by what it changes of a recipe. It is trained at a share of its cost as in `search_sound.py` (smaller
batches, noise to match) on all training records but the last 5,000, and 2,000 of those are voted on with a few draws.
What it says of a radius is an estimate: the share of inputs whose label has so many of the draws that the radius would
follow if the count were the probability. Every trial is a line of the log; what is there is not made again. `--part 1/4`
makes every fourth trial, so that four processes share a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
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
from stobatch.training.device import use_device
from stobatch.training.loop import train_one
from stobatch.training.trainable import working_precision
from stobatch_recipes import sound

LOG = Path(__file__).parent / "votes_search.jsonl"
Values = dict[str, Any]

WIDE = "avgpool 2, standardised 64 3+1, residual 96 16, residual 192 16/2, residual 384 16/2, groupnorm 16, relu, avgpool 4, linear"
DEEP = (
    "avgpool 2, standardised 64 3+1, residual 64 16, residual 64 16, residual 128 16/2, residual 128 16, "
    "residual 256 16/2, groupnorm 16, relu, avgpool 4, linear"
)
SMALL = "avgpool 2, standardised 32 3+1, residual 64 16, residual 128 16/2, groupnorm 16, relu, avgpool 7, linear"
SCATTERED = "scatter 8 2 3, groupnorm 27, standardised 128 3+1, groupnorm 16, relu, maxpool 2, standardised 128 3+1, groupnorm 16, relu, avgpool 3, linear"
MNIST_RESIDUAL = "standardised 32 5/2+2, residual 64 8, residual 128 8/2, groupnorm 8, relu, avgpool 7, linear"
MNIST_SCATTERED = "scatter 8 2 3, groupnorm 9, standardised 64 3+1, groupnorm 8, relu, linear"

CIFAR10: dict[str, Values] = {
    "recipe": {},
    "rate 1": {"training.learning_rate": 1.0},
    "rate 4": {"training.learning_rate": 4.0},
    "clip 0.3": {"method.clip_norm": 0.3},
    "moved 0.25": {"method.views_radius": 0.25, "method.attack_steps": 1},
    "stddev 0.36": {"method.smoothing_stddev": 0.36},
    "scattered": {"model.architecture": SCATTERED, "training.learning_rate": 1.0},
    "wide": {"model.architecture": WIDE},
    "small": {"model.architecture": SMALL},
    "deep": {"model.architecture": DEEP},
    "steps 1000": {"training.steps": 1000},
    "cosine 4": {"training.learning_rate": 4.0, "training.schedule": "cosine"},
    "momentum": {"training.learning_rate": 0.2, "method.momentum": 0.9},
    "moved 0.5": {"method.views_radius": 0.5, "method.attack_steps": 1},
    "no crop": {"method.augmentations": ("flip",)},
    "rate 8": {"training.learning_rate": 8.0},
}
MNIST: dict[str, Values] = {
    "recipe": {},
    "residual": {"model.architecture": MNIST_RESIDUAL, "training.learning_rate": 2.0, "method.momentum": 0.0},
    "residual, crops": {
        **{"model.architecture": MNIST_RESIDUAL, "training.learning_rate": 2.0, "method.momentum": 0.0},
        **{"method.augmentations": ("crop",), "method.augmented_views": 4, "method.num_views": 1},
    },
    "scattered": {"model.architecture": MNIST_SCATTERED, "training.learning_rate": 2.0, "method.momentum": 0.0},
    "scattered, rate 1": {"model.architecture": MNIST_SCATTERED, "training.learning_rate": 1.0, "method.momentum": 0.0},
    "scattered, crops": {
        **{"model.architecture": MNIST_SCATTERED, "training.learning_rate": 2.0, "method.momentum": 0.0},
        **{"method.augmentations": ("crop",), "method.augmented_views": 4, "method.num_views": 1, "method.crop_shift": 1},
    },
}
TASKS: dict[str, tuple[Callable[[], RunConfig], dict[str, Values]]] = {
    "cifar10": (sound.cifar10_smoothed_strict, CIFAR10),
    "mnist": (sound.mnist_l2, MNIST),
}


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


def trial(config: RunConfig, share: float, records: Records, voted: int, draws: int) -> Values:
    """Train once without writing anything, and vote."""
    dataset, device = records.dataset, use_device(config.machine)
    config, share = at_share(config, share, dataset)
    seeds, started = Seeds.reproducible(0), time.monotonic()
    network = make_network(config, dataset.info, seeds, None, None).to(device)
    plan = make_plan(config, dataset.info, None)
    trainable = method_of(config).prepare(config, plan, network, dataset.train, seeds)
    ready = time.monotonic()
    with working_precision(config.machine.precision, device):
        train_one(trainable, config)
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
        "steps": config.training.steps,
        "ms_a_step": round(1000 * (trained - ready) / config.training.steps, 1),
        "seconds": round(time.monotonic() - started, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--trials", nargs="+", help="names; all of the task's if left out")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--share", type=float, default=0.125)
    parser.add_argument("--held-out", type=int, default=5000)
    parser.add_argument("--voted", type=int, default=2000, help="of those held out")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60.0, help="no trial begins later")
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--set", nargs="*", default=[], help="KEY=JSON, of every trial")
    options = parser.parse_args()
    make, trials = TASKS[options.task]
    part, of = map(int, options.part.split("/"))
    everywhere = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in options.set)}
    started, records = time.monotonic(), None
    names = options.trials or list(trials)
    lines = options.log.read_text().splitlines() if options.log.exists() else []
    done = {(row["task"], row["trial"], row["share"], json.dumps(row["set"])) for row in map(json.loads, lines)}
    for name in names[part::of]:
        where = {key: value for key, value in everywhere.items() if not key.startswith("machine.")}
        if (options.task, name, options.share, json.dumps(where)) in done or time.monotonic() > started + 60 * options.minutes:
            continue
        config = make().override_all(everywhere | trials[name])
        records = records or Records(config.data.name, options.held_out)
        row: Values = {"task": options.task, "trial": name, "share": options.share, "set": where}
        row |= {"settings": trials[name]}
        try:
            row |= trial(config, options.share, records, options.voted, options.draws)
        except StobatchError as error:
            row |= {"failure": str(error)}
        print(json.dumps(row), flush=True)
        with options.log.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
