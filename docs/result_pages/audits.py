"""docs/results/audits.md: what audits found of every claim, how often they find a fault, and the figures of both."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from stobatch import plan
from stobatch.dp.noise import laplace
from stobatch.seeds import Seeds
from stobatch_recipes import recipe

from .records import FIRST, INK, SECOND, Record, lines_of, record, records, render, table

STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
CONTROLS = {
    "audit.half_noise": "half the noise",
    "audit.shared_noise": "shared noise",
    "audit.no_clipping": "no clipping",
    "audit.sound": "sound, ε = 3",
}
SHOWN = ("published", "sound", "sound_1", "sound_strict", "half_noise", "shared_noise", "no_clipping")


def audits() -> dict[str, Record]:
    return {record["name"]: record for record in records("audits")}


def many_runs(name: str) -> Record:
    """Return the finding of many trainings of a recipe, and refuse one of other settings."""
    audited = audits()[f"audit-{name}"]
    if audited["config_hash"] != recipe(f"audit.{name}").training_hash:
        raise ValueError(f"results/audits.json has no record of audit.{name} as it ships.")
    (finding,) = [finding for finding in audited["findings"] if finding["instrument"] == "many_runs"]
    found: Record = finding
    return found


def strongest(finding: Record) -> float:
    return max(bound["epsilon_at_least"] for bound in finding["details"]["bounds"])


def assumption_free(finding: Record) -> float:
    return max(bound["epsilon_at_least"] for bound in finding["details"]["bounds"] if not bound["assumes"])


def row(name: str) -> list[str]:
    finding = many_runs(name)
    details = finding["details"]
    status = {"published": "claimed"}.get(name, "proved" if name.startswith("sound") else "control, broken on purpose,")
    seen = "the trained model, by queries" if name == "published" else "every noisy step"
    assumed = [bound["epsilon_at_least"] for bound in details["bounds"] if bound["assumes"]]
    return [
        f"`audit.{name}`",
        f"{status} ε = {details['claimed_epsilon']:.1g}",
        f"{details['trainings']:,}",
        seen,
        f"ε >= {assumption_free(finding):.3g}",
        f"ε >= {max(assumed):.3g}" if assumed else "",
        finding["verdict"],
    ]


def power() -> Iterator[list[str]]:
    found = lines_of("results/audit_power.jsonl")
    for line in (line for line in found if "recipe" in line):
        cost = f"{line['canaries']:,} canaries" if "canaries" in line else f"{line['trainings']} trainings"
        yield [CONTROLS[line["recipe"]], line["instrument"], cost, f"{line['refuted']} of {line['audits']}"]
    for line in (line for line in found if line["instrument"] == "certificates"):
        cost = f"{line['seconds_each']:.1f} s"
        yield [f"certificate: {line['control']}", "certificates", cost, f"{line['refuted']} of {line['audits']}"]
    twins = [line for line in found if line["instrument"] == "certificates"]
    wrong, tried = sum(line["correct_twins_refuted"] for line in twins), sum(line["audits"] for line in twins)
    yield ["their correct twins", "certificates", "the same", f"{wrong} of {tried:,}"]


def page() -> str:
    one = record("one_run_h200")
    seconds = {
        canaries: [t["seconds"] for t in one["trainings"] if t["canaries"] == canaries] for canaries in (0, 5000)
    }
    return render(
        "audits",
        trainings_table=table(
            [
                *("`stobatch audit RUN --seed 1 --recipe`", "claim", "trainings", "the attacker sees"),
                *("found without assumption", "found under the assumption", "verdict"),
            ],
            map(row, SHOWN),
        ),
        releases_table=table(["release", "in the proof", "told apart", "found", "claimed"], releases()),
        members_table=table(["mechanism", "AUROC", "found", "claim, replace-one", "verdict"], members()),
        power_table=table(["control", "instrument", "cost of an audit", "refuted"], power()),
        canaries=one["one_run"]["canaries"],
        bounds=one["one_run"]["bounds"],
        seconds={canaries: f"{min(each):.1f} to {max(each):.1f}" for canaries, each in seconds.items()},
    )


def releases() -> Iterator[list[str]]:
    for finding in audits()["audit-published_releases"]["findings"]:
        details = finding["details"]
        told = f"{details['right']:,} of {details['trials']:,}"
        found, claimed = f"ε >= {strongest(finding):.2f}", f"ε = {details['claimed_epsilon']}"
        yield [details["release"], details["source"], told, found, claimed]


def members() -> Iterator[list[str]]:
    for name, status in (("published", "claimed"), ("sound", "proved")):
        (finding,) = audits()[f"audit-{name}_members"]["findings"]
        details = finding["details"]
        claim = f"{status} ε = {details['claimed_epsilon']:.1f}"
        yield [name, f"{details['auroc']:.3f}", f"ε >= {strongest(finding):.2f}", claim, finding["verdict"]]


def cancelling() -> Figure:
    """One pixel of a tuple under many draws of the noise, and its difference to another tuple's."""
    scale = plan(recipe("audit.published")).input_noise_scale
    draws = torch.cat([laplace((1,), scale, Seeds.reproducible(seed).generator("noise")) for seed in range(2000)])
    other, values = -1.0, {"D": (-1.0, FIRST), "D'": (1.0, SECOND)}
    figure = Figure(figsize=(7.2, 2.5))
    left, right = figure.subplots(1, 2)
    for name, (value, colour) in values.items():
        left.hist((value + draws).numpy(), np.linspace(-150, 150, 61), histtype="step", color=colour, label=name)
        difference = (value + draws) - (other + draws)
        right.hist(difference.numpy(), np.linspace(-1, 3, 81), color=colour, alpha=0.8, label=name)
    left.set(title="a perturbed pixel of the tuple that differs", xlabel=f"pixel in [-1, 1] + Laplace({scale:.0f})")
    right.set(title="less the same pixel of another tuple", xlabel="difference of two perturbed pixels")
    left.set_ylabel("draws of the noise, of 2,000")
    for axes in (left, right):
        axes.legend(frameon=False)
    return figure


