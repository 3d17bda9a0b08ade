"""Take points of the paper's figures from the records here: `python results/collect_figures.py [FILE.jsonl ...]`.

Writes results/figures/figure-N.jsonl. Every point names the record that it comes from; none is computed. Points that
`stobatch figure --minutes` made stay, and further ones are added from its files, which are named on the command line.
A certified accuracy at attacked inputs was kept of the worst attack alone.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stobatch.figures.catalogue import FIGURES, METHODS, PaperFigure
from stobatch.figures.plan import require_recipes
from stobatch.figures.records import CURVES, add_curves, file_of, merged, read_points, write_points
from stobatch.results import WORST, FigurePoint, LearningCurve
from stobatch_recipes import sound

HERE = Path(__file__).parent
Record = dict[str, Any]
PUBLISHED = {
    "paper_mnist": (),
    "paper_mnist_seeds": (),
    "paper_cifar10_adam": ("training.learning_rate=0.0001", "training.monitor_every=50", "training.optimiser=adam"),
    "paper_cifar10_released": ("method.label_noise=penalty", "training.monitor_every=50"),
    "paper_cifar10_partial": ("training.monitor_every=100", "training.steps=5000"),
    "paper_cifar10_noises": ("training.monitor_every=50", "training.steps=2000"),
}
"""Records of the published mechanism as collect.py writes them, with what was changed of the recipe."""
BASELINES = {
    "baselines_mnist": (),
    "baselines_mnist_radii": (),
    "baselines_cifar10": ("training.monitor_every=20", "training.steps=220"),
}
SOUND = ("sound_mnist", "sound_mnist_strict_former", "sound_cifar10", "sound_tiny_imagenet")
PROVED = ("tight", "corrected", "bounds", "votes")
UNITS = "l∞ over [-1, 1]"


def load(name: str) -> list[Record]:
    found: list[Record] = json.loads((HERE / f"{name}.json").read_text())
    return found


def data_of(name: str) -> str:
    return next(data for data in ("cifar10", "tiny_imagenet", "mnist") if data in name)


def common(record: Record, name: str, method: str, epsilon: float | None, settings: tuple[str, ...]) -> Record:
    """What all points of a record share."""
    return {
        "scale": "full",
        "data": data_of(name),
        "method": method,
        "settings": settings,
        "epsilon": epsilon,
        "privacy": METHODS[method].privacy,
        "unit": UNITS,
        "training_hash": record.get("training_hash") or record["config_hash"],
        "training_steps": record["steps"],
        "seed": record["seed"],
        "device": record["device"],
        "seconds": record.get("training_seconds", record.get("seconds")),
        "source": f"results/{name}.json",
    }


def attacked(protocol: str, attack: str, shares: Record, images: int, steps: int) -> Iterator[Record]:
    for radius, share in shares.items():
        yield {
            "protocol": f"{protocol} protocol", "kind_of_accuracy": "conventional", "status": "measured",
            "certificate": None, "attack": attack, "radius": float(radius), "steps": steps, "accuracy": share,
            "images": images,
        }  # fmt: skip


def certified(protocol: str, rule: str, status: str, shares: Record, images: int, steps: int) -> Iterator[Record]:
    """With 0 steps, of clean inputs."""
    for radius, share in shares.items():
        yield {
            "protocol": protocol, "kind_of_accuracy": "certified", "status": status, "certificate": rule,
            "attack": WORST if steps else "none", "radius": float(radius), "steps": steps,
            "accuracy": share, "images": images,
        }  # fmt: skip


def of_published(record: Record) -> Iterator[Record]:
    """One pass under attack, certified accuracy of the vote at attacked inputs, and what is proved of clean ones."""
    settings = record["evaluation"]
    for under in record["under_attack"]:
        protocol, images = under["protocol"], under["test_examples"]
        steps = settings["attack_steps"] if protocol == "published" else settings["adaptive_steps"]
        if under["function"] == "single_pass":
            for attack, shares in under["accuracy"].items():
                yield from attacked(protocol, attack, shares, images, steps)
        elif shares := under["certified_at_attacked_worst"].get("published"):
            yield from certified(f"{protocol} protocol", "published", "claimed", shares, images, steps)
    for name, protocol in (("corrected", "proved"), ("published", "published protocol")):
        if rule := record.get("certified", {}).get(name):
            shares = {radius: share for radius, share in rule.items() if radius != "status"}
            yield from certified(protocol, name, rule["status"], shares, record["test_examples"], 0)


def of_baseline(record: Record, steps: int) -> Iterator[Record]:
    for protocol, under in (record["under_attack"] or {}).items():
        spent = steps if protocol == "published" else 40
        yield from attacked(protocol, WORST, under["accuracy"], under["test_examples"], spent)
    rules = record["certified"] or {}
    best = next((rule for rule in PROVED if rule in rules), None)
    for name, protocol in ((best, "proved"), ("as compared", "published protocol")):
        if name in rules:
            rule = rules[name]
            yield from certified(protocol, name, rule["status"], rule["accuracy"], rule["test_examples"], 0)


def of_sound(record: Record) -> Iterator[Record]:
    rule, under = record["certificate"], record["attacked"]
    yield from certified("proved", rule["name"], rule["status"], record["certified"], record["test_examples"], 0)
    if under is not None:
        yield from attacked("adaptive", WORST, under["accuracy"], under["test_examples"], under["steps"])


def every() -> Iterator[Record]:
    """Yield each number of the records that a figure could show, with all that is known of it."""
    for name, settings in PUBLISHED.items():
        for record in load(name):
            if "under_attack" in record and record["claimed_epsilon"] <= 10:
                shared = common(record, name, "published", record["claimed_epsilon"], settings)
                yield from ({**shared, **point} for point in of_published(record))
    for name, settings in BASELINES.items():
        for record in load(name):
            row, _, epsilon = record["row"].partition("-eps-")
            method = row.replace("-", "_")
            if method in METHODS and method != "sound":
                # PixelDP was trained with its own number of steps, and what it is looked at is the same.
                own = () if method == "pixeldp" and settings else settings
                shared = common(record, name, method, float(epsilon) if epsilon else None, own)
                yield from ({**shared, **point} for point in of_baseline(record, 10))
    searched = {sound.mnist_strict().override("seed", seed).training_hash for seed in (1, 2, 3)}
    for name in SOUND:
        for record in load(name):
            if record["config_hash"] in searched:
                # Figures compare methods with settings that follow from ε alone.
                continue
            wide = record["train_radius"] >= (0.5 if "mnist" in name else 0.02)
            shared = common(record, name, "sound_wide" if wide else "sound", round(record["epsilon"], 1), ())
            yield from ({**shared, **point} for point in of_sound(record))


def fits(figure: PaperFigure, point: Record) -> bool:
    """Whether a figure shows such a number: its data, method, budget, radius, kind and number of steps."""
    kinds = (*figure.kinds, *(("conventional", "certified") if point["method"].startswith("sound") else ()))
    return (
        point["data"] == figure.data
        and point["method"] in figure.methods
        and point["epsilon"] in (None, *figure.epsilons)
        and point["radius"] in figure.radii
        and point["kind_of_accuracy"] in kinds
        and (point["protocol"] != "published protocol" or point["steps"] in (0, *figure.steps))
    )


def placed(figure: PaperFigure, point: Record) -> FigurePoint:
    """The point in a figure; one that trains against more attack steps says that this was the recipe's own number."""
    settings = point["settings"]
    if figure.train_attack_steps is not None and point["method"] == "published":
        settings = ("method.train_attack_steps=3", *settings)
    return FigurePoint.from_dict({"figure": figure.number, "axis": figure.axis, **point, "settings": settings})


def main(files: list[str]) -> None:
    collected = list(every())
    for figure in FIGURES.values():
        path = file_of(HERE / "figures", figure, "full")
        points = [placed(figure, point) for point in collected if fits(figure, point)]
        given = [file for file in files if Path(file).name == path.name]
        made = [point for point in read_points(path, figure, "full") if not point.source.startswith("results/")]
        found = merged(points, made, *(read_points(Path(file), figure, "full") for file in given))
        require_recipes(figure, found)
        write_points(path, found)
        sys.stdout.write(f"{path.name}: {len(found)} points\n")
    for file in (Path(file) for file in files if Path(file).name == CURVES):
        add_curves(
            HERE / "figures" / CURVES, map(LearningCurve.from_dict, map(json.loads, file.read_text().splitlines()))
        )


if __name__ == "__main__":
    main(sys.argv[1:])
