"""`pretrain`: a public start for private trainings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stobatch.cli.app import app
from stobatch.cli.options import Config, Device, Json, Recipe, Set, read_settings, show
from stobatch.interrupts import Interrupted

_STOPPED = "interrupted; a prior is written at its end, and of this one nothing is. Run the same command again."


@app.command(rich_help_panel="Train")
def pretrain(
    from_data: Annotated[
        str,
        typer.Option(
            help="digits (fonts, strokes), dead-leaves, generators, a public data set, NAME or NAME:CLASSES, or a "
            "folder of images."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The prior to write: OUT.safetensors and OUT.card.json.")],
    recipe: Recipe = None,
    config: Config = None,
    set_: Set = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of Adam.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images of a step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="It falls to 0 over the second half.")] = None,
    objective: Annotated[str | None, typer.Option(help="supervised or contrastive; unset follows the labels.")] = None,
    licence: Annotated[str | None, typer.Option(help="Of a folder of images, for the card.")] = None,
    may_contain: Annotated[
        list[str] | None,
        typer.Option(help="Data sets whose records a folder may hold, or none; unset says that it is not known."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random; nothing here is secret.")] = 0,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train a recipe's network on public images, without privacy, for `train --from` to start from."""
    import stobatch
    from stobatch.pretraining.pretrain import BATCH_SIZE, LEARNING_RATE, STEPS

    settings = read_settings(recipe, config, set_, None, device)
    try:
        card = stobatch.pretrain(
            settings,
            from_data,
            out,
            steps=steps or STEPS,
            batch_size=batch_size or BATCH_SIZE,
            learning_rate=LEARNING_RATE if learning_rate is None else learning_rate,
            objective=objective,
            licence=licence,
            may_contain=may_contain,
            seed=seed,
            quiet=as_json,
        )
    except (Interrupted, KeyboardInterrupt):
        print(f"stobatch: {_STOPPED}", file=sys.stderr)
        raise SystemExit(130) from None
    show(card, as_json, *card.lines())
