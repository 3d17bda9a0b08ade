"""docs/results/baselines.md: every method that is compared, on the same network, with its figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import getitem
from statistics import fmean

from matplotlib.figure import Figure

from .records import PRIVACY, THIRD, Record, percent, records, render, slashed, table

RADII = ("0.05", "0.2", "0.4")
ORDER = (
    *("plain", "vanilla-adversarial", "pixeldp"),
    *("dpsgd", "adlm", "securesgd", "securesgd-agm", "published"),
    *("dp-adversarial", "dp-adversarial-squashed", "dp-smoothing", "sound"),
)
PROVED_RULES = ("tight", "bounds", "votes")


def in_common_form(record: Record) -> Record:
    """Return a record of the published mechanism as one of the single pass, about which it certifies nothing."""
    attacks = [entry for entry in record["under_attack"] if entry["function"] == "single_pass"]
    return {
        **record,
        "row": f"published-eps-{record['claimed_epsilon']:g}",
        # Refuted wherever it was audited: docs/guarantees/audits.md.
        "status": "refuted",
        "refuted_epsilon": record["claimed_epsilon"],
        "function": "single_pass",
        "clean": {"accuracy": record["clean"], "test_examples": record["test_examples"]},
        "under_attack": {
            entry["protocol"]: {"accuracy": entry["accuracy"]["worst"], "test_examples": entry["test_examples"]}
            for entry in attacks
        },
        "certified": {},
    }


def groups() -> dict[str, list[Record]]:
    """Return the records of each row, ceilings first, then by budget."""
    found: dict[str, list[Record]] = {}
    for record in records("baselines_mnist"):
        found.setdefault(record["row"], []).append(record)
    budgets = {epsilon(own[0]) for own in found.values()}
    for record in map(in_common_form, records("paper_mnist")):
        if epsilon(record) in budgets:
            found.setdefault(record["row"], [record])
    return dict(sorted(found.items(), key=lambda item: (epsilon(item[1][0]) or 0.0, ORDER.index(method(item[0])))))


def method(row: str) -> str:
    """Return a row's name without its budget."""
    return row.partition("-eps-")[0]


def epsilon(record: Record) -> float | None:
    found = record.get(f"{record['status']}_epsilon")
    return None if found is None else round(found, 2)


def privacy(record: Record) -> str:
    """Who vouches for a row's budget; in brackets, of one that is void, who would if its seeds were secret."""
    if record["status"] == "none":
        return "no privacy"
    held = f"{record.get('status_with_secret_seeds', record['status'])} ε = {epsilon(record):g}"
    return f"void ({held})" if record["seed"] is not None and record["status"] != "refuted" else held


def images(record: Record) -> tuple[int, int, int | None]:
    """Return of how many test images clean, attacked and certified accuracy are."""
    (attacked,) = {under["test_examples"] for under in record["under_attack"].values()}
    certified = {found["test_examples"] for found in record["certified"].values()}
    return record["clean"]["test_examples"], attacked, max(certified, default=None)


def attacked(records: Sequence[Record], protocol: str, radius: str) -> float:
    return fmean(record["under_attack"][protocol]["accuracy"][radius] for record in records)


def certified(records: Sequence[Record], rules: tuple[str, ...], radius: str) -> float | None:
    rule = next((rule for rule in rules if rule in records[0]["certified"]), None)
    return None if rule is None else fmean(record["certified"][rule]["accuracy"][radius] for record in records)


def rows() -> Iterator[list[str]]:
    for row, own in groups().items():
        vote = ", vote" if own[0]["function"] == "vote" else ""
        proved = [share for radius in RADII[:2] if (share := certified(own, PROVED_RULES, radius)) is not None]
        compared = certified(own, ("as compared",), "0.05")
        yield [
            f"`{method(row).replace('-', '_')}`{vote}",
            privacy(own[0]),
            str(len(own)),
            " / ".join(f"{count:,}" for count in images(own[0]) if count is not None),
            percent(fmean(record["clean"]["accuracy"] for record in own)),
            percent(attacked(own, "published", "0.2")),
            slashed(attacked(own, "adaptive", radius) for radius in RADII),
            slashed(proved) if proved else "",
            "" if compared is None else percent(compared),
        ]


