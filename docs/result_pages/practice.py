"""docs/results/practice.md: MNIST from a public start, for persons, and with a search that is paid for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from stobatch_recipes import recipe

from .records import PRIVACY, Record, lines_of, mean, percent, record, records, render, slashed, table
from .sound import MNIST, certified, left, measured, of_recipe, privacy

RADII = ("0.05", "0.2", "0.4", "0.6")
RECORDS = "results/sound_mnist_prior.jsonl"
WITHOUT = {0.2: "sound.mnist_strict", 1.0: "sound.mnist"}
"""By ε: the recipe whose records are the rows without a prior."""
PRIMED = {"sound.mnist_primed_strict": (1, 2, 3), "sound.mnist_primed": (1,), "sound.mnist_primed_wide": (1,)}
"""Recipes that start from rendered digits, all from one prior, and the seeds that were trained."""
TRIALS = "results/prior_search.jsonl"
BEGAN = {
    "training.learning_rate": 1.0,
    "training.steps": 100,
    "method.batch_size": 2048,
    "method.radius": 0.2,
    "method.epsilon": 1.0,
}
"""Where the search for their settings began."""
LATER = ("sound.mnist_strict_pooled", "sound.mnist_near")
"""Recipes without a prior that prove more at 0.2 than those."""


def tuned() -> Record:
    """Return the one record of a winner whose ε covers its search."""
    (found,) = record("tuned_mnist")
    if found["status"] != "proved" or found["test_examples"] != 10_000:
        raise ValueError("the searched row is proved, and of all test images.")
    return dict(found)


def started(row: str, epsilon: float, of_each: int, aim: str = "near") -> list[Record]:
    """Return the records of one row, by seed, each of all test images."""
    wanted = {"row": row, "epsilon": epsilon, "of_each": of_each, "aim": aim, "held_out": False}
    found = [one for one in lines_of(RECORDS) if {key: one[key] for key in wanted} == wanted]
    if not found or any(one["examples"] != 10_000 for one in found):
        raise ValueError(f"{RECORDS} has no record of all test images for: {row}, ε = {epsilon:g}, {of_each} of each.")
    if any(one.get("status_with_secret_seeds", "proved") != "proved" for one in found):
        raise ValueError(f"{row}, ε = {epsilon:g}: with secret seeds it would not be proved.")
    return found


def primed(name: str) -> list[Record]:
    """Return the records of a recipe that starts from a prior, by seed; each was attacked and nothing was broken."""
    hashes = {recipe(name).override("seed", seed).training_hash: seed for seed in PRIMED[name]}
    of_seed = {hashes.get(one["recipe_hash"]): one for one in records("sound_mnist_primed")}
    found = [of_seed[seed] for seed in PRIMED[name] if seed in of_seed]
    if len(found) != len(PRIMED[name]) or any(one["test_examples"] != 10_000 for one in found):
        raise ValueError(f"results/sound_mnist_primed.json has no record of {name} as it ships for each of its seeds.")
    if any(one["attacked"]["broken_certificates"] for one in found):
        raise ValueError("the page says that no certificate was broken, the records say otherwise.")
    return found


def start_of_primed() -> Record:
    """Return what their common prior is worth by itself, as the first seeds measured it."""
    found = [one["prior_alone"] for name in PRIMED for one in primed(name)]
    if len({one["weights_sha256"] for one in found}) != 1:
        raise ValueError("the page says that all of them start from one prior, the records say otherwise.")
    alone: Record = found[0] | {"certified": {radius: c for one in found for radius, c in one["certified"].items()}}
    return alone


def reached(name: str) -> dict[str, str]:
    """Return what a recipe proves at each radius that it was certified at, means over its seeds."""
    found = primed(name)
    return {radius: certified(found, radius) for radius in found[0]["certified"]}


def left_and_proved(name: str) -> list[str]:
    """Return what attacks leave and what is proved of the same images at the radii of a recipe, means over seeds."""
    found, cells = primed(name), []
    for radius in RADII:
        pairs = [
            (left(one)[radius], one["attacked"]["certified_of_them"]["bounds"][radius])
            for one in measured(found, radius)
        ]
        cells.append(slashed(fmean(column) for column in zip(*pairs, strict=True)) if pairs else "")
    return [f"`{name}`", str(len(found)), *cells]


def trial_rows() -> Iterator[list[str]]:
    """Return trials of the start and of trainings from it, the best of each budget and radii first.

    Settings are named where they are not where the search began.
    """

    def order(trial: Record) -> tuple[object, ...]:
        settings, shares = trial["settings"] or {}, trial["certified"].values()
        return *trial["certified"], trial["settings"] is not None, settings.get("method.epsilon", 1.0), -sum(shares)

    for trial in sorted(lines_of(TRIALS), key=order):
        changed = {key: to for key, to in (trial["settings"] or {}).items() if BEGAN.get(key) != to}
        named = ", ".join(f"`{key.partition('.')[2]}={to}`" for key, to in changed.items()) or "where it began"
        shares = (percent(trial["certified"][radius]) if radius in trial["certified"] else "" for radius in RADII)
        shown = "the prior alone" if trial["settings"] is None else named
        yield [shown, f"{trial['examples']:,}", percent(trial["clean"]), *shares]


def numbers(found: Sequence[Record]) -> list[str]:
    shown = (measured(found, radius) for radius in RADII)
    shares = (
        mean(one["certified"][radius] for one in of_radius) if of_radius else ""
        for radius, of_radius in zip(RADII, shown, strict=True)
    )
    return [str(len(found)), mean(one["clean"] for one in found), *shares]


def rows() -> Iterator[list[str]]:
    alone = started("prior alone", 0.0, 1)
    yield [
        "rendered digits, and no training on MNIST",
        "ε = 0 but for how digits are drawn, see below",
        *numbers(alone),
    ]
    yield [
        "rendered digits for far radii, and no training on MNIST",
        "ε = 0 but for how digits are drawn, see below",
        *numbers(started("prior alone", 0.0, 1, "far")),
    ]
    yield [
        "rendered digits, the start of `sound.mnist_primed`, and no training on MNIST",
        "ε = 0 but for how digits are drawn, see below",
        *numbers([start_of_primed()]),
    ]
    for epsilon, without in WITHOUT.items():
        void = f"void (proved ε = {epsilon:g}"
        plain = of_recipe(without, "sound_mnist")
        yield ["random weights", f"{void} per record)", *numbers(plain)]
        yield ["rendered digits", f"{void} per record)", *numbers(started("from the prior", epsilon, 1))]
        if epsilon == 1:
            far = started("from the prior", epsilon, 1, "far")
            yield ["rendered digits for far radii", f"{void} per record)", *numbers(far)]
        for name in PRIMED:
            if recipe(name).method.to_dict()["epsilon"] == epsilon:
                yield [f"rendered digits, `{name}`", f"{void} per record)", *numbers(primed(name))]
        yield ["random weights", f"{void} per person)", *numbers(started("from random weights", epsilon, 10))]
        yield ["rendered digits", f"{void} per person)", *numbers(started("from the prior", epsilon, 10))]
    found = tuned()
    yield ["random weights, settings searched and paid for", f"**{privacy(found)} per record**", *numbers([found])]


def page() -> str:
    found = tuned()
    return render(
        "practice",
        table=table(["start", PRIVACY, "seeds", "clean", *(f"certified at {radius}" for radius in RADII)], rows()),
        primed_table=table(
            ["recipe", "seeds", *(f"attacked / proved at {radius}" for radius in RADII)],
            [left_and_proved(name) for name in PRIMED],
        ),
        trials_table=table(
            ["settings", "images", "clean", *(f"certified at {radius}" for radius in RADII)], trial_rows()
        ),
        reached={name: reached(name) for name in PRIMED},
        former=records("sound_mnist_primed_former")[0],
        start=lines_of(TRIALS)[0]["prior"],
        without=[f"`{name}`" for name in WITHOUT.values()],
        later={name: certified(of_recipe(name, MNIST[name]), "0.2") for name in LATER},
        tuned=found,
        small=record("prior_mnist_cpu")[0],
        attacked=found["attacked"],
    )
