"""`stobatch compare`: several methods side by side, trained and attacked the same way."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from stobatch.cli.app import app
from stobatch.cli.options import Device, Json, Limit, Prior, Set, assignments, show, whole_numbers
from stobatch.errors import SettingError
from stobatch.types import Status

_ELSEWHERE = {
    "method.epsilon": "--epsilon",
    "method.total_epsilon": "--epsilon",
    "method.noise_multiplier": "--epsilon",
    "evaluation.radii": "--radius",
    "certification.attack_radius": "--radius",
    "seed": "--seeds",
}
"""Settings that decide what rows and columns of the table mean; they have options of their own."""


@app.command(rich_help_panel="Measure")
def compare(
    out: Annotated[Path, typer.Option(help="The folder to write: a run for each row and seed, and the comparison.")],
    methods: Annotated[
        str, typer.Option(help="Names with commas between, as published,pixeldp,sound; or all.")
    ] = "all",
    epsilon: Annotated[list[float] | None, typer.Option(help="Privacy budget, 1.0 if unset; may be repeated.")] = None,
    radius: Annotated[
        list[float] | None, typer.Option(help="Over [-1, 1], 0.2 if unset; may be repeated, the main one first.")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="Public seeds with commas between, for an experiment: privacy guarantees are then void."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Trainings of each row, with secret seeds.")] = 1,
    from_: Prior = None,
    set_: Set = None,
    limit: Limit = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train, certify and attack several methods the same way: one table, a figure, t-tests. Resumes itself."""
    import stobatch
    from stobatch.comparison.plan import change_rows
    from stobatch.reporting.comparison import comparison_tables
    from stobatch_recipes.baselines import rows

    epsilons, radii = epsilon or [1.0], radius or [0.2]
    _require_budgets(epsilons)
    changes = assignments(set_)
    if limit is not None:
        changes |= {"evaluation.limit": limit, "certification.limit": limit}
    _require_comparable_changes(changes)
    shown: dict[str, Any] = {"evaluation.radii": radii, "certification.attack_radius": radii[0]}
    configs_of_rows = rows(_names(methods), epsilons, radii[0])
    configs = {name: config.override_all(shown) for name, config in change_rows(configs_of_rows, changes).items()}
    document = stobatch.compare(
        configs,
        out,
        seeds=whole_numbers(seeds) if seeds else None,
        repeats=repeats,
        priors=dict.fromkeys(configs, from_) if from_ else None,
        quiet=as_json,
        device=device,
    )
    show(document, as_json, comparison_tables(document), f"page: {out / 'comparison.html'}")
    if any(flag.refutes is Status.PROVED for flag in document.flags):
        raise SystemExit(1)


def _require_budgets(epsilons: list[float]) -> None:
    """Raise for an ε that is not positive. Here, since methods without privacy would not ask."""
    for epsilon in epsilons:
        if not (isfinite(epsilon) and epsilon > 0):
            raise SettingError(f"--epsilon {epsilon:g} is not a budget.", remedy="Give a number above 0.")


def _names(methods: str) -> list[str]:
    from stobatch_recipes.baselines import COMPARED

    return list(COMPARED) if methods == "all" else list(dict.fromkeys(name.strip() for name in methods.split(",")))


def _require_comparable_changes(changes: dict[str, Any]) -> None:
    for key, option in _ELSEWHERE.items():
        if key in changes:
            raise SettingError(
                f"--set {key} is not for a comparison.",
                why="It decides what the rows or columns of the table mean.",
                remedy=f"Use {option}.",
            )
