"""`guarantee`, `report`, `verify`, `sign` and `export`: what others get to see of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stobatch.cli.app import app
from stobatch.cli.options import Draws, Identity, Json, Signers, show
from stobatch.errors import RunError
from stobatch.progress import progress


@app.command(rich_help_panel="Publish")
def guarantee(run: Annotated[Path, typer.Argument(help="A run directory.")], as_json: Json = False) -> None:
    """Show what a run guarantees about its training data, on whose word, what that assumes and what contradicts it."""
    import stobatch
    from stobatch.reporting.terminal import guarantee_card
    from stobatch.results import RunGuarantee, StartedRun, Training
    from stobatch.runs import Run

    directory = Run(run)
    directory.require_trained()
    network = Training.read(directory).network
    if network is not None and network.handed_over:
        raise RunError(
            f"the network of {run} was handed over in Python.",
            why="Its plan, from which the guarantee is computed, needs the network.",
            remedy=f"Ask there: stobatch.load({str(run)!r}, network=...).guarantee.",
        )
    privacy = stobatch.load(run).guarantee
    document = RunGuarantee(run=str(run), training_hash=StartedRun.read(directory).training_hash, guarantee=privacy)
    show(document, as_json, guarantee_card(privacy))


@app.command(rich_help_panel="Publish")
def report(
    runs: Annotated[list[Path], typer.Argument(help="One run directory, or several to compare.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; RUN/report.html for a single run.")] = None,
    images: Annotated[
        bool | None, typer.Option(help="Show a few test images; by default those of public data sets only.")
    ] = None,
    signers: Signers = None,
    identity: Identity = None,
    as_json: Json = False,
) -> None:
    """Write one mailable HTML file: curves, the guarantee with its status, the flags; recomputed from rows."""
    import stobatch

    # Everything on the page is computed again first, which takes a while.
    with progress("report", len(runs), quiet=as_json) as advance:
        document = stobatch.report(runs, out, images=images, signers=signers, identity=identity)
        advance(len(runs))
    show(document, as_json, f"report: {document.report}")


@app.command(rich_help_panel="Publish")
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
    from stobatch.reporting.terminal import verified_page
    from stobatch.results import Outcome
    from stobatch.verification import verify as verify_run

    document = verify_run(run, sample=sample, signers=signers, identity=identity, seed=seed)
    show(document, as_json, verified_page(document))
    if document.verdict is Outcome.DIFFERS:
        raise SystemExit(1)


@app.command(rich_help_panel="Publish")
def sign(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    key: Annotated[Path, typer.Option(help="A private key of ssh-keygen's, or of minisign's; kept outside the run.")],
    as_json: Json = False,
) -> None:
    """Sign a run's manifest: that these files are the ones you mean. Any verb that changes them takes it off again."""
    from stobatch.verification.checks import sign as sign_run

    signature = sign_run(run, key)
    show({"run": str(run), "signature": str(signature)}, as_json, f"signed: {signature}")


@app.command(rich_help_panel="Publish")
def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    to: Annotated[str, typer.Option(help="torchscript, pt2 (torch.export) or onnx.")],
    out: Annotated[Path, typer.Option(help="The folder to make; it must not exist.")],
    as_json: Json = False,
) -> None:
    """Write the deployed network for programs without stobatch, checked against the run, with a model card."""
    import stobatch

    document = stobatch.export(run, out, to=to)
    show(document, as_json, *document.lines())
