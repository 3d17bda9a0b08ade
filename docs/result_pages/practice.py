"""docs/results/practice.md: MNIST from a public start, for persons, and with a search that is paid for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .records import PRIVACY, Record, lines_of, mean, record, render, table
from .sound import MNIST, certified, of_recipe, privacy

RADII = ("0.05", "0.2", "0.4", "0.6")
RECORDS = "results/sound_mnist_prior.jsonl"
WITHOUT = {0.2: "sound.mnist_strict", 1.0: "sound.mnist"}
"""By ε: the recipe whose records are the rows without a prior."""
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


def numbers(found: Sequence[Record]) -> list[str]:
    shares = (mean(one["certified"][radius] for one in found) for radius in RADII)
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
    for epsilon, recipe in WITHOUT.items():
        void = f"void (proved ε = {epsilon:g}"
        plain = of_recipe(recipe, "sound_mnist")
        yield ["random weights", f"{void} per record)", *numbers(plain)]
        yield ["rendered digits", f"{void} per record)", *numbers(started("from the prior", epsilon, 1))]
        if epsilon == 1:
            far = started("from the prior", epsilon, 1, "far")
            yield ["rendered digits for far radii", f"{void} per record)", *numbers(far)]
        yield ["random weights", f"{void} per person)", *numbers(started("from random weights", epsilon, 10))]
        yield ["rendered digits", f"{void} per person)", *numbers(started("from the prior", epsilon, 10))]
    found = tuned()
    yield ["random weights, settings searched and paid for", f"**{privacy(found)} per record**", *numbers([found])]


def page() -> str:
    found = tuned()
    return render(
        "practice",
        table=table(["start", PRIVACY, "seeds", "clean", *(f"certified at {radius}" for radius in RADII)], rows()),
        without=[f"`{name}`" for name in WITHOUT.values()],
        later={name: certified(of_recipe(name, MNIST[name]), "0.2") for name in LATER},
        tuned=found,
        small=record("prior_mnist_cpu")[0],
        attacked=found["attacked"],
    )
