"""The README's table of baselines, and its figure, from the records: `python docs/make_baselines.py`.

Prints the rows of the table, and writes docs/figures/baselines_mnist.svg if matplotlib is there. Every row carries who
vouches for its budget, which is void where its seeds are public, and of how many images its numbers are; in the figure
the marks of a row are of the same images. Numbers are means over the seeds that there are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
RADII = ("0.05", "0.2", "0.4")
ORDER = (
    *("plain", "vanilla-adversarial", "pixeldp"),
    *("dpsgd", "adlm", "securesgd", "securesgd-agm", "published"),
    *("dp-adversarial", "dp-adversarial-squashed", "dp-smoothing", "sound"),
)
PROVED_RULES = ("tight", "bounds", "votes")

Record = dict[str, Any]


def records(name: str) -> list[Record]:
    found: list[Record] = json.loads((ROOT / "results" / f"{name}.json").read_text())
    return found


def in_common_form(record: Record) -> Record:
    """The published mechanism's own records, of the single pass, which no certificate of its speaks about."""
    attacks = [entry for entry in record["under_attack"] if entry["function"] == "single_pass"]
    return {
        **record,
        "row": f"published-eps-{record['claimed_epsilon']:g}",
        # Refuted wherever it was audited: docs/guarantees.md, section 8.
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
    """Records of one row each, ceilings first, then by budget."""
    found: dict[str, list[Record]] = {}
    for record in records("baselines_mnist"):
        found.setdefault(record["row"], []).append(record)
    budgets = {epsilon(own[0]) for own in found.values()}
    for record in map(in_common_form, records("paper_mnist")):
        if epsilon(record) in budgets:
            found.setdefault(record["row"], [record])
    return dict(sorted(found.items(), key=lambda item: _place(*item)))


def method(row: str) -> str:
    """A row's name without its budget."""
    return row.partition("-eps-")[0]


def _place(row: str, records: list[Record]) -> tuple[float, int]:
    return epsilon(records[0]) or 0.0, ORDER.index(method(row))


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
    """Of how many test images clean, attacked and certified accuracy are."""
    (attacked,) = {under["test_examples"] for under in record["under_attack"].values()}
    certified = {found["test_examples"] for found in record["certified"].values()}
    return record["clean"]["test_examples"], attacked, max(certified, default=None)


def attacked(records: list[Record], protocol: str, radius: str) -> float:
    return fmean(record["under_attack"][protocol]["accuracy"][radius] for record in records)


def certified(records: list[Record], rules: tuple[str, ...], radius: str) -> float | None:
    rule = next((rule for rule in rules if rule in records[0]["certified"]), None)
    return None if rule is None else fmean(record["certified"][rule]["accuracy"][radius] for record in records)


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def lines() -> Iterator[str]:
    """The table's rows."""
    for row, records in groups().items():
        name = (
            "`" + row.split("-eps-")[0].replace("-", "_") + "`" + (", vote" if records[0]["function"] == "vote" else "")
        )
        adaptive = " / ".join(f"{100 * attacked(records, 'adaptive', radius):.1f}" for radius in RADII)
        proved = certified(records, PROVED_RULES, "0.05"), certified(records, PROVED_RULES, "0.2")
        both = "" if None in proved else " / ".join(f"{100 * share:.1f}%" for share in proved if share is not None)
        cells = (
            name,
            privacy(records[0]),
            str(len(records)),
            " / ".join(f"{count:,}" for count in images(records[0]) if count is not None),
            percent(fmean(record["clean"]["accuracy"] for record in records)),
            percent(attacked(records, "published", "0.2")),
            f"{adaptive}%",
            both,
            percent(certified(records, ("as compared",), "0.05")),
        )
        yield "| " + " | ".join(cells) + " |"


def draw() -> None:
    """Accuracy at radius 0.2 for every row: under both protocols, proved, and clean, as far as of the same images."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = groups()
    figure = Figure(figsize=(8.2, 0.34 * len(rows) + 1.1), layout="constrained")
    axes = figure.subplots()

    def clean(records: list[Record]) -> float | None:
        counts = images(records[0])
        return fmean(r["clean"]["accuracy"] for r in records) if counts[0] == counts[1] else None

    def proved(records: list[Record]) -> float | None:
        counts = images(records[0])
        return certified(records, PROVED_RULES, "0.2") if counts[2] == counts[1] else None

    series = {
        "clean": ("#8a8a8a", "o", clean),
        "attacked as published": ("#d08a2e", "^", lambda records: attacked(records, "published", "0.2")),
        "attacked adaptively": ("#b3362f", "s", lambda records: attacked(records, "adaptive", "0.2")),
        "certified, proved": ("#2b6cb0", "D", proved),
    }
    for label, (colour, marker, value) in series.items():
        points = [(100 * share, place) for place, share in enumerate(map(value, rows.values())) if share is not None]
        axes.plot(*zip(*points, strict=True), linestyle="", marker=marker, color=colour, label=label)
    names = [f"{method(row)} ({privacy(records[0])})" for row, records in rows.items()]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(-2, 102), xlabel="accuracy at l∞ radius 0.2 over [-1, 1], % of the same images in each row")
    axes.grid(axis="y", linewidth=0.4)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    target = ROOT / "docs" / "figures" / "baselines_mnist.svg"
    with matplotlib.rc_context({"svg.hashsalt": "baselines"}):
        figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    print("\n".join(lines()))
    draw()
