"""docs/results/sound.md: what the sound method gives, how far it was attacked, and where it falls short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from stobatch_recipes import recipe

from .records import PRIVACY, Record, lines_of, mean, percent, record, records, render, slashed, table

RADII = ("0.05", "0.2", "0.4", "0.6")
AIMS = {
    "sound.mnist_near": ("0.05",),
    "sound.mnist": ("0.2",),
    "sound.mnist_middle": ("0.4",),
    "sound.mnist_wide": ("0.6",),
    "sound.mnist_wide_pooled": ("0.6",),
    "sound.mnist_strict_pooled": ("0.2",),
    "sound.mnist_strict": ("0.2",),
}
"""The radii that a recipe is for."""
MNIST = dict.fromkeys(AIMS, "sound_mnist") | {
    "sound.mnist_near": "sound_mnist_near",
    "sound.mnist_middle": "sound_mnist_middle",
    "sound.mnist_wide_pooled": "sound_mnist_wide_pooled",
    "sound.mnist_strict_pooled": "sound_mnist_strict_pooled",
}
"""Recipes of MNIST for l-infinity, and the files of their records."""
SEEDS = (1, 2, 3)
CIFAR10 = ("sound.cifar10", "sound.cifar10_wide", "sound.cifar10_strict", "sound.cifar10_strict_wide")
FASHION = {"sound.fashion_mnist_near": SEEDS, "sound.fashion_mnist_wide": (1,), "sound.fashion_mnist": (1,)}
"""Recipes of Fashion-MNIST, and the seeds that were trained."""
SCATTERING = ("sound.cifar10_scattering", "sound.cifar10_scattering_strict")
SCATTERING_LINF = ("sound.cifar10_scattering_linf", "sound.cifar10_scattering_strict")
FAR_BOX, FAR_BOX_TASKS = "sound.cifar10_scattering_strict_wide", ("cifar10_linf_wide", "cifar10_linf_strict_wide")
"""Recipes that are certified in boxes; the second was made for l2, and the same training does."""
BOX_TASKS = ("cifar10_linf", "cifar10_linf_strict")
"""Tasks of the search whose settings these recipes have, and those for l2."""
SMOOTHED = {"sound.cifar10_smoothed": (1,), "sound.cifar10_smoothed_strict": (1,)}
"""Recipes of smoothed photographs, and the seeds that were trained."""
POOLED_START = {
    "model.architecture": "squash 4, conv 32 5/2, relu, avgpool 2, linear",
    "training.steps": 146,
    "method.batch_size": 8192,
}
"""Where the search for `sound.mnist_strict_pooled` began."""
STEADY_START = "squash 3, conv 32 5/2, relu, avgpool 2, linear"
"""The layers that the search around `sound.mnist_wide` began with."""
SMALL, LARGE = "0.0156863", "0.0627451"
"""2/255 and 8/255 over [0, 1], in the unit of records."""


def of_recipe(name: str, file: str, seeds: Sequence[int] = SEEDS) -> list[Record]:
    """Return a recipe's records by seed, and refuse those of other settings."""
    hashes = {recipe(name).override("seed", seed).training_hash: seed for seed in seeds}
    found = {record["seed"]: record for record in records(file) if hashes.get(record["config_hash"]) == record["seed"]}
    missing = [seed for seed in seeds if seed not in found]
    if missing:
        raise ValueError(f"results/{file}.json has no record of {name} as it ships, seeds {missing}.")
    return [found[seed] for seed in seeds]


def privacy(record: Record) -> str:
    """Who vouches for the budget of a run; where its seed is public, in brackets who would if it were secret."""
    if record["seed"] is None:
        return f"{record['status']} ε = {record['epsilon']:.1f}"
    return f"void ({record.get('status_with_secret_seeds', record['status'])} ε = {record['epsilon']:.1f})"


def certified(found: Sequence[Record], radius: str) -> str:
    return mean(record["certified"][radius] for record in found)


def measured(found: Sequence[Record], radius: str) -> list[Record]:
    """Return the records that say what is proved at a radius; not every seed was certified at all of them."""
    return [record for record in found if radius in record["certified"]]


