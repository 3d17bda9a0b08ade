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

from .records import FIRST, INK, MADE, SECOND, Record, lines_of, link, record, records, table

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
    status = (
        "control, broken on purpose,"
        if name in ("half_noise", "shared_noise", "no_clipping")
        else ("claimed" if name == "published" else "proved")
    )
    seen = "the trained model, by queries" if name == "published" else "every noisy step"
    return [
        f"`audit.{name}`",
        f"{status} ε = {details['claimed_epsilon']:.1g}",
        f"{details['trainings']:,}",
        seen,
        f"ε >= {assumption_free(finding):.3g}",
        ""
        if strongest(finding) == assumption_free(finding) == many_bounds(finding)
        else f"ε >= {strongest(finding):.3g}",
        finding["verdict"],
    ]


def many_bounds(finding: Record) -> float | None:
    """Return the only bound where there is one."""
    bounds = finding["details"]["bounds"]
    return bounds[0]["epsilon_at_least"] if len(bounds) == 1 else None


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
    bounds = one["one_run"]["bounds"]
    spent = {
        canaries: " to ".join(
            f"{end:.1f}" for end in sorted(t["seconds"] for t in one["trainings"] if t["canaries"] == canaries)
        )
        for canaries in (0, one["one_run"]["canaries"])
    }
    members, sound_members = (audits()[f"audit-{name}_members"]["findings"][0] for name in ("published", "sound"))
    releases = audits()["audit-published_releases"]["findings"]
    return f"""# What audits say

{MADE}

Every claim is tried, our own included. An audit's bound is a lower bound on ε with 95% confidence; it can refute a claim and
never prove one. Claims are those of the mechanism with secret seeds: a public seed (`--seed 1` here) makes the privacy of
the audited trainings themselves **void**. Why the bounds hold: [guarantees, section 8](../guarantees/audits.md); how to audit
a run of your own: [auditing](../auditing.md).

## Many trainings on neighbouring data sets

Without an assumption, 2,000 trainings can show little at δ = 10⁻⁵. The stronger bound **assumes** that the trade-off between
errors is that of Gaussian noise on Poisson samples, as the mechanism's own proof says; it refutes the claim and the
assumption together.

{
        table(
            [
                *("`stobatch audit RUN --seed 1 --recipe`", "claim", "trainings", "the attacker sees"),
                *("found without assumption", "found under the assumption", "verdict"),
            ],
            map(row, SHOWN),
        )
    }

![Lower bound found against ε claimed or proved](../figures/found-and-proved.svg)

![Scores of models trained on D and on D'](../figures/told-apart.svg)

At ε = 0.2 an attacker errs 49 times in 100, and 20,000 trainings are too few to tell that from 50: nothing was found, and
that is no evidence either way.

## What the published proof calls private, told apart directly

{
        table(
            ["release", "in the proof", "told apart", "found", "claimed"],
            [
                [
                    *(finding["details"]["release"], finding["details"]["source"]),
                    f"{finding['details']['right']:,} of {finding['details']['trials']:,}",
                    f"ε >= {strongest(finding):.2f}",
                    finding["details"]["claimed_epsilon"],
                ]
                for finding in releases
            ],
        )
    }

![One draw of noise hides a pixel, and nothing of a difference](../figures/shared-noise-cancels.svg)

## Who was a member

{
        table(
            ["mechanism", "AUROC", "found", "claim, replace-one", "verdict"],
            [
                [
                    name,
                    f"{finding['details']['auroc']:.3f}",
                    f"ε >= {strongest(finding):.2f}",
                    f"{status} ε = {finding['details']['claimed_epsilon']:.1f}",
                    finding["verdict"],
                ]
                for name, status, finding in (
                    ("published", "claimed", members),
                    ("sound", "proved", sound_members),
                )
            ],
        )
    }

## The training that is deployed, audited itself

With `--set canaries.num={one["one_run"]["canaries"]}` `sound.mnist` (ε = 1) took {
        spent[one["one_run"]["canaries"]]
    } s on an H200 where it takes {spent[0]} s without, two
trainings of each. Its audit found **ε >= {bounds["one_run"]:.3f}** without any assumption on the mechanism, and ε >= {
        bounds["one_run_poisson"]:.2f} under the assumption
that the trade-off is that of Gaussian noise on Poisson samples; proved, with secret seeds, is 1
({link("results/one_run_h200.json")}; the audit then tried other shares of guesses than it does now).

<!-- not run: needs a GPU -->
```sh
stobatch train --recipe sound.mnist --seed 1 --device cuda --set canaries.num=5000 --out RUN
stobatch audit RUN
```

## Power: a silent instrument means nothing unless it cries where it should

Three broken twins of the sound method ship as methods, four broken certificates with the falsifier.

{table(["control", "instrument", "cost of an audit", "refuted"], power())}

300 of 300 means a power above 0.99 with 95% confidence; 110 of 110 above 0.97. The sound method itself is refuted by neither
instrument, as it should be.

Records: {link("results/audits.json", "results/audit_power.jsonl")}, made by

<!-- not run: hours of trainings -->
```sh
python results/collect_audits.py runs/audit-* > results/audits.json
python benchmarks/audit_power.py
```
"""


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
