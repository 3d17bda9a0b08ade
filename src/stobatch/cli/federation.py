"""`federate` and `parties`: a federation on one machine, and what every party of it has spent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stobatch.cli.app import app
from stobatch.cli.options import (
    Config,
    Device,
    Json,
    Prior,
    Recipe,
    Resume,
    Seed,
    Set,
    read_settings,
    show,
    training_changes,
)
from stobatch.errors import RunError, SettingError

if TYPE_CHECKING:
    from stobatch.dp.guarantee import PrivacyGuarantee
    from stobatch.federated import Rounds
    from stobatch.runs import Run


@app.command(rich_help_panel="Federate")
def federate(
    out: Annotated[Path, typer.Option(help="The server's run directory; parties get OUT.parties/NAME.")],
    recipe: Recipe = None,
    config: Config = None,
    set_: Set = None,
    from_: Prior = None,
    seed: Seed = None,
    device: Device = None,
    through: Annotated[
        str, typer.Option(help="here: all in this process; loopback: Flower's real processes, on 127.0.0.1 alone")
    ] = "here",
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Cut a data set among parties that trust no one, and let them train one model; certify and evaluate it as any."""
    from stobatch.federated import federate as run_federation
    from stobatch.loading import read_config
    from stobatch.reporting.terminal import party_table, trained_line
    from stobatch.results import FederatedTraining, FederationAccount, Training
    from stobatch.runs import Run

    run, way = Run(out), _transport(through)
    if resume and run.exists and not (recipe or config):
        terms = read_config(run).override_all(training_changes(set_, seed, device))
    else:
        terms = read_settings(recipe or (None if config else "federated.demo"), config, set_, seed, device)
    model = run_federation(terms, out, prior=from_, rounds=way, resume=resume, quiet=as_json)
    account = FederationAccount.read(run)
    document = FederatedTraining(run=str(out), training=Training.read(run), **dict(account))
    done = trained_line(out, model.config.training_hash, document.training)
    show(document, as_json, done, party_table(document, out))


def _transport(through: str) -> Rounds:
    """Return what carries the conversation."""
    from stobatch.federated import in_process
    from stobatch.federated.loopback import require_flower, through_flower

    ways: dict[str, Rounds] = {"here": in_process, "loopback": through_flower}
    if through not in ways:
        raise SettingError(f"--through {through} is not known.", remedy=f"Use {' or '.join(ways)}.")
    if through == "loopback":
        require_flower()  # before anything is read or written
    return ways[through]


@app.command(rich_help_panel="Federate")
def parties(
    run: Annotated[Path, typer.Argument(help="A federation's run directory, or a party's own.")], as_json: Json = False
) -> None:
    """Show what every party has promised and spent; in a party's own directory, its own guarantee."""
    from stobatch.reporting.terminal import guarantee_card, party_table
    from stobatch.results import FederationAccount, Participation
    from stobatch.runs import Run

    directory = Run(run)
    federation, party = FederationAccount.read_if_there(directory), Participation.read_if_there(directory)
    if federation is not None:
        federation = federation.replace(guarantee=_guarantee_now(directory, federation.guarantee))
        show(federation, as_json, party_table(federation, run))
    elif party is not None:
        party = party.replace(guarantee=_guarantee_now(directory, party.guarantee))
        show(party, as_json, guarantee_card(party.guarantee))
    else:
        raise RunError(
            f"{run} is neither a finished federation nor a party that has spoken.",
            remedy="Make one: `stobatch federate --out RUN`.",
        )


def _guarantee_now(run: Run, guarantee: PrivacyGuarantee) -> PrivacyGuarantee:
    """Return a recorded guarantee, void where the terms name a public seed, whenever it was written."""
    from stobatch.results import StartedRun

    return guarantee if StartedRun.read(run).seed is None else guarantee.with_public_seed()
