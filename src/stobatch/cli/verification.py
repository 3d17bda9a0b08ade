"""`stobatch verify` and `stobatch sign`: for those who have to rely on a run that others made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stobatch.cli.app import Draws, Identity, Json, Signers, _print, app
from stobatch.reporting.verified import verified_page


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    sample: Annotated[
        int, typer.Option(min=0, help="Rows that are certified again from weights and test data; 0 needs no data.")
    ] = 20,
    signers: Signers = None,
    identity: Identity = None,
    seed: Draws = None,
    as_json: Json = False,
) -> None:
    """Compute everything again that a run publishes, and say what cannot be checked. Exit code 1 where it differs."""
    from stobatch.verification import verify as verify_run

    document = verify_run(run, sample=sample, signers=signers, identity=identity, seed=seed).to_dict()
    _print(document, as_json, verified_page(document))
    if document["verdict"] == "differs":
        raise SystemExit(1)


@app.command()
def sign(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    key: Annotated[Path, typer.Option(help="A private key of ssh-keygen's, or of minisign's; kept outside the run.")],
    as_json: Json = False,
) -> None:
    """Sign a run's manifest: that these files are the ones you mean. Any verb that changes them takes it off again."""
    from stobatch.verification import sign as sign_run

    signature = sign_run(run, key)
    _print({"run": str(run), "signature": str(signature)}, as_json, f"signed: {signature}")
