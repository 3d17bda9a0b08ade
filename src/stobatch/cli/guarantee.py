"""`stobatch guarantee`: what a run guarantees about its training data, in full."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stobatch.cli.app import Json, _print, app
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.files import as_written
from stobatch.reporting.terminal import guarantee_card
from stobatch.results import RunGuarantee, StartedRun
from stobatch.runs import Run


@app.command()
def guarantee(run: Annotated[Path, typer.Argument(help="A run directory.")], as_json: Json = False) -> None:
    """What a run guarantees about its training data, by whose word, what that assumes and what speaks against it."""
    found = _of(Run(run))
    training_hash = StartedRun.read(Run(run)).training_hash
    _print(RunGuarantee(run=str(run), training_hash=training_hash, guarantee=found), as_json, guarantee_card(found))


def _of(run: Run) -> PrivacyGuarantee:
    """As its report has it; of a run that was not evaluated, as its model has it."""
    if run.has("scores"):
        from stobatch.reporting.summary import Facts

        with as_written(run.path):
            return Facts.read(run).guarantee
    import stobatch

    return stobatch.load(run.path).guarantee
