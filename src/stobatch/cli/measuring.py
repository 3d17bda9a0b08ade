"""`certify`, `attack`, `evaluate` and `audit`: what a trained run withstands."""

from __future__ import annotations

from typing import Annotated

import typer

from stobatch.cli.app import app
from stobatch.cli.options import (
    Device,
    Draws,
    Json,
    Limit,
    NormName,
    OutOfRun,
    Radii,
    Resume,
    RunPath,
    Section,
    Set,
    assignments,
    exit_if_refuted,
    is_refuted,
    read_settings,
    require_secret,
    run_path,
    show,
    verb_overrides,
)
from stobatch.types import Status, Verdict


@app.command(rich_help_panel="Measure")
def certify(
    run: RunPath = None,
    out: OutOfRun = None,
    radius: Radii = None,
    norm: NormName = None,
    recipe: Section = None,
    set_: Set = None,
    limit: Limit = None,
    seed: Draws = None,
    device: Device = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Certify test examples: a label and its radius for each, by the best certificate for the norm; and which it is."""
    import stobatch
    from stobatch.reporting import terminal as tables

    overrides = verb_overrides("certification", recipe, set_, limit)
    options = {"evaluation.radii": radius, "evaluation.norm": norm}
    overrides |= {key: value for key, value in options.items() if value not in (None, [])}
    summary = stobatch.certify(
        run_path(run, out), overrides=overrides, seed=seed, resume=resume, quiet=as_json, device=device
    )
    show(summary, as_json, tables.certificate_parts(summary))


@app.command(rich_help_panel="Measure")
def attack(
    run: RunPath = None,
    out: OutOfRun = None,
    protocol: Annotated[str, typer.Option(help="adaptive (the deployed function) or published (as the paper)")] = (
        "adaptive"
    ),
    function: Annotated[str, typer.Option(help="What is deployed: single_pass or vote")] = "single_pass",
    attack_: Annotated[list[str] | None, typer.Option("--attack", help="Only this one; may be repeated.")] = None,
    radius: Radii = None,
    norm: NormName = None,
    steps: Annotated[int | None, typer.Option(help="Gradient steps, up to thousands.")] = None,
    recipe: Section = None,
    set_: Set = None,
    limit: Limit = None,
    seed: Draws = None,
    device: Device = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Attack the test set under one protocol: one row per example, and the accuracy that is left."""
    import stobatch
    from stobatch.reporting import terminal as tables

    published = protocol == "published"
    names = "attacks" if published else "adaptive_attacks" if function == "single_pass" else "vote_attacks"
    options = {names: attack_, "radii": radius, "norm": norm, "attack_steps" if published else "adaptive_steps": steps}
    overrides = verb_overrides("evaluation", recipe, set_, limit)
    overrides |= {f"evaluation.{key}": value for key, value in options.items() if value not in (None, [])}
    place = run_path(run, out)
    document = stobatch.attack(
        place, protocol=protocol, function=function, overrides=overrides, seed=seed, resume=resume,
        quiet=as_json, device=device,
    )  # fmt: skip
    show(document, as_json, tables.guarantee_lines(document.guarantee, place), tables.attack_parts(document))


@app.command(rich_help_panel="Measure")
def evaluate(
    run: RunPath = None,
    out: OutOfRun = None,
    recipe: Section = None,
    set_: Set = None,
    limit: Limit = None,
    seed: Draws = None,
    device: Device = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Attack by every protocol side by side; show the gap, certified accuracy, and flags for what looks too good."""
    import stobatch
    from stobatch.reporting import terminal as tables

    overrides = verb_overrides("evaluation", recipe, set_, limit)
    place = run_path(run, out)
    scores = stobatch.evaluate(place, overrides=overrides, seed=seed, resume=resume, quiet=as_json, device=device)
    certified = [tables.certificate_parts(scores.certificates)] if scores.certificates else []
    show(scores, as_json, tables.guarantee_lines(scores.guarantee, place), tables.score_parts(scores), *certified)
    exit_if_refuted(scores)


@app.command(rich_help_panel="Measure")
def audit(
    run: RunPath = None,
    out: OutOfRun = None,
    instrument: Annotated[
        list[str] | None,
        typer.Option(help="release, many_runs, one_run, membership or certificates; may be repeated."),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Audit a recipe's settings: no run is needed.")] = None,
    trainings: Annotated[int | None, typer.Option(help="Models that many_runs trains.")] = None,
    confidence: Annotated[float | None, typer.Option(help="1 minus the false-alarm rate, over all findings.")] = None,
    set_: Set = None,
    seed: Draws = None,
    device: Device = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Try to refute what a run claims: its privacy, by attacks on trainings; its certificates, inside every ball.

    Exits with 1 if a claim was refuted, with 3 if none was tested.
    """
    import stobatch
    from stobatch.reporting import terminal as tables

    options = {"audit.instruments": instrument, "audit.trainings": trainings, "audit.confidence": confidence}
    overrides = assignments(set_) | {key: value for key, value in options.items() if value not in (None, [])}
    require_secret(overrides.get("seed"), "--set")
    settings = read_settings(recipe, None, None, None, device).override_all(overrides) if recipe else None
    document = stobatch.audit(
        run_path(run, out), config=settings, overrides=None if recipe else overrides, seed=seed, resume=resume,
        quiet=as_json, device=device,
    )  # fmt: skip
    show(document, as_json, *tables.audit_tables(document))
    if is_refuted(document, *Status):
        raise SystemExit(1)
    if document.claims and document.verdict is Verdict.NOT_TESTED:
        raise SystemExit(3)