def left(record: Record) -> dict[str, float]:
    """Return what attacks left at each radius, under the names that certified radii have."""
    return {f"{float(radius):.6g}": share for radius, share in record["attacked"]["accuracy"].items()}


def page() -> str:
    mnist = {name: of_recipe(name, file) for name, file in MNIST.items()}
    cifar10 = {name: of_recipe(name, "sound_cifar10") for name in CIFAR10}
    votes = {name: of_recipe(name, name.replace(".", "_")) for name in ("sound.mnist_l2", "sound.mnist_l2_scattering")}
    attacked_votes = of_recipe("sound.mnist_l2", "sound_mnist_l2_attacked")
    tiny = of_recipe("sound.tiny_imagenet", "sound_tiny_imagenet")
    fashion = {name: of_recipe(name, name.replace(".", "_"), seeds) for name, seeds in FASHION.items()}
    scattering = {name: of_recipe(name, "sound_cifar10_scattering") for name in SCATTERING}
    in_boxes = {name: of_recipe(name, "sound_cifar10_scattering_linf") for name in SCATTERING_LINF}
    far_boxes = of_recipe(FAR_BOX, "sound_cifar10_scattering_wide", seeds=(1,))
    digits = of_recipe("sound.mnist_scattering", "sound_mnist_scattering")
    smoothed = {name: of_recipe(name, "sound_cifar10_smoothed", seeds) for name, seeds in SMOOTHED.items()}
    trials, halved = halving()
    return render(
        "sound",
        mnist_table=table(
            ["recipe", PRIVACY, "clean", *(f"certified at {radius}" for radius in RADII)],
            [mnist_row(name, found) for name, found in mnist.items()],
        ),
        attacked_table=table(
            ["recipe", *(f"attacked / proved at {radius}" for radius in RADII)],
            [attacked_row(name, found) for name, found in mnist.items() if name != "sound.mnist_strict"],
        ),
        branches_table=table(["recipe", "seeds", "radius", "slopes", "branches"], list(branches_rows(mnist))),
        fashion_table=table(
            [
                *("recipe", PRIVACY, "seeds", "clean", "certified at 0.05", "certified at 0.2"),
                *("attacks left of the first 1,000 at 0.05", "at 0.2"),
            ],
            [fashion_row(name, found) for name, found in fashion.items()],
        ),
        near=shares_at(mnist["sound.mnist_near"], "0.05"),
        fashion_near=shares_at(fashion["sound.fashion_mnist_near"], "0.05"),
        fashion_wide=shares_at(fashion["sound.fashion_mnist_wide"], "0.2"),
        near_table=named_trials("sound.mnist_near", "0.05", {}),
        pooled=shares_at(mnist["sound.mnist_strict_pooled"], "0.2"),
        pooled_table=named_trials("sound.mnist_strict_pooled", "0.2", POOLED_START),
        far_table=far_trials(),
        far_before=percent(best_trial("mnist_0.6")["score"]),
        sharp_trials=sharp_trials(),
        steady_table=steady_trials(),
        far=shares_at(mnist["sound.mnist_wide_pooled"], "0.6"),
        finalist=of_finalist(),
        middle_trials=middle_trials(),
        fashion_near_table=named_trials("sound.fashion_mnist_near", "0.05", {"training.learning_rate": 8.0}),
        fashion_wide_table=named_trials("sound.fashion_mnist_wide", "0.2", {"method.radius": 0.16}),
        trials=trials,
        halved_table=table(["settings", "clean", "certified at 0.05", "certified at 0.2"], halved),
        verified_table=table(
            ["recipe, seed", "bounds", *(f"at {radius}" for radius in RADII), "CPU s an image"], verified_rows()
        ),
        finals_table=table(["settings", "clean", "certified at 0.05", "at 0.2"], [finals_row()]),
        strict_trials=strict_trials(),
        fashion_searched=fashion_searched(),
        former=mean(one["certified"]["0.2"] for one in records("sound_mnist_strict_former")),
        wide=[spread(found, "0.6") for found in (mnist["sound.mnist_wide"], former("sound_mnist_former", 0.6))],
        votes=votes["sound.mnist_l2"],
        votes_left=[left_of_few(found[0], "0.5") for found in (attacked_votes, votes["sound.mnist_l2_scattering"])],
        digits_searched=searched("mnist", ("0.5", "1")),
        votes_table=table(
            ["recipe", "images", PRIVACY, "clean", "certified at 0.25", "at 0.5"],
            [
                *(votes_row(name, found) for name, found in votes.items()),
                votes_row("sound.mnist_l2", attacked_votes),
            ],
        ),
        cifar10_table=table(
            [
                *("recipe", PRIVACY, "clean", "certified at 2/255", "at 8/255"),
                *("seed 1, attacked / proved at 2/255", "at 8/255"),
            ],
            [cifar10_row(name, found) for name, found in cifar10.items()],
        ),
        scattering_table=table(
            [
                *("recipe", "seeds", PRIVACY, "clean", "certified at 16/255", "certified at 0.25"),
                *("seed 1, attacked / proved at 16/255", "at 0.25"),
            ],
            [margins_row(name, found) for name, found in scattering.items()],
        ),
        scattering_attacked=scattering["sound.cifar10_scattering_strict"][0]["attacked"],
        scattering_spread=spread(scattering["sound.cifar10_scattering_strict"], "0.5"),
        in_boxes_table=table(
            ["recipe", "seeds", PRIVACY, "clean", "certified at 2/255", "seed 1, attacked / proved at 2/255"],
            [margins_row(name, found) for name, found in in_boxes.items()],
        ),
        in_boxes_attacked=in_boxes["sound.cifar10_scattering_linf"][0]["attacked"],
        in_boxes_spread=[spread(found, SMALL) for found in in_boxes.values()],
        far_boxes_table=table(
            ["recipe", "seeds", PRIVACY, "clean", "certified at 8/255", "attacked / proved at 8/255"],
            [margins_row(FAR_BOX, far_boxes)],
        ),
        far_boxes_images=images(far_boxes[0]),
        far_boxes_attacked=far_boxes[0]["attacked"],
        far_boxes_attacked_before=records("sound_cifar10_scattering_wide")[0]["attacked"],
        far_boxes_bars=[verdict(cifar10["sound.cifar10_wide"], {LARGE: 0.23}), verdict(far_boxes, {LARGE: 0.2})],
        far_boxes_drawn=margins_drawn(FAR_BOX_TASKS),
        far_boxes_best=margins_best(FAR_BOX_TASKS),
        digits_table=table(
            [
                *("recipe", "seeds", PRIVACY, "clean", "certified at 0.25", "certified at 0.5"),
                *("seed 1, attacked / proved at 0.25", "at 0.5"),
            ],
            [margins_row("sound.mnist_scattering", digits)],
        ),
        digits_attacked=digits[0]["attacked"],
        former_scattering=former_shares("sound_cifar10_scattering_former"),
        former_in_boxes=former_shares("sound_cifar10_scattering_linf_former"),
        former_digits=former_shares("sound_mnist_scattering_former"),
        in_boxes_trials=margins_trials(BOX_TASKS, ("2/255",)),
        in_boxes_drawn=margins_drawn(BOX_TASKS),
        digits_trials=margins_trials(("mnist_l2",), ("0.25", "0.5")),
        digits_drawn=margins_drawn(("mnist_l2",)),
        digits_spread=spread(digits, "1"),
        digits_bars=verdict(digits, {"clean": 0.982, "0.5": 0.966, "1": 0.935}),
        digits_goals=verdict(digits, {"clean": 0.987, "0.5": 0.975, "1": 0.955}),
        in_boxes_bars=verdicts(in_boxes, SMALL, (0.4, 0.36)),
        in_boxes_goals=verdicts(in_boxes, SMALL, (0.46, 0.42)),
        scattering_bars=[
            verdict(scattering[name], {radius: bar})
            for name, radius, bar in zip(SCATTERING, ("0.12549", "0.5"), (0.4, 0.33), strict=True)
        ],
        smoothed=smoothed["sound.cifar10_smoothed_strict"],
        smoothed_table=table(
            [
                *("recipe", PRIVACY, "seeds", "clean", "certified at 0.25", "at 0.5"),
                *("l∞ 2/255, follows from l2 0.3804", "seed 1: attacks left at 0.25"),
            ],
            [smoothed_row(name, found) for name, found in smoothed.items()],
        ),
        former_smoothed=smoothed_row("", former("sound_cifar10_smoothed_former"))[3:7],
        searched=searched("cifar10", ("0.5", "0.7608")),
        start=start_of_tiny(),
        tiny=tiny,
        tiny_clean=mean(record["clean"] for record in tiny),
        tiny_certified=certified(tiny, SMALL),
        tiny_left=mean(left(record)[SMALL] for record in tiny),
        audits_table=table(["recipe", "balls attacked", "verdict"], audit_rows()),
        privacy=privacy,
        seconds=seconds(),
    )


