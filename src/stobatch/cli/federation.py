"""`federate` and `parties`: a federation on one machine, and what every party of it has spent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stobatch.cli.app import Config, Device, Json, Recipe, Resume, Seed, Set, _changes, _config, _print, app
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.errors import RunError, SettingError
from stobatch.reporting.terminal import guarantee_card, party_table, trained_line
from stobatch.results import FederatedTraining, FederationAccount, Participation, StartedRun, Training
from stobatch.runs import Run

if TYPE_CHECKING:
    from stobatch.federated import Rounds


@app.command()
def federate(
    out: Annotated[Path, typer.Option(help="The server's run directory; parties get OUT.parties/NAME.")],
    recipe: Recipe = None,
    config: Config = None,
    set_: Set = None,
    seed: Seed = None,
    device: Device = None,
    through: Annotated[
        str, typer.Option(help="here: all in this process; loopback: Flower's real processes, on 127.0.0.1 alone")
    ] = "here",
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Cut a data set among parties that trust nobody, and let them train one model; certify and evaluate it as any."""
    from stobatch.federated import federate as run_federation
    from stobatch.loading import read_config

    run = Run(out)
    if resume and run.exists and not (recipe or config):
        terms = read_config(run).override_all(_changes(set_, seed, device))
    else:
        terms = _config(recipe or (None if config else "federated.demo"), config, set_, seed, device)
    model = run_federation(terms, out, rounds=_way(through), resume=resume, quiet=as_json)
    account = FederationAccount.read(run)
    document = FederatedTraining(run=str(out), training=Training.read(run), **dict(account))
    done = trained_line(out, model.config.training_hash, document.training)
    _print(document, as_json, done, party_table(document, out))


def _way(through: str) -> Rounds:
    """How the conversation is carried."""
    from stobatch.federated import in_process
    from stobatch.federated.loopback import deployed

    ways: dict[str, Rounds] = {"here": in_process, "loopback": deployed}
    if through not in ways:
        raise SettingError(f"--through {through} is not known.", remedy=f"Use {' or '.join(ways)}.")
    return ways[through]


@app.command()
def parties(
    run: Annotated[Path, typer.Argument(help="A federation's run directory, or a party's own.")], as_json: Json = False
) -> None:
    """What every party has promised and spent; in a party's own directory, its own guarantee."""
    directory = Run(run)
    federation, party = FederationAccount.read_if_there(directory), Participation.read_if_there(directory)
    if federation is not None:
        federation = federation.replace(guarantee=_held(directory, federation.guarantee))
        _print(federation, as_json, party_table(federation, run))
    elif party is not None:
        party = party.replace(guarantee=_held(directory, party.guarantee))
        _print(party, as_json, guarantee_card(party.guarantee))
    else:
        raise RunError(
            f"{run} is neither a finished federation nor a party that has spoken.",
            remedy="Make one: `stobatch federate --out RUN`.",
        )


def _held(run: Run, guarantee: PrivacyGuarantee) -> PrivacyGuarantee:
    """A recorded guarantee, void where the terms name a public seed, whenever it was written."""
    return guarantee if StartedRun.read(run).seed is None else guarantee.with_public_seed()
