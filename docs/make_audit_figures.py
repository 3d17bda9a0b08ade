"""Draw the figures of docs/guarantees.md, section 8: `python docs/make_audit_figures.py`.

The first is computed from the mechanism itself, the others from results/audits.json.
"""

import json
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch

mpl.use("svg")
from matplotlib import pyplot as plt

from stobatch import plan
from stobatch.dp.noise import laplace
from stobatch.seeds import Seeds
from stobatch_recipes import recipe

HERE = Path(__file__).parent
FIRST, SECOND, INK = "#3b6ea8", "#c8553d", "#444444"
mpl.rcParams.update({"svg.hashsalt": "stobatch", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})


def save(figure: plt.Figure, name: str) -> None:
    figure.tight_layout()
    figure.savefig(HERE / "figures" / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def strongest(finding: dict) -> float:
    return max(bound["epsilon_at_least"] for bound in finding["details"]["bounds"])


def cancelling() -> None:
    """One pixel of a tuple under many draws of the noise, and its difference to another tuple's."""
    scale = plan(recipe("audit.published")).input_noise_scale
    draws = torch.cat([laplace((1,), scale, Seeds.reproducible(seed).generator("noise")) for seed in range(2000)])
    other, values = -1.0, {"D": (-1.0, FIRST), "D'": (1.0, SECOND)}
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.5))
    for name, (value, colour) in values.items():
        left.hist((value + draws).numpy(), np.linspace(-150, 150, 61), histtype="step", color=colour, label=name)
        difference = (value + draws) - (other + draws)
        right.hist(difference.numpy(), np.linspace(-1, 3, 81), color=colour, alpha=0.8, label=name)
    left.set(title="a perturbed pixel of the tuple that differs", xlabel=f"pixel in [-1, 1] + Laplace({scale:.0f})")
    right.set(title="less the same pixel of another tuple", xlabel="difference of two perturbed pixels")
    left.set_ylabel("draws of the noise, of 2,000")
    for axes in (left, right):
        axes.legend(frameon=False)
    save(figure, "shared-noise-cancels")


def told_apart(records: dict[str, dict]) -> None:
    """What the attacker sees of models trained on two neighbours: the published mechanism, and the sound one."""
    figure, both = plt.subplots(1, 2, figsize=(7.2, 2.5))
    titles = {"audit-published": "published, claimed ε = 0.2", "audit-sound": "sound, proved ε = 3"}
    for axes, (name, title) in zip(both, titles.items(), strict=True):
        (finding,) = [f for f in records[name]["findings"] if f["instrument"] == "many_runs"]
        spread, found = (
            finding["details"]["histogram"],
            max(b["epsilon_at_least"] for b in finding["details"]["bounds"]),
        )
        edges = np.array(spread["edges"])
        for side, label, colour in (("without", "trained on D", FIRST), ("with", "trained on D'", SECOND)):
            axes.stairs(spread[side], edges, fill=True, alpha=0.6, color=colour, label=label)
        axes.set(title=f"{title}: found ε ≥ {found:.2f}", xlabel="the attacker's score of a model", ylabel="models")
        axes.legend(frameon=False)
    save(figure, "told-apart")


def found_and_proved(records: dict[str, dict]) -> None:
    """The sound method and its broken twins: what was found against what is claimed."""
    figure, axes = plt.subplots(figsize=(7.2, 2.6))
    shown = [
        *(("audit-sound_strict", "sound, 0.2"), ("audit-sound_1", "sound, 1"), ("audit-sound", "sound, 3")),
        *(("audit-half_noise", "half the noise"), ("audit-shared_noise", "shared noise")),
        ("audit-no_clipping", "no clipping"),
    ]
    for place, (name, _) in enumerate(shown):
        (finding,) = [f for f in records[name]["findings"] if f["instrument"] == "many_runs"]
        claimed, found = (
            finding["details"]["claimed_epsilon"],
            max(b["epsilon_at_least"] for b in finding["details"]["bounds"]),
        )
        axes.bar(place, found, 0.3, color=SECOND if found > claimed else FIRST)
        axes.plot([place - 0.35, place + 0.35], [claimed, claimed], color=INK, linewidth=1.5)
        axes.annotate(f"{found:.2f}", (place, found), (0, 3), textcoords="offset points", ha="center")
    axes.set(xticks=range(len(shown)), xticklabels=[label for _, label in shown], ylabel="ε, δ = 1e-5")
    axes.set_title("lower bound found (bar) against ε claimed or proved (line)")
    save(figure, "found-and-proved")


(HERE / "figures").mkdir(exist_ok=True)
cancelling()
everything = {record["name"]: record for record in json.loads((HERE.parent / "results" / "audits.json").read_text())}
told_apart(everything)
found_and_proved(everything)