def halving() -> tuple[list[Record], list[list[str]]]:
    """Return all trials of the search on Fashion-MNIST on a CPU, and rows of those that went on to its last rung."""
    trials = [trial for trial in lines_of("results/sound_halving.jsonl") if trial["task"] == "fashion_mnist_cpu"]
    last = sorted((one for one in trials if one["share"] == max(t["share"] for t in trials)), key=lambda t: -t["score"])
    return trials, [[trial_name(one), percent(one["clean"]), *map(percent, one["certified"].values())] for one in last]


def trial_name(trial: Record) -> str:
    """Say whose settings a trial has: of MNIST's recipe, or those that became Fashion-MNIST's."""
    if not trial["settings"]:
        return "`sound.mnist`, 200 steps of 4,096"
    ours = recipe("sound.fashion_mnist")
    if ours.override_all(trial["settings"]) != ours:
        raise ValueError("sound.fashion_mnist has other settings than the trial that it comes from.")
    return "`sound.fashion_mnist`"


def named_trials(name: str, radius: str, start: Mapping[str, object]) -> str:
    """Return the trials that a recipe comes from as a table, the best first, which has to be the recipe as it ships.

    `start` is where the search's first settings differ from the recipe.
    """
    ours, of_mnist, rows = recipe(name), recipe("sound.mnist"), []
    task = name.partition(".")[2]
    trials = [one for one in lines_of("results/sound_halving.jsonl") if one["task"] == task]
    for one in sorted(trials, key=lambda trial: -trial["score"]):
        settings = {**start, **one["settings"]}
        tried = ours.override_all(settings)
        changed = [f"`{key.partition('.')[2]}={to}`" for key, to in settings.items() if ours.override(key, to) != ours]
        if (tried.model, tried.training) == (of_mnist.model, of_mnist.training):
            changed = ["the settings of `sound.mnist`"]
        if bool(rows) is not bool(changed):
            raise ValueError(f"{name} has other settings than the best trial of its search.")
        shown = ", ".join(changed) or f"`{name}`"
        rows.append([shown, percent(one["clean"]), percent(one["certified"][radius])])
    return table(["settings", "clean", f"certified at {radius}"], rows)


