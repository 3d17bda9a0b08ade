"""Pictures from a run's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stobatch.files import write_atomically
from stobatch.reporting.tables import guarantee_line


def summary_figure(path: Path, training: dict[str, Any], certificates: dict[str, Any], scores: dict[str, Any]) -> None:
    """Learning curve on the left; accuracy against radius, attacked and certified, on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    curve, radii = figure.subplots(1, 2)
    history = training["history"]
    curve.plot([row["step"] for row in history], [100 * row["test_accuracy"] for row in history], color="#1f6f8b")
    curve.set(xlabel="step", ylabel="accuracy on held-out test images, %", title="training", ylim=(0, 100))

    attacked = scores["attacked_accuracy"]
    sizes = [0.0] + [row["radius"] for row in attacked]
    worst = [scores["clean_accuracy"]] + [row["worst"] for row in attacked]
    radii.plot(sizes, [100 * share["value"] for share in worst], marker="o", color="#333333", label="under attack")
    radii.fill_between(
        sizes,
        [100 * share["low"] for share in worst],
        [100 * share["high"] for share in worst],
        alpha=0.15,
        color="#333333",
    )
    styles = {"claimed": ("--", "#c9822b"), "proved": ("-", "#2b8a3e"), "refuted": (":", "#c92a2a")}
    for kind in certificates["kinds"]:
        line, colour = styles[kind["status"]]
        shares = certificates["certified_accuracy"][kind["name"]]
        label = f"certified, {kind['name']} rule ({kind['status']})"
        radii.plot(
            [share["radius"] for share in shares], [100 * share["value"] for share in shares],
            marker="s", linestyle=line, color=colour, label=label,
        )  # fmt: skip
    radii.set(
        xlabel="radius, l-infinity over [-1, 1]", ylabel="accuracy, %", ylim=(0, 100),
        title=guarantee_line(scores["guarantee"]),
    )  # fmt: skip
    radii.legend(fontsize=8)
    for axes in (curve, radii):
        axes.grid(alpha=0.3)
    write_atomically(path, lambda out: figure.savefig(out, format="png", dpi=130))
