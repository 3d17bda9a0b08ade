"""The README's figure and three rows: clean, attacked and proved at radius 0.2, of the same 10,000 test images."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.figure import Figure

from . import audits, practice, sound
from .baselines import in_common_form, privacy
from .records import FIGURES, FIRST, SECOND, THIRD, Record, percent, records, render, table

RADIUS = "0.2"
START, END = "<!-- made by docs/make_results.py -->", "<!-- until here -->"


@dataclass(frozen=True)
class Row:
    name: str
    privacy: str
    clean: float
    attacked: float
    proved: float | None

    @property
    def certified(self) -> str:
        return "no certificate" if self.proved is None else percent(self.proved)


def compared(name: str) -> Record:
    """Return the record of a method at ε = 1 whose every number is of the whole test set."""
    (found,) = [record for record in records("baselines_mnist_radii") if record["row"] == f"{name}-eps-1"]
    return found


def rows() -> list[Row]:
    (paper,) = [record for record in records("paper_mnist") if record["claimed_epsilon"] == 1.0]
    published = in_common_form(paper)
    found = []
    for record, name, proved in (
        (compared("dpsgd"), "`dpsgd`", None),
        (published, "`published`", paper["certified"]["corrected"][RADIUS]),
        (compared("sound"), "`sound`", compared("sound")["certified"]["bounds"]["accuracy"][RADIUS]),
    ):
        adaptive = record["under_attack"]["adaptive"]
        certificates = {kind["test_examples"] for kind in record["certified"].values()}
        sizes = {record["clean"]["test_examples"], adaptive["test_examples"], *certificates}
        if sizes != {10_000}:
            raise ValueError(f"{name}: numbers that stand together are of the same images, not of {sizes}.")
        found.append(Row(name, privacy(record), record["clean"]["accuracy"], adaptive["accuracy"][RADIUS], proved))
    return found


def block() -> str:
    """Return what stands in the README between two marks."""
    tuned, primed = practice.tuned(), practice.primed("sound.mnist_primed_strict")[0]
    shown = table(
        [
            "MNIST, l∞ radius 0.2 over [-1, 1]",
            "privacy (in brackets: with secret seeds)",
            "clean",
            "attacked",
            "proved",
        ],
        [
            *([row.name, row.privacy, percent(row.clean), percent(row.attacked), row.certified] for row in rows()),
            *(only_proved("`sound`, fewer weights", found, sound.privacy(found)) for found in pooled()),
            only_proved("`sound`, from rendered digits", primed, sound.privacy(primed)),
            only_proved("`sound`, settings searched and paid for", tuned, f"**{sound.privacy(tuned)}**"),
        ],
    )
    published = audits.many_runs("published")
    report = (FIGURES / "report.png").exists()
    filled = render("readme", table=shown, report=report, found=audits.strongest(published), **published["details"])
    return f"{START}\n{filled}{END}"


def pooled() -> list[Record]:
    """Return seed 1 of the recipes whose outputs are averaged before the last layer."""
    names = ("sound.mnist_near", "sound.mnist_strict_pooled")
    return [sound.of_recipe(name, name.replace(".", "_"))[0] for name in names]


def only_proved(name: str, found: Record, privacy: str) -> list[str]:
    """Return a row that was certified on all images, and not attacked on all of them."""
    return [name, privacy, percent(found["clean"]), "not on all images", percent(found["certified"][RADIUS])]


def draw() -> Figure:
    shown = rows()
    figure = Figure(figsize=(7.2, 2.7), layout="constrained")
    axes = figure.subplots()
    series = {
        "clean": (THIRD, [row.clean for row in shown]),
        "under attack": (SECOND, [row.attacked for row in shown]),
        "proved for every attack": (FIRST, [row.proved for row in shown]),
    }
    for place, (label, (colour, shares)) in enumerate(series.items()):
        for row, share in enumerate(shares):
            x = row + 0.27 * (place - 1)
            axes.bar(x, 100 * (share or 0), 0.25, color=colour, label=label if row == 0 else None)
            text = "none" if share is None else f"{100 * share + 1e-9:.1f}"
            axes.annotate(text, (x, 100 * (share or 0)), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(range(len(shown)), [f"{row.name.strip('`')}\n{row.privacy}" for row in shown], fontsize=8)
    axes.set(ylim=(0, 108), ylabel="% of 10,000 images")
    axes.set_title("MNIST, l∞ radius 0.2 over [-1, 1], public seeds", fontsize=9)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def figures() -> dict[str, Figure]:
    with rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        return {"readme": draw()}
