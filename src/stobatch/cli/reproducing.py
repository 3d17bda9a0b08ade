"""`stobatch figure`: the figures of the paper, made again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stobatch.cli.app import app
from stobatch.cli.options import Device, Json, Limit, Set, assignments, show, whole_numbers
from stobatch.errors import SettingError

if TYPE_CHECKING:
    from stobatch.results import FigureMade

_SCALES = ("full", "smoke")


@app.command(rich_help_panel="Measure")
def figure(
    which: Annotated[str, typer.Argument(help="A figure of the paper, 2 to 9, or all.")],
    out: Annotated[Path, typer.Option(help="The folder to write: pictures, pages, points, and runs.")] = Path(
        "figures"
    ),
    records: Annotated[Path, typer.Option(help="The folder of recorded points, which are not made again.")] = Path(
        "results/figures"
    ),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the runs and their minutes, and make none.")
    ] = False,
    minutes: Annotated[float | None, typer.Option(help="Train for what is missing, for about so long.")] = None,
    retrain: Annotated[bool, typer.Option("--retrain", help="Make everything again, even what is recorded.")] = False,
    scale: Annotated[str, typer.Option(help="full, or smoke: everything in small, which is no result.")] = "full",
    methods: Annotated[str | None, typer.Option(help="Only these, with commas between.")] = None,
    epsilon: Annotated[list[float] | None, typer.Option(help="Only this budget; may be repeated.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Public seeds with commas between.")] = None,
    from_data: Annotated[
        str | None,
        typer.Option(help="Start from weights pretrained on these public images, named as `pretrain` names them."),
    ] = None,
    set_: Set = None,
    limit: Limit = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Draw figures of the paper from records; with --minutes or --retrain train, attack and certify for them first.

    Data are public and so are the seeds: every privacy guarantee of these runs is void.
    """
    if scale not in _SCALES:
        raise SettingError(f"--scale {scale} is not possible.", remedy=f"Use {' or '.join(_SCALES)}.")
    chosen = tuple(whole_numbers(seeds)) if seeds else ()
    from stobatch.figures.plan import Asked
    from stobatch.figures.reproduce import figure as reproduce

    changes: dict[str, Any] = assignments(set_)
    if limit is not None:
        changes |= {"evaluation.limit": limit, "certification.limit": limit}
    if device is not None:
        changes["machine.device"] = device
    names = tuple(dict.fromkeys(name.strip() for name in methods.split(","))) if methods else ()
    asked = Asked(out, names, tuple(epsilon or ()), chosen, changes, scale, from_data)
    document = reproduce(
        which, asked, records=records, minutes=minutes, retrain=retrain, dry_run=dry_run, quiet=as_json
    )
    show(document, as_json, *(part for one in document.figures for part in _parts(one, dry_run)))


def _parts(one: FigureMade, dry_run: bool) -> list[Any]:
    from stobatch.figures.catalogue import METHODS
    from stobatch.figures.drawing import budget
    from stobatch.reporting.table import Column, Table

    if not dry_run:
        missing = f"; missing: {len(one.missing)} of {len(one.runs)} runs, or parts of them" if one.missing else ""
        smoke = "" if one.scale == "full" else " (smoke: no result)"
        return [f"Figure {one.figure}{smoke}: {one.points} points{missing}", *(f"  {name}" for name in one.files)]
    table = Table.of(
        f"Figure {one.figure}: {len(one.runs)} runs, about {one.minutes:.0f} minutes for what is missing",
        ["run", "ε", "seed", "state", "points", Column("minutes", is_number=True), "changes"],
        (
            [
                METHODS[run.method].label,
                budget(run.method, run.epsilon),
                str(run.seed),
                run.state,
                f"{run.recorded_points} of {run.wanted_points}",
                f"{run.minutes:.1f}",
                ", ".join(run.settings),
            ]
            for run in one.runs
        ),
    )
    return [table.to_rich()]