def told_apart() -> Figure:
    """What the attacker sees of models trained on two neighbours: the published mechanism, and the sound one."""
    figure = Figure(figsize=(7.2, 2.5))
    titles = {"published": "published, claimed ε = 0.2", "sound": "sound, proved ε = 3"}
    for axes, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        finding = many_runs(name)
        spread = finding["details"]["histogram"]
        for side, label, colour in (("without", "trained on D", FIRST), ("with", "trained on D'", SECOND)):
            axes.stairs(spread[side], np.array(spread["edges"]), fill=True, alpha=0.6, color=colour, label=label)
        axes.set(title=f"{title}: found ε ≥ {strongest(finding):.2f}")
        axes.set(xlabel="the attacker's score of a model", ylabel="models")
        axes.legend(frameon=False)
    return figure


def found_and_proved() -> Figure:
    """The sound method and its broken twins: what was found against what is claimed."""
    figure = Figure(figsize=(7.2, 2.6))
    axes = figure.subplots()
    labels = {"sound_strict": "sound, 0.2", "sound_1": "sound, 1", "sound": "sound, 3"}
    labels |= {name.removeprefix("audit."): label for name, label in CONTROLS.items() if name != "audit.sound"}
    for place, name in enumerate(labels):
        finding = many_runs(name)
        claimed, found = finding["details"]["claimed_epsilon"], strongest(finding)
        axes.bar(place, found, 0.3, color=SECOND if found > claimed else FIRST)
        axes.plot([place - 0.35, place + 0.35], [claimed, claimed], color=INK, linewidth=1.5)
        axes.annotate(f"{found:.2f}", (place, found), (0, 3), textcoords="offset points", ha="center")
    axes.set(xticks=range(len(labels)), xticklabels=list(labels.values()), ylabel="ε, δ = 1e-5")
    axes.set_title("lower bound found, under the assumption (bar), against ε claimed or proved (line)")
    return figure


def figures() -> dict[str, Figure]:
    drawers = {"shared-noise-cancels": cancelling, "told-apart": told_apart, "found-and-proved": found_and_proved}
    with rc_context(STYLE):
        made = {name: draw() for name, draw in drawers.items()}
        for figure in made.values():
            figure.tight_layout()
    return made