def best_trial(task: str) -> Record:
    return max(
        (one for one in lines_of("results/sound_halving.jsonl") if one["task"] == task), key=lambda t: t["score"]
    )


def middle_trials() -> tuple[int, str, str]:
    """Return how many trials of means there were at 0.4, the best score, and that of `sound.mnist_middle`."""
    trials = [one for one in lines_of("results/sound_halving.jsonl") if one["task"] == "mnist_middle_pooled"]
    before = [
        one["score"]
        for one in lines_of("results/sound_halving.jsonl")
        if one["task"] == "mnist_0.4" and one["settings"].get("model.first_weights") == "box" and one["share"] == 1
    ]
    return len(trials), percent(best_trial("mnist_middle_pooled")["score"]), percent(max(before))


def far_trials() -> str:
    """Return the trials of means of windows at a radius of 0.6 as a table, the best first; no recipe came of them."""
    first = {"model.architecture": "squash 3, conv 32 5/2, relu, avgpool 2, linear", "training.steps": 293}
    trials = [one for one in lines_of("results/sound_halving.jsonl") if one["task"] == "mnist_far"]
    rows = [
        [
            ", ".join(f"`{key.partition('.')[2]}={to}`" for key, to in {**first, **one["settings"]}.items()),
            percent(one["clean"]),
            percent(one["certified"]["0.6"]),
        ]
        for one in sorted(trials, key=lambda trial: -trial["score"])
    ]
    return table(["settings", "clean", "certified at 0.6"], rows)


