"""docs/results/sound.md: what the sound method gives, how far it was attacked, and where it falls short."""

from __future__ import annotations

from collections.abc import Sequence

from stobatch_recipes import recipe

from .records import MADE, PRIVACY, VOID, Record, link, mean, percent, record, records, slashed, table

RADII = ("0.05", "0.2", "0.4", "0.6")
SEEDS = (1, 2, 3)
CIFAR10 = ("sound.cifar10", "sound.cifar10_wide", "sound.cifar10_strict", "sound.cifar10_strict_wide")
SMALL, LARGE = "0.0156863", "0.0627451"
"""2/255 and 8/255 over [0, 1], in the unit of records."""


def of_recipe(name: str, file: str) -> list[Record]:
    """Return a recipe's records by seed, and refuse those of other settings."""
    hashes = {recipe(name).override("seed", seed).training_hash: seed for seed in SEEDS}
    found = {record["seed"]: record for record in records(file) if hashes.get(record["config_hash"]) == record["seed"]}
    missing = [seed for seed in SEEDS if seed not in found]
    if missing:
        raise ValueError(f"results/{file}.json has no record of {name} as it ships, seeds {missing}.")
    return [found[seed] for seed in SEEDS]


def privacy(record: Record) -> str:
    """Who vouches for the budget of a run; a public seed makes it void, with what secret seeds would give in brackets."""
    if record["seed"] is None:
        return f"{record['status']} ε = {record['epsilon']:.1f}"
    return f"void ({record.get('status_with_secret_seeds', record['status'])} ε = {record['epsilon']:.1f})"


def certified(found: Sequence[Record], radius: str) -> str:
    return mean(record["certified"][radius] for record in found)


def left(record: Record) -> dict[str, float]:
    """Return what attacks left at each radius, under the names that certified radii have."""
    return {f"{float(radius):.6g}": share for radius, share in record["attacked"]["accuracy"].items()}


