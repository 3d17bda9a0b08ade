"""`stobatch doctor`: the machine, rather than a run. Exit code 2 says that something training needs is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stobatch.cli.app import Json, _print, app


@app.command()
def doctor(
    out: Annotated[Path, typer.Option(help="The folder in which runs will be written.")] = Path("runs"),
    only: Annotated[list[str] | None, typer.Option(help="Only this check; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Try everything that training on this machine rests on: arithmetic, disk, data, processes, GPUs."""
    from stobatch.reporting.health import health_table
    from stobatch.verbs.doctor import doctor as examine_machine

    document = examine_machine(out, only=only or (), quiet=as_json)
    _print(document, as_json, health_table(document))
    if not document["ready"]:
        raise SystemExit(2)