def draw() -> Figure:
    """Accuracy at radius 0.2 for every row: under both protocols, proved, and clean, as far as of the same images."""
    shown = groups()
    figure = Figure(figsize=(8.2, 0.34 * len(shown) + 1.1), layout="constrained")
    axes = figure.subplots()

    def clean(own: Sequence[Record]) -> float | None:
        counts = images(own[0])
        return fmean(r["clean"]["accuracy"] for r in own) if counts[0] == counts[1] else None

    def proved(own: Sequence[Record]) -> float | None:
        counts = images(own[0])
        return certified(own, PROVED_RULES, "0.2") if counts[2] == counts[1] else None

    series = {
        "clean": (THIRD, "o", clean),
        "attacked as published": ("#d08a2e", "^", lambda own: attacked(own, "published", "0.2")),
        "attacked adaptively": ("#b3362f", "s", lambda own: attacked(own, "adaptive", "0.2")),
        "certified, proved": ("#2b6cb0", "D", proved),
    }
    for label, (colour, marker, value) in series.items():
        points = [(100 * share, place) for place, share in enumerate(map(value, shown.values())) if share is not None]
        axes.plot(*zip(*points, strict=True), linestyle="", marker=marker, color=colour, label=label)
    names = [f"{method(row)} ({privacy(own[0])})" for row, own in shown.items()]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(-2, 102), xlabel="accuracy at l∞ radius 0.2 over [-1, 1], % of the same images in each row")
    axes.grid(axis="y", linewidth=0.4)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def figures() -> dict[str, Figure]:
    return {"baselines_mnist": draw()}


def each(row: str, *path: str) -> list[float]:
    """Return a number of a row for each seed, in %."""
    own = [record for record in records("baselines_mnist") if record["row"] == row]
    return [100 * reduce(getitem, path, record) for record in own]  # type: ignore[arg-type]


def mean(row: str, *path: str) -> float:
    return fmean(each(row, *path))


def clean(row: str) -> float:
    return mean(row, "clean", "accuracy")


def left(row: str, protocol: str, radius: str = "0.2") -> float:
    return mean(row, "under_attack", protocol, "accuracy", radius)


def t_test(first: str, second: str, measure: str, radius: float | None) -> Record:
    wanted = (first, second, measure, radius)
    keys = ("first", "second", "measure", "radius")
    return next(test for test in records("baselines_mnist_t_tests") if tuple(test[key] for key in keys) == wanted)


def seconds(kind: str) -> str:
    spent = [r["training_seconds"] for r in records("baselines_mnist") if r["device"].startswith(kind)]
    return f"{min(spent):.0f} to {max(spent):.0f} s"


def page() -> str:
    squashed = groups()["dp-adversarial-squashed-eps-1"]
    (pixeldp,) = [record for record in records("baselines_mnist_radii") if record["row"] == "pixeldp"]
    adversarial = each("dp-adversarial-eps-1", "under_attack", "adaptive", "accuracy", "0.2")
    tests = records("baselines_mnist_t_tests")
    return render(
        "baselines",
        mnist_table=table(
            [
                *("method", PRIVACY, "seeds", "images: clean / attacked / certified", "clean"),
                *("attacked as published at 0.2", "attacked adaptively at 0.05 / 0.2 / 0.4"),
                *("certified (proved) at 0.05 / 0.2", '"certified" at 0.05 as compared (claimed)'),
            ],
            rows(),
        ),
        cifar10_table=table(
            [
                *("method", PRIVACY, "steps", "images", "clean", "attacked as published at 0.0157 / 0.05"),
                *("attacked adaptively at the same", "certified (proved) at the same"),
            ],
            map(cifar10_row, records("baselines_cifar10")),
        ),
        clean=clean,
        left=left,
        lowest={row: min(each(row, "clean", "accuracy")) for row in ("dpsgd-eps-1", "dpsgd-eps-3")},
        adversarial_seeds=", ".join(f"{share:.1f}" for share in adversarial),
        gain=t_test("dp-adversarial-eps-1", "dpsgd-eps-1", "adaptive", 0.2),
        loss=t_test("dp-adversarial-eps-1", "dpsgd-eps-1", "clean", None),
        agm=t_test("securesgd-agm-eps-1", "securesgd-eps-1", "clean", None),
        proved=[certified(squashed, PROVED_RULES, radius) for radius in RADII[:2]],
        compared={row: certified(own, ("as compared",), "0.05") for row, own in groups().items()},
        published=left_of_published(),
        curve=pixeldp["certified"]["as compared"]["accuracy"],
        pixeldp=pixeldp,
        num_tests=len(tests),
        below=sum(test["p_value"] < 0.05 for test in tests),
        seconds=seconds,
    )


def left_of_published() -> float:
    """Return what the published protocol leaves of the published mechanism at ε = 0.2 and radius 0.2, in %."""
    (own,) = groups()["published-eps-0.2"]
    return 100 * float(own["under_attack"]["published"]["accuracy"]["0.2"])


def cifar10_row(record: Record) -> list[str]:
    radii = ("0.0156863", "0.05")
    under, rules = record["under_attack"], record["certified"] or {}
    shown = [
        "not attacked" if under is None else slashed(under[protocol]["accuracy"][radius] for radius in radii)
        for protocol in ("published", "adaptive")
    ]
    rule = next((rule for rule in PROVED_RULES if rule in rules), None)
    proved = "" if rule is None else slashed(rules[rule]["accuracy"][radius] for radius in radii)
    clean = record["clean"]
    numbers = [f"{record['steps']:,}", f"{clean['test_examples']:,}", percent(clean["accuracy"])]
    vote = ", vote" if record["function"] == "vote" else ""
    return [f"`{record['method']}`{vote}", privacy(record), *numbers, *shown, proved]