def steady_trials() -> str:
    """Return the best trials around the far recipe as a table, the start and how many there were last."""
    start = recipe("sound.mnist_wide").override("model.architecture", STEADY_START)
    trials = [one for one in lines_of("results/sound_halving.jsonl") if one["task"] == "mnist_far_steady"]
    best = sorted(trials, key=lambda trial: -trial["score"])
    rows = []
    for one in (*best[:8], next(one for one in best if not one["settings"])):
        tried = start.override_all(one["settings"])
        name = "`sound.mnist_wide_pooled`" if tried == recipe("sound.mnist_wide_pooled") else None
        changed = ", ".join(f"`{key.partition('.')[2]}={to}`" for key, to in one["settings"].items())
        rows.append([name or changed or "where it began", percent(one["clean"]), percent(one["certified"]["0.6"])])
    return table([f"settings, of {len(trials)}", "clean", "certified at 0.6"], rows)


def of_finalist() -> tuple[str, str]:
    """Return the mean and the spread at 0.6 of the other settings that won the search around the far recipe."""
    found = records("sound_mnist_wide_finalist")
    return certified(found, "0.6"), spread(found, "0.6")


def sharp_trials() -> list[str]:
    """Return what trials of the far recipe's own network, and of other squashes before it, prove at 0.6."""
    trials = [one for one in lines_of("results/sound_halving.jsonl") if one["task"] == "mnist_far_sharp"]
    named = ((one["settings"].get("model.architecture", "the recipe's").partition(",")[0], one) for one in trials)
    return [f"{squash} {percent(one['certified']['0.6'])}" for squash, one in named]


def shares_at(found: Sequence[Record], radius: str) -> Record:
    """Return what seeds prove at a radius, its spread, and what attacks left and bounds proved of the first 1,000."""
    attacked = [one["attacked"] for one in found]
    proved_of_them = (one["certified_of_them"]["bounds"][radius] for one in attacked)
    return {
        "proved": certified(found, radius),
        "spread": spread(found, radius),
        "left": slashed((fmean(one["accuracy"][radius] for one in attacked), fmean(proved_of_them))),
    }


def fashion_row(name: str, found: Sequence[Record]) -> list[str]:
    """Return what seeds of a recipe have on Fashion-MNIST; nothing may be broken."""
    if any(one["attacked"]["broken_certificates"] for one in found):
        raise ValueError("the page says that no certificate was broken, the records say otherwise.")
    radii = ("0.05", "0.2")
    clean, shares = mean(one["clean"] for one in found), (certified(found, radius) for radius in radii)
    after = (mean(left(one)[radius] for one in found) for radius in radii)
    return [f"`{name}`", privacy(found[0]), str(len(found)), clean, *shares, *after]


def former(file: str, train_radius: float | None = None) -> list[Record]:
    """Return records of settings that a recipe had before a search found better ones."""
    return [one for one in records(file) if train_radius in (None, one["train_radius"])]


def former_shares(file: str) -> list[list[str]]:
    """Return accuracy and what is proved at each radius, of each record of former settings."""
    return [[mean([one["clean"]]), *(mean([share]) for share in one["certified"].values())] for one in former(file)]


def verdict(found: Sequence[Record], asked: Mapping[str, float]) -> str:
    """Say whether means over seeds reach all numbers that were asked for: of accuracy, or of what is proved."""
    means = {at: fmean(one["clean"] if at == "clean" else one["certified"][at] for one in found) for at in asked}
    return "reached" if all(means[at] >= share for at, share in asked.items()) else "**missed**"


def verdicts(found: Mapping[str, Sequence[Record]], radius: str, asked: Sequence[float]) -> list[str]:
    """Say the same of each recipe, at one radius."""
    return [verdict(of_one, {radius: share}) for of_one, share in zip(found.values(), asked, strict=True)]


def spread(found: Sequence[Record], radius: str) -> str:
    """Return the least and the most that seeds have at a radius."""
    shares = sorted(one["certified"][radius] for one in found)
    return f"{percent(shares[0])} to {percent(shares[-1])}"


