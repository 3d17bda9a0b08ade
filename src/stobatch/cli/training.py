"""`plan`, `train`, `demo`, `shard`, `pretrain` and `tune`: from settings to a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    assignments,
    exit_if_refuted,
    is_refuted,
    read_settings,
    show,
    training_changes,
)
from stobatch.errors import SettingError
from stobatch.interrupts import Interrupted
from stobatch.processes import leads
from stobatch.types import Status

if TYPE_CHECKING:
    from stobatch.config import RunConfig
    from stobatch.results import ShardFolder

_STOPPED = "interrupted; a prior is written at its end, and of this one nothing is. Run the same command again."
_MOST_HELD_OUT = 5000


@app.command(rich_help_panel="Train")
def plan(
    recipe: Recipe = None,
    config: Config = None,
    set_: Set = None,
    seed: Seed = None,
    device: Device = None,
    prior: Prior = None,
    out: Annotated[Path | None, typer.Option(help="Also write the plan to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Show every number that privacy depends on, before any data is read, with its place in the paper."""
    import stobatch
    from stobatch.files import write_json
    from stobatch.reporting import terminal as tables
    from stobatch.results import PlanDocument

    settings = read_settings(recipe, config, set_, seed, device)
    document = PlanDocument.from_dict(stobatch.plan(settings, prior=prior).to_dict())
    if out is not None:
        write_json(out, document.kind, document.to_dict())
    show(document, as_json, tables.plan_parts(document))


