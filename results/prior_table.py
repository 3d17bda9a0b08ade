"""Measure what a public start is worth on MNIST: the prior alone, and `sound` with and without it.

    python results/prior_table.py --folder runs/prior --records results/sound_mnist_prior.jsonl --device cuda
    python results/prior_table.py --table results/sound_mnist_prior.jsonl

Each row is a line of the records: accuracy and certified accuracy (bounds, l-infinity over [-1, 1]) of 10,000 images. A
row that is there already is not made again, and a training that was stopped goes on. Seeds are public, so the privacy
of these runs is void; with secret ones it has the status that stands in the row.

`--held-out` trains on the first 50,000 training images of MNIST and measures on the other 10,000: settings are chosen
there, never on test images. `--rate` tries another learning rate of the trainings that start from the prior.

`--of-each 10` gives every ten records to one person, at random, and protects persons: a step takes a third of
them, each with all ten records.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import stobatch
from stobatch.config import DataConfig, RunConfig
from stobatch.data import Dataset, Examples, from_tensors, load
from stobatch.loading import plain_network
from stobatch.methods import verifiers_of
from stobatch.models import Classifier
from stobatch.results.prior import prior_files, read_prior
from stobatch.seeds import Seeds
from stobatch.training.device import use_device
from stobatch_recipes import sound

RADII = (0.05, 0.1, 0.2, 0.4, 0.6)
NETWORK = "squash 4, conv 256 5/3, relu, linear"
AIMS = {"near": 0.2, "far": 0.35}
"""What priors, and what starts from them, are trained to certify."""
RATES = {0.2: 0.05, 1.0: 0.1}
"""By ε: the learning rate from a prior, as a multiple of the recipe's own."""
STEPS, BATCH_SIZE = 10_000, 512
_AT_ONCE = 1000


def with_prior(epsilon: float, aim: str, network: str, rate: float | None) -> RunConfig:
    """The recipe of MNIST for a training that begins where the prior ends: the whole box from the first step on."""
    recipe = sound.mnist(epsilon=epsilon, radius=0.2)
    return recipe.override_all(
        {
            "model.architecture": network,
            "method.radius": AIMS[aim],
            "method.natural_weight": 0.5,
            "method.certified_weight": 0.5,
            "method.warm_up": 0.0,
            "method.ramp": 0.0,
            "training.learning_rate": (RATES[epsilon] if rate is None else rate) * recipe.training.learning_rate,
        }
    )


def without_prior(epsilon: float, aim: str) -> RunConfig:
    """The recipe as it is, for a radius of 0.2 or 0.4."""
    return sound.mnist(epsilon=epsilon, radius=0.2 if aim == "near" else 0.4)


def for_persons(config: RunConfig, epsilon: float, of_each: int, *, from_prior: bool) -> RunConfig:
    """The settings where a person has several records."""
    if of_each == 1:
        return config
    strict = sound.mnist(epsilon=0.2, radius=0.2).override("method.epsilon", epsilon)
    few_steps = {"method.batch_size": 2000, "method.records_per_person": of_each, "training.steps": 146}
    return (config if from_prior else strict).override_all(few_steps)


def records(*, held_out: bool, of_each: int) -> Dataset:
    """MNIST, or its training images cut in two; every `of_each` training records, drawn at random, are one person's."""
    whole = load(DataConfig(name="mnist"))
    train, test = whole.train.in_memory(), whole.test
    inputs, labels = train.inputs, train.labels
    parts = (inputs, labels, test.inputs, test.labels)
    if held_out:
        parts = (inputs[:50_000], labels[:50_000], inputs[50_000:], labels[50_000:])
    order = torch.randperm(len(parts[1]), generator=torch.Generator().manual_seed(0))
    groups = None if of_each == 1 else order // of_each
    return from_tensors(*parts, num_classes=10, name="mnist", groups=groups)


def certified(
    config: RunConfig, network: Classifier, test: Examples, dataset: Dataset | None, radii: Sequence[float] = RADII
) -> dict[str, Any]:
    """Accuracy, and certified accuracy by radius, with the bounds that `stobatch certify` uses."""
    config = config.override_all({"evaluation.radii": list(radii)})
    (verifier, *_) = verifiers_of(config, stobatch.plan(config, dataset=dataset), network)
    right, holds = 0, defaultdict(int)
    for start in range(0, len(test), _AT_ONCE):
        part = test.take(slice(start, start + _AT_ONCE))
        found = verifier.verify(part.inputs, torch.Generator())
        correct = found.label == part.labels.numpy()
        right += int(correct.sum())
        for radius in radii:
            holds[radius] += int((correct & found.certified(radius)).sum())
    return {
        "examples": len(test),
        "clean": right / len(test),
        "certified": {f"{radius:g}": holds[radius] / len(test) for radius in radii},
    }