def attacked_row(name: str, found: Sequence[Record]) -> list[str]:
    """Return what attacks leave and what is proved of the same images, means over seeds; nothing may be broken."""
    if any(one["attacked"]["broken_certificates"] for one in found):
        raise ValueError("the page says that no certificate was broken, the records say otherwise.")
    of_radius = [
        [(left(one)[radius], one["attacked"]["certified_of_them"]["bounds"][radius]) for one in measured(found, radius)]
        for radius in RADII
    ]
    return [f"`{name}`", *(slashed(fmean(column) for column in zip(*own, strict=True)) for own in of_radius)]


def branches_rows(mnist: Mapping[str, Sequence[Record]]) -> Iterator[list[str]]:
    """Yield what branches add to slopes, on all test images, at the radius that they were spent on."""
    known = {one["config_hash"]: (name, one) for name, found in mnist.items() for one in found}
    groups: dict[tuple[str, str], list[tuple[Record, Record]]] = {}
    for one in records("sound_mnist_branches"):
        name, with_slopes = known[one["config_hash"]]
        (radius,) = one["certified"]
        groups.setdefault((name, radius), []).append((with_slopes, one))
    for (name, radius), pairs in groups.items():
        with_slopes, with_branches = (certified(own, radius) for own in zip(*pairs, strict=True))
        yield [f"`{name}`", str(len(pairs)), radius, with_slopes, with_branches]


def finals_row() -> list[str]:
    """Return what a search on Fashion-MNIST ended in, where no other setting did better than MNIST's own."""
    found = records("sound_finals")
    if any(one["settings"] or one["attacked"]["broken_certificates"] for one in found):
        raise ValueError("the page says that the recipe's settings won and no certificate was broken.")
    return ["`sound.mnist`", mean(one["clean"] for one in found), *(certified(found, r) for r in ("0.05", "0.2"))]


def searched(task: str, radii: Sequence[str]) -> str:
    """Return a search's trials as a table, the best first; settings are named where they differ from the recipe's."""
    trials = [one for one in lines_of("results/votes_search.jsonl") if one["task"] == task]
    rows = {}
    for one in sorted(trials, key=lambda trial: -sum(trial["estimated"][radius] for radius in radii)):
        settings = one["set"] | one["settings"]
        name = ", ".join(f"`{key.partition('.')[2]}={value}`" for key, value in settings.items()) or "as it was"
        rows.setdefault(name, [percent(one["clean"]), *(percent(one["estimated"][radius]) for radius in radii)])
    header = ("settings", "clean", *(f"at {float(radius) / 2:g}" for radius in radii))
    return table(header, [[name, *shares] for name, shares in rows.items()])


def start_of_tiny() -> Record:
    """Return the record of Tiny ImageNet from CIFAR-10, which has to be of the recipe that ships, but for its start."""
    (found,) = records("sound_tiny_imagenet_smoothed")
    if recipe("sound.tiny_imagenet_smoothed").override("seed", 1).training_hash != found["recipe_hash"]:
        raise ValueError("sound.tiny_imagenet_smoothed has other settings than its record.")
    return found


def fashion_searched() -> int:
    """Return how many changes of MNIST's settings were tried on Fashion-MNIST, on a GPU."""
    trials = (one for one in lines_of("results/sound_halving.jsonl") if one["task"] == "fashion_mnist")
    return len({str(one["settings"]) for one in trials if one["settings"]})


def strict_trials() -> tuple[str, str]:
    """Return the held-out scores of the settings that `sound.mnist_strict` had, and of those that it has."""
    trials = [t for t in lines_of("results/sound_halving.jsonl") if t["task"] == "mnist_strict" and t["share"] == 0.25]
    (before,) = (trial["score"] for trial in trials if not trial["settings"])
    best = max(trials, key=lambda trial: trial["score"])
    ours = recipe("sound.mnist_strict")
    if ours.override_all(best["settings"]) != ours:
        raise ValueError("sound.mnist_strict has other settings than the trial that it comes from.")
    return percent(before), percent(best["score"])


def verified_rows() -> Iterator[list[str]]:
    """Each model by each effort, and what attacks leave."""
    names = {recipe(name).override("seed", seed).training_hash: name for name in AIMS for seed in SEEDS}
    for found in records("sound_mnist_verified"):
        if found["broken_certificates"]:
            raise ValueError("the page says that no proved ball was broken, the records say otherwise.")
        for effort, shares in found["certified"].items():
            row = [f"`{names[found['config_hash']]}`, {found['seed']}", effort]
            yield [*row, *(mean([shares[radius]]) for radius in RADII), f"{found['cpu_seconds_per_image'][effort]:.3f}"]
        yield ["", "attacked", *(mean([found["attacked"][radius]]) for radius in RADII), ""]