def page() -> str:
    mnist = {name: of_recipe(name, "sound_mnist") for name in ("sound.mnist", "sound.mnist_wide", "sound.mnist_strict")}
    cifar10 = {name: of_recipe(name, "sound_cifar10") for name in CIFAR10}
    votes = of_recipe("sound.mnist_l2", "sound_mnist_l2")
    tiny = of_recipe("sound.tiny_imagenet", "sound_tiny_imagenet")
    wide = sorted(record["certified"]["0.6"] for record in mnist["sound.mnist_wide"])
    hash_of = {record["config_hash"] for record in mnist["sound.mnist_wide"]}
    earlier = sorted(r["certified"]["0.6"] for r in records("sound_mnist_earlier") if r["config_hash"] in hash_of)
    return f"""# What the sound method gives

{MADE}

{VOID}
Here δ = 10⁻⁵, add or remove one example, the whole test set, means over seeds 1, 2, 3. A certificate says that no image
within the radius gets another label; *certified* counts images that are right and certified.

## MNIST, l∞ over [-1, 1]

Certificates are [bounds of the network](../guarantees/bounds.md), without chance. In bold what a recipe is for.

{
        table(
            ["recipe", PRIVACY, "clean", *(f"certified at {radius}" for radius in RADII)],
            [mnist_row(name, found) for name, found in mnist.items()],
        )
    }

The paper claims 84.3% at 0.05 and 72.4% at 0.6 (ε = 1.0) and 82.7% *under attack* at 0.2 (ε = 0.2), without a valid proof.
The models are small: one convolution, ReLU, one linear layer, behind a squashed input. Three things made the difference
against a first prototype: certifying by linear bounds what was trained by intervals, many passes in large batches, and
small first weights where ε is small ([decision 0009](../decisions/0009-bounds-for-linf-boxes-in-training.md)).

`sound.mnist_wide` is the least steady recipe: its three seeds have {percent(wide[0])} to {
        percent(wide[-1])
    } at 0.6, and three earlier
trainings, whose noise came from another generator, had {percent(earlier[0])} to {percent(earlier[-1])} ({
        link("results/sound_mnist_earlier.json")
    }).

## What attacks left of it

Seed 1 of each recipe; the other seeds were not attacked. Madry, APGD on cross-entropy, targeted APGD, 40 steps, all
10,000 images. No certificate was broken. Proved and attacked are of the same model and the same images.

{
        table(
            ["recipe", *(f"attacked / proved at {radius}" for radius in RADII)],
            [[f"`{name}`", *(both(found[0], radius) for radius in RADII)] for name, found in mnist.items()],
        )
    }

## MNIST, l2, by votes

{
        table(
            ["recipe", PRIVACY, "clean", "certified at 0.25", "at 0.5"],
            [
                ["`sound.mnist_l2`", privacy(votes[0]), mean(r["clean"] for r in votes)]
                + [certified(votes, radius) for radius in ("0.5", "1")]
            ],
        )
    }

Radii are l2 over [0, 1]. Each certificate fails with probability {
        votes[0]["certificate"]["failure_probability"]:g}, abstaining counts as wrong. What is deployed is the
vote; it was **not attacked**.

## CIFAR-10, l∞ over [0, 1]

A model for each ε and radius; images are cut to 28 x 28. Seed 1 of each was attacked as above, on all 10,000 images;
seeds 2 and 3 were **not attacked**.

{
        table(
            [
                *("recipe", PRIVACY, "clean", "certified at 2/255", "at 8/255"),
                *("seed 1, attacked / proved at 2/255", "at 8/255"),
            ],
            [cifar10_row(name, found) for name, found in cifar10.items()],
        )
    }

These numbers are low. Tried on a held-out part of the training data ([records](../../results/sound_search.jsonl)): about 80
settings of one and two hidden layers, training radii from 0.25 to 1.25 of the radius, interval, adversarial and
linear-relaxation losses; for l2 on MNIST about 20 settings of small convolutional networks with and without GroupNorm,
one to four views. Few of them had as many steps as the recipes, so there is room. No smoothed CIFAR-10 model was trained to
the end; what the models above certify in l2 at 0.25 or 0.5 over [0, 1] follows from l∞ and is nothing.

## Tiny ImageNet, 30 classes

`sound.tiny_imagenet` has CIFAR-10's settings, untuned, and {tiny[0]["test_examples"]:,} test images: privacy {
        privacy(tiny[0])
    },
{mean(r["clean"] for r in tiny)} clean, {
        certified(tiny, SMALL)
    } certified at 2/255 over [0, 1]; attacks on all three seeds left {
        mean(left(r)[SMALL] for r in tiny)
    } and broke no certificate.

## Certificates that were attacked by an audit

`stobatch audit RUN --instrument certificates --device cuda --set audit.num_inputs=1000`, seed 1 of each.

{
        table(
            ["recipe", "balls attacked", "verdict"],
            [
                [f"`{record['run']}`", finding["statement"].split(" certified")[0], finding["verdict"]]
                for record in sorted(records("sound_certificate_audits"), key=lambda record: record["run"])
                for finding in record["findings"]
            ],
        )
    }

## How they were made

Settings were compared on held-out training data, which ε does not cover; the guarantee says so. `sound.mnist` takes {
        seconds()
    } on one
H200 ({link("results/one_run_h200.json")}).

<!-- not run: hours of training on a GPU -->
```sh
stobatch train --recipe RECIPE --seed SEED --device cuda --set machine.memory_mb=8000 --out RUN
stobatch certify RUN --device cuda --set 'evaluation.radii=[0.05,0.2,0.4,0.6]'
stobatch evaluate RUN --device cuda --set 'evaluation.radii=[0.05,0.2,0.4,0.6]' --set 'evaluation.adaptive_attacks=["madry","apgd_ce","apgd_t"]' --set evaluation.restarts=1
python results/collect_sound.py RUN... > results/sound_mnist.json
```

Records: {
        link(
            *(f"results/sound_{name}.json" for name in ("mnist", "mnist_l2", "cifar10", "tiny_imagenet")),
            "results/sound_certificate_audits.json",
        )
    }.
"""


AIMS = {
    "sound.mnist": ("0.05", "0.2"),
    "sound.mnist_wide": ("0.4", "0.6"),
    "sound.mnist_strict": ("0.2",),
}


def mnist_row(name: str, found: Sequence[Record]) -> list[str]:
    shown = [certified(found, radius) for radius in RADII]
    bold = [f"**{text}**" if radius in AIMS[name] else text for radius, text in zip(RADII, shown, strict=True)]
    return [f"`{name}`", privacy(found[0]), mean(record["clean"] for record in found), *bold]


def cifar10_row(name: str, found: Sequence[Record]) -> list[str]:
    attacked = [record["seed"] for record in found if record["attacked"]]
    if attacked != [1]:
        raise ValueError(f"{name}: the page says that seed 1 was attacked, the records say {attacked}.")
    clean = mean(record["clean"] for record in found)
    both_radii = [both(found[0], radius) for radius in (SMALL, LARGE)]
    return [f"`{name}`", privacy(found[0]), clean, certified(found, SMALL), certified(found, LARGE), *both_radii]


def both(record: Record, radius: str) -> str:
    return slashed((left(record)[radius], record["certified"][radius]))


def seconds() -> str:
    """How long a training without canaries took."""
    spent = sorted(one["seconds"] for one in record("one_run_h200")["trainings"] if not one["canaries"])
    return f"{spent[0]:.1f} to {spent[-1]:.1f} seconds"