def make_prior(options: argparse.Namespace, aim: str, seed: int) -> Path:
    of_network = sha256(options.network.encode()).hexdigest()[:8]
    out = Path(options.folder) / f"prior-{aim}-{of_network}-{options.steps}x{options.batch_size}-{seed}"
    if not prior_files(out)[1].exists():
        config = with_prior(1.0, aim, options.network, None)
        # A prior begins with random weights, so it gets the ramp back.
        config = config.override_all({"method.warm_up": 0.1, "method.ramp": 0.4, "machine.device": options.device})
        stobatch.pretrain(config, "digits", out, steps=options.steps, batch_size=options.batch_size, seed=seed)
    return out


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What is to be measured, cheapest first."""
    found = []
    for seed in options.seed:
        for aim in options.aim:
            if options.of_each == 1:
                found.append({"row": "prior alone", "aim": aim, "epsilon": 0.0, "seed": seed})
            for epsilon in options.epsilon:
                found.append({"row": "from the prior", "aim": aim, "epsilon": epsilon, "seed": seed})
                if not options.no_plain:
                    found.append({"row": "from random weights", "aim": aim, "epsilon": epsilon, "seed": seed})
    return found


def measure(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    aim, seed, epsilon = row["aim"], row["seed"], row["epsilon"]
    own = options.held_out or options.of_each > 1
    dataset = records(held_out=options.held_out, of_each=options.of_each) if own else None
    test = (dataset or load(DataConfig(name="mnist", train_limit=1))).test
    machine = {"machine.device": options.device, "machine.memory_mb": options.memory_mb}
    started = time.monotonic()
    if row["row"] == "prior alone":
        prior = make_prior(options, aim, seed)
        config = with_prior(1.0, aim, options.network, None).override_all(machine)
        tensors, card = read_prior(prior)
        info = (dataset or load(DataConfig(name="mnist", train_limit=1))).info
        network = plain_network(config, info, Seeds.reproducible(0), None)
        network.load_state_dict(tensors)
        network.to(use_device(config.machine)).eval().requires_grad_(False)
        facts = {"weights_sha256": card.weights_sha256, "prior": card.settings}
        return facts | certified(config, network, test, dataset) | {"seconds": round(time.monotonic() - started, 1)}
    from_prior = row["row"] == "from the prior"
    prior = make_prior(options, aim, seed) if from_prior else None
    config = with_prior(epsilon, aim, options.network, options.rate) if from_prior else without_prior(epsilon, aim)
    config = for_persons(config, epsilon, options.of_each, from_prior=from_prior)
    config = config.override_all({**machine, "seed": seed})
    start = f"from-{prior.name}" if prior else f"plain-{aim}"
    name = f"{start}-{epsilon:g}-{seed}-{config.training_hash}"
    run = Path(options.folder) / (name + ("-held-out" if options.held_out else ""))
    resume = (run / "config.json").exists()
    model = stobatch.train(config, run, dataset=dataset, prior=prior, resume=resume, quiet=True)
    return {
        "network": config.model.architecture,
        "learning_rate": config.training.learning_rate,
        "steps": config.training.steps,
        "guarantee": str(model.guarantee),
        "status_with_secret_seeds": str(model.claim.status),
        "device": str(model.network.device),
        "torch": torch.__version__,
        **certified(model.config, model.network, test, dataset),
        "seconds": round(time.monotonic() - started, 1),
    }


def table(records: list[dict[str, Any]]) -> str:
    """Means over seeds, in percent."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        images = "held out" if record["held_out"] else "test"
        rate = record.get("learning_rate", "")
        person = record.get("of_each", 1)
        key = (record["row"], record["epsilon"], person, record["network"], record["aim"], rate, images)
        groups[key].append(record)
    lines = [
        "| start | ε | records of a person | network | aim | rate | images | seeds | clean | "
        f"{' | '.join(f'{r:g}' for r in RADII)} |",
        "|" + "---|" * (9 + len(RADII)),
    ]
    for (row, epsilon, person, network, aim, rate, images), group in sorted(groups.items(), key=lambda g: str(g[0])):
        values = [group_mean(group, "clean")] + [group_mean(group, "certified", f"{radius:g}") for radius in RADII]
        facts = [row, f"{epsilon:g}", person, f"`{network}`", f"{AIMS[aim]:g}", rate, images, len(group)]
        lines.append(f"| {' | '.join([*map(str, facts), *(f'{100 * value:.1f}' for value in values)])} |")
    return "\n".join(lines)


def group_mean(group: list[dict[str, Any]], *keys: str) -> float:
    values = []
    for record in group:
        value: Any = record
        for key in keys:
            value = value[key]
        values.append(float(value))
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/prior", help="where priors and runs go")
    parser.add_argument("--records", type=Path, help="measure, and add rows to this file")
    parser.add_argument("--table", type=Path, help="print the table of such a file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory-mb", type=int, default=4096)
    parser.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epsilon", type=float, nargs="*", default=[0.2, 1.0], choices=[0.2, 1.0])
    parser.add_argument("--aim", nargs="+", default=["near"], choices=list(AIMS))
    parser.add_argument("--network", default=NETWORK)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the prior")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help="of the prior")
    parser.add_argument("--rate", type=float, help="times the recipe's learning rate, from the prior")
    parser.add_argument("--no-plain", action="store_true", help="leave out the rows without a prior")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--of-each", type=int, default=1, help="records of a person; more than 1 protects persons")
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return
    if options.records is None:
        parser.error("give --records or --table")
    where = {"held_out": options.held_out, "of_each": options.of_each}
    asked = where | {"network": options.network, "rate": options.rate, "prior_steps": options.steps}
    done = options.records.read_text().splitlines() if options.records.exists() else []
    there = [json.loads(line) for line in done]
    for row in rows(options):
        key = row | (where if row["row"] == "from random weights" else asked)
        if any(all(record.get(name) == value for name, value in key.items()) for record in there):
            continue
        record = key | measure(row, options)
        print(json.dumps(record), flush=True)
        options.records.parent.mkdir(parents=True, exist_ok=True)
        with options.records.open("a") as out:
            out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