def votes_row(name: str, found: Sequence[Record]) -> list[str]:
    shares = (certified(found, radius) for radius in ("0.5", "1"))
    return [f"`{name}`", images(found[0]), privacy(found[0]), mean(record["clean"] for record in found), *shares]


def left_of_few(record: Record, radius: str) -> str:
    """Return what attacks on the vote left of how many images; a broken certificate is an error."""
    attacked = record["attacked"]
    if attacked["broken_certificates"]:
        raise ValueError("the page says that no proved ball was broken, the records say otherwise.")
    return f"{percent(attacked['accuracy'][radius])} of {attacked['test_examples']}"


def margins_row(name: str, found: Sequence[Record]) -> list[str]:
    """Return what is proved, means over seeds, and of what was attacked of the first what attacks leave beside it."""
    shares = [mean(one["clean"] for one in found), *(certified(found, radius) for radius in found[0]["certified"])]
    return [f"`{name}`", str(len(found)), privacy(found[0]), *shares, *attacked_by_proved(found[0])]


def attacked_by_proved(found: Record) -> list[str]:
    """Return what attacks left and what is proved of the same images, by radius; a broken certificate is an error."""
    attacked = found["attacked"]
    if attacked["broken_certificates"]:
        raise ValueError("the page says that no proved ball was broken, the records say otherwise.")
    proved = attacked["certified_of_them"]["margins"]
    pairs = [(share, proved[f"{float(radius):.6g}"]) for radius, share in attacked["accuracy"].items()]
    return list(map(slashed, pairs))


def images(record: Record) -> str:
    """Say how many test images were certified."""
    return f"first {record['test_examples']:,}" if record["test_examples"] < 10_000 else "all"


def margins_trials(tasks: Sequence[str], radii: Sequence[str]) -> str:
    """Return the certified trials of linear layers behind scattering as a table."""
    rows = []
    for trial in lines_of("results/margins_search.jsonl"):
        if trial["task"] in tasks and "certified" in trial:
            named = ", ".join(f"`{key.partition('.')[2]}={value}`" for key, value in trial["settings"].items())
            proved = (trial[part].values() for part in ("at_first_order", "certified", "by_constants"))
            shares = (trial["clean_of_all"], *(share for of_part in proved for share in of_part))
            rows.append([f"`{trial['task']}`", named, *map(percent, shares)])
    named = (f"{words} at {radius}" for words in ("first order", "certified", "by constants") for radius in radii)
    return table(["task", "settings", "clean", *named], rows)


def margins_drawn(tasks: Sequence[str]) -> int:
    """Return how many settings were tried."""
    return len({str(one["settings"]) for one in lines_of("results/margins_search.jsonl") if one["task"] in tasks})


def margins_best(tasks: Sequence[str]) -> str:
    """Return the most that a trial would prove at first order."""
    return percent(max(one["score"] for one in lines_of("results/margins_search.jsonl") if one["task"] in tasks))


def smoothed_row(name: str, found: Sequence[Record]) -> list[str]:
    shares = [certified(found, radius) for radius in ("0.5", "1", "0.7608")]
    clean = mean(record["clean"] for record in found)
    return [f"`{name}`", privacy(found[0]), str(len(found)), clean, *shares, left_of_few(found[0], "0.5")]


def audit_rows() -> Iterator[list[str]]:
    for audited in sorted(records("sound_certificate_audits"), key=lambda record: str(record["run"])):
        current = recipe(audited["run"]).override("seed", audited["seed"]).training_hash == audited["training_hash"]
        name = f"`{audited['run']}`" + ("" if current else ", with settings that it had before")
        for finding in audited["findings"]:
            yield [name, finding["statement"].partition(" certified")[0], finding["verdict"]]


def mnist_row(name: str, found: Sequence[Record]) -> list[str]:
    shown = [certified(measured(found, radius), radius) for radius in RADII]
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