@app.command(rich_help_panel="Train")
def train(
    out: Annotated[Path, typer.Option(help="The run directory to write.")],
    recipe: Recipe = None,
    config: Config = None,
    set_: Set = None,
    seed: Seed = None,
    device: Device = None,
    prior: Prior = None,
    resume: Resume = False,
    log: Annotated[
        str | None, typer.Option(help="tensorboard: write what may be seen into private/tensorboard of the run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model into a run directory; with --resume alone, continue it with its own settings."""
    import stobatch
    from stobatch.loading import read_config
    from stobatch.reporting import terminal as tables
    from stobatch.results import TrainedRun, Training
    from stobatch.runs import Run

    run = Run(out)
    if resume and run.exists and not (recipe or config):
        settings = read_config(run).override_all(training_changes(set_, seed, device))
    elif resume and not (recipe or config):
        raise SettingError(
            f"{out} is not a run, so there is nothing to resume.",
            remedy="Look at its name, or begin it: `stobatch train --recipe demo --out RUN`.",
        )
    else:
        settings = read_settings(recipe, config, set_, seed, device)
    model = stobatch.train(settings, out, prior=prior, resume=resume, quiet=as_json, log=log)
    if not leads():
        return
    trained, training = model.config.training_hash, Training.read(run)
    document = TrainedRun(run=str(out), training_hash=trained, training=training, guarantee=model.guarantee)
    done = tables.trained_line(out, trained, training)
    show(document, as_json, done, tables.guarantee_lines(document.guarantee, out))


@app.command(rich_help_panel="Train")
def demo(
    out: Annotated[Path, typer.Option(help="The run directory to write.")] = Path("runs/demo"),
    recipe: Annotated[str, typer.Option(help="Another recipe for the same job.")] = "demo",
    set_: Set = None,
    seed: Seed = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Do the whole job on the embedded data: plan, train, certify, evaluate, audit, report, verify. Resumes itself."""
    import stobatch
    from stobatch.reporting import terminal as tables
    from stobatch.reporting.terminal import verified_page
    from stobatch.results import Outcome, PlanDocument
    from stobatch.verification import verify

    settings = read_settings(recipe, None, set_, seed, device)
    the_plan = PlanDocument.from_dict(stobatch.plan(settings).to_dict())
    if not as_json:
        tables.show(tables.plan_parts(the_plan))
    stobatch.train(settings, out, resume=True, quiet=as_json)
    changed = {
        key: value
        for key, value in assignments(set_).items()
        if key.startswith(("certification", "evaluation", "audit"))
    }
    certificates = stobatch.certify(out, overrides=changed, resume=True, quiet=as_json, device=device)
    scores = stobatch.evaluate(out, overrides=changed, resume=True, quiet=as_json, device=device)
    audited = stobatch.audit(out, overrides=changed, resume=True, quiet=as_json, device=device)
    written = stobatch.report([out]).report
    verified = verify(out)
    shown = (tables.score_parts(scores), tables.certificate_parts(certificates), *tables.audit_tables(audited))
    page = (f"report: {written}", verified_page(verified))
    both = {"audit": audited.to_dict(), "verification": verified.to_dict()}
    show({**scores.to_dict(), **both}, as_json, *shown, *page)
    exit_if_refuted(scores)
    if is_refuted(audited, Status.PROVED) or verified.verdict is Outcome.DIFFERS:
        raise SystemExit(1)


@app.command(rich_help_panel="Train")
def shard(
    out: Annotated[Path | None, typer.Option(help="The folder to write; new or empty.")] = None,
    recipe: Recipe = None,
    config: Config = None,
    set_: Set = None,
    num_shards: Annotated[int, typer.Option(min=1, help="How many; a process of a training reads whole ones.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Deals the records to the shards; it keeps no secret.")] = 0,
    check: Annotated[Path | None, typer.Option(help="Check this folder instead: files, values, repetitions.")] = None,
    as_json: Json = False,
) -> None:
    """Write a data set as disjoint shards with checksums, for --set data.name=shards; or --check such a folder."""
    from stobatch.sharding import check_shards, shard

    if (out is None) == (check is None):
        raise SettingError(
            "no folder, or two, are given.", remedy="Write one with `--out DIR`, or look at one with `--check DIR`."
        )
    if check is not None:
        if recipe or config or set_:
            raise SettingError("--check takes no settings.", remedy="Write `stobatch shard --check DIR`.")
        document = check_shards(check, quiet=as_json)
        show(document, as_json, f"checked {_line(document)}", *_warnings(document), _copies(document))
    elif out is not None:
        # Only where the data are and how they are read: nothing is trained.
        settings = read_settings(recipe or (None if config else "demo"), config, set_, None, None)
        document = shard(settings, out, num_shards=num_shards, seed=seed, quiet=as_json)
        use = f"train on it with --set data.name=shards --set machine.data_root={out}"
        show(document, as_json, f"wrote {_line(document)}", _copies(document), use)


def _line(document: ShardFolder) -> str:
    info, smallest, largest = document.dataset, document.smallest_shard, document.largest_shard
    size = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    persons = "" if info.num_persons is None else f" of {info.num_persons:,} persons"
    return (
        f"{document.folder}: {info.name}, {info.num_train:,} training examples{persons} in {document.num_shards} "
        f"shards of {size}, {info.num_test:,} test examples, {document.bytes / 1e6:,.1f} MB as "
        f"{document.encoding}, dealt by {document.dealt.rule.removeprefix('by ')}"
    )


def _copies(document: ShardFolder) -> str:
    copies, tests = document.test_copies, document.dataset.num_test
    return f"{'warning: ' if copies else ''}{copies:,} of {tests:,} test examples are training examples"


def _warnings(document: ShardFolder) -> list[str]:
    repeated = document.repeated_records
    if repeated is None or not repeated.count:
        return ["no record occurs twice"]
    less = (
        "one person twice is protected less than the guarantee says: remove the repetition and write the shards again."
        if document.dataset.num_persons is None
        else "records of one person have to name that person: the guarantee is per person."
    )
    positions = "; ".join(", ".join(map(str, group)) for group in repeated.first_positions)
    return [
        f"warning: {repeated.count:,} records occur more than once, {repeated.in_more_than_one_shard:,} of them "
        f"in more than one shard (positions {positions}). Two persons may look alike; {less}"
    ]


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


@app.command(rich_help_panel="Train")
def tune(
    out: Annotated[Path, typer.Option(help="The folder to write: the winner, and in private/ all candidates.")],
    recipe: Recipe = None,
    config: Config = None,
    try_: Annotated[
        list[str] | None,
        typer.Option("--try", help="Values of one setting, as training.learning_rate=1,2,4; may be repeated."),
    ] = None,
    set_: Set = None,
    held_out: Annotated[
        int | None,
        typer.Option(
            help="Training records, or persons, that each candidate keeps aside to be scored on; a tenth if unset."
        ),
    ] = None,
    from_: Prior = None,
    workers: Annotated[int, typer.Option(min=1, help="Candidates trained at once, each in a process of its own.")] = 1,
    device: Device = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Search settings at random and pay for it: the winner's ε covers the whole search, at most method.epsilon."""
    import stobatch
    from stobatch.config import RunConfig
    from stobatch.reporting import terminal as tables
    from stobatch.results import Search
    from stobatch.runs import Run

    directory = Run(out)
    if resume and directory.has("search") and not (recipe or config):
        if try_ or held_out is not None:
            raise SettingError(
                "--try and --held-out are not for --resume.", remedy="Leave them out: the search has its own."
            )
        settings = RunConfig.from_dict(Search.read(directory).config).override_all(training_changes(set_, None, device))
    else:
        settings = _search_settings(read_settings(recipe, config, set_, None, device), try_, held_out)
    document = stobatch.tune(settings, out, prior=from_, workers=workers, resume=resume, quiet=as_json)
    private = f"all candidates, for the owner alone: {out}/private/candidates.json and candidates.svg"
    parts: list[Any] = [*document.lines()[1:], tables.guarantee_lines(document.guarantee, out / "winner"), private]
    show(document, as_json, *parts)
    if document.winner is None:
        raise SystemExit(1)


def _search_settings(config: RunConfig, tried: list[str] | None, held_out: int | None) -> RunConfig:
    from stobatch import data
    from stobatch.evaluation.tables import data_root

    changes: dict[str, Any] = {"search.settings": tried} if tried else {}
    if not tried and not config.search.settings:
        raise SettingError(
            "nothing is searched.", remedy="Give settings with several values, as --try training.learning_rate=1,2,4."
        )
    if held_out is not None:
        changes["data.held_out"] = held_out
    elif not config.data.held_out:
        info = data.describe(config.data, data_root(config))
        number = info.num_train if info.num_persons is None else info.num_persons
        changes["data.held_out"] = max(1, min(_MOST_HELD_OUT, number // 10))
    return config.override_all(changes)
