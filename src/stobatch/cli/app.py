"""`stobatch plan | train | certify | attack | evaluate | audit | report | where | demo`.

`compare`, `federate`, `parties` and `guarantee` have files of their own.

Results go to standard output (as JSON with `--json`), progress and errors to standard error. Exit codes: 0 done,
1 an audit refuted a claim, a proved certificate was broken, or `verify` found a difference,
2 something to mend in the call, 130 interrupted with everything saved.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from stobatch.config import RunConfig, load_config
from stobatch.errors import EndedElsewhere, SettingError, StobatchError
from stobatch.interrupts import STOPPED, Interrupted, obey_stops
from stobatch.processes import leads, one_of_several
from stobatch.reporting import terminal as tables
from stobatch.reporting.terminal import verified_page
from stobatch.results import Audit, Document, Outcome, PlanDocument, Scores, ShardFolder, TrainedRun, Training
from stobatch.runs import Run
from stobatch.settings import parse_assignment
from stobatch.types import Status, Verdict

app = typer.Typer(
    help="Train classifiers with differential privacy and certified robustness, and see what is guaranteed by whom.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _one_process(context: typer.Context) -> None:
    """Train classifiers with differential privacy and certified robustness, and see what is guaranteed by whom."""
    if one_of_several() and context.invoked_subcommand != "train":
        raise SettingError(
            f"`stobatch {context.invoked_subcommand}` runs in one process, and torchrun started several.",
            remedy="Run it without torchrun; only `train` is spread over processes.",
        )


Recipe = Annotated[
    str | None,
    typer.Option(
        help="A named configuration, as demo, sound.mnist or published.mnist; or your own, package.module:function."
    ),
]
Config = Annotated[Path | None, typer.Option(help="A TOML or JSON file instead of a recipe.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change one setting, as in --set training.steps=100.")]
Seed = Annotated[
    int | None,
    typer.Option(help="A public seed for an experiment that can be repeated; its privacy guarantee is void."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what was interrupted.")]
Limit = Annotated[int | None, typer.Option(help="Only the first so many test examples.")]
RunPath = Annotated[Path | None, typer.Argument(help="A run directory.", show_default=False)]
OutOfRun = Annotated[Path | None, typer.Option("--out", help="The run directory, instead of the argument.")]
Radii = Annotated[list[float] | None, typer.Option("--radius", help="Over [-1, 1]; may be repeated.")]
NormName = Annotated[str | None, typer.Option("--norm", help="linf, l2 or l1")]
Section = Annotated[str | None, typer.Option("--recipe", help="Take this recipe's settings for the verb.")]
Signers = Annotated[
    Path | None, typer.Option(help="Check the signature: ssh-keygen's allowed signers, or a minisign key.")
]
Identity = Annotated[str | None, typer.Option(help="Who has to have signed, as in the file of signers.")]
Draws = Annotated[int | None, typer.Option(help="Draw other random numbers, reproducibly.")]


def _assignments(pairs: list[str] | None) -> dict[str, Any]:
    return dict(parse_assignment(pair) for pair in pairs or [])


def _changes(pairs: list[str] | None, seed: int | None, device: str | None) -> dict[str, Any]:
    """What the command line says of a training: --set, --seed and --device. A public seed comes from --seed alone."""
    changes = _assignments(pairs)
    if seed is None:
        require_secret(changes.get("seed"), "--set")
    chosen = {"seed": seed, "machine.device": device}
    return changes | {key: value for key, value in chosen.items() if value is not None}


def require_secret(seed: object, source: str) -> None:
    """Raise if a public seed comes from elsewhere than the command line's own option."""
    if seed is not None:
        raise SettingError(
            f"{source} has a public seed ({seed}), and --seed is not given.",
            why="Whoever knows the seed can take the noise off, so the privacy guarantee would be void.",
            remedy=f"Leave it out, or say that you want such an experiment: --seed {seed}.",
        )


def _config(
    recipe_name: str | None, file: Path | None, pairs: list[str] | None, seed: int | None, device: str | None
) -> RunConfig:
    from stobatch_recipes import RECIPES, recipe

    if recipe_name and file:
        raise SettingError("both --recipe and --config are given.", remedy="Give one of them.")
    if not (recipe_name or file):
        raise SettingError(
            "neither --recipe nor --config is given.",
            remedy=f"Name a recipe, as in `--recipe sound.mnist`: {', '.join(RECIPES)}.",
        )
    config = load_config(file) if file else recipe(recipe_name or "")
    changes = _changes(pairs, seed, device)
    if seed is None:
        require_secret(config.seed, str(file or recipe_name))
    return config.override_all(changes)


def _run(argument: Path | None, option: Path | None) -> Path:
    if (argument is None) == (option is None):
        raise SettingError("no run directory, or two, are given.", remedy="Write `stobatch VERB RUN`.")
    return argument or option or Path()


def _overrides(section: str, recipe_name: str | None, pairs: list[str] | None, limit: int | None) -> dict[str, Any]:
    """A verb's settings: from a recipe, then from --set, then from --limit."""
    from stobatch_recipes import recipe

    named = getattr(recipe(recipe_name), section).to_dict() if recipe_name else {}
    limited = {f"{section}.limit": limit} if limit is not None else {}
    return {f"{section}.{key}": value for key, value in named.items()} | _assignments(pairs) | limited


def _print(document: Document | dict[str, Any], as_json: bool, *parts: Any) -> None:
    if as_json:
        print(document.to_json() if isinstance(document, Document) else json.dumps(document, indent=2))
    else:
        tables.show(*parts)


@app.command()
def plan(
    recipe: Recipe = None,
    config: Config = None,
    set_: Set = None,
    seed: Seed = None,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="Also write the plan to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Every number that privacy depends on, before any data is read, with its place in the paper."""
    import stobatch
    from stobatch.files import write_json

    document = PlanDocument.from_dict(stobatch.plan(_config(recipe, config, set_, seed, device)).to_dict())
    if out is not None:
        write_json(out, document.kind, document.to_dict())
    _print(document, as_json, tables.plan_parts(document))


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="The run directory to write.")],
    recipe: Recipe = None,
    config: Config = None,
    set_: Set = None,
    seed: Seed = None,
    device: Device = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Train a model into a run directory; with --resume alone, continue it with its own settings."""
    import stobatch
    from stobatch.loading import read_config

    run = Run(out)
    if resume and run.exists and not (recipe or config):
        settings = read_config(run).override_all(_changes(set_, seed, device))
    else:
        settings = _config(recipe, config, set_, seed, device)
    model = stobatch.train(settings, out, resume=resume, quiet=as_json)
    if not leads():
        return
    document = TrainedRun(
        run=str(out), training_hash=settings.training_hash, training=Training.read(run), guarantee=model.guarantee
    )
    done = tables.trained_line(out, settings.training_hash, document.training)
    _print(document, as_json, done, tables.guarantee_lines(document.guarantee, out))


@app.command()
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
    """A label and its certified radius per test example, by the best certificate for the norm; and which it is."""
    import stobatch

    overrides = _overrides("certification", recipe, set_, limit)
    said = {"evaluation.radii": radius, "evaluation.norm": norm}
    overrides |= {key: value for key, value in said.items() if value not in (None, [])}
    summary = stobatch.certify(
        _run(run, out), overrides=overrides, seed=seed, resume=resume, quiet=as_json, device=device
    )
    _print(summary, as_json, tables.certificate_parts(summary))


@app.command()
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

    published = protocol == "published"
    names = "attacks" if published else "adaptive_attacks" if function == "single_pass" else "vote_attacks"
    said = {names: attack_, "radii": radius, "norm": norm, "attack_steps" if published else "adaptive_steps": steps}
    overrides = _overrides("evaluation", recipe, set_, limit)
    overrides |= {f"evaluation.{key}": value for key, value in said.items() if value not in (None, [])}
    place = _run(run, out)
    document = stobatch.attack(
        place, protocol=protocol, function=function, overrides=overrides, seed=seed, resume=resume,
        quiet=as_json, device=device,
    )  # fmt: skip
    _print(document, as_json, tables.guarantee_lines(document.guarantee, place), tables.attack_parts(document))


@app.command()
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
    """Every protocol side by side, the gap between them, certified accuracy, and flags for what looks too good."""
    import stobatch

    overrides = _overrides("evaluation", recipe, set_, limit)
    place = _run(run, out)
    scores = stobatch.evaluate(place, overrides=overrides, seed=seed, resume=resume, quiet=as_json, device=device)
    certified = [tables.certificate_parts(scores.certificates)] if scores.certificates else []
    _print(scores, as_json, tables.guarantee_lines(scores.guarantee, place), tables.score_parts(scores), *certified)
    _exit_if_refuted(scores)


def _exit_if_refuted(scores: Scores) -> None:
    """A broken certificate that only claims is a finding; one that was proved is a fault that must stop a pipeline."""
    if any(flag.refutes is Status.PROVED for flag in scores.flags):
        raise SystemExit(1)


@app.command()
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

    said = {"audit.instruments": instrument, "audit.trainings": trainings, "audit.confidence": confidence}
    overrides = _assignments(set_) | {key: value for key, value in said.items() if value not in (None, [])}
    require_secret(overrides.get("seed"), "--set")
    settings = _config(recipe, None, None, None, device).override_all(overrides) if recipe else None
    document = stobatch.audit(
        _run(run, out), config=settings, overrides=None if recipe else overrides, seed=seed, resume=resume,
        quiet=as_json, device=device,
    )  # fmt: skip
    _print(document, as_json, *tables.audit_tables(document))
    if _refuted(document, *Status):
        raise SystemExit(1)
    if document.claims and document.verdict is Verdict.NOT_TESTED:
        raise SystemExit(3)


def _refuted(audit: Audit, *statuses: Status) -> bool:
    """Whether a claim was refuted that had one of these statuses."""
    return any(f.verdict is Verdict.REFUTED and f.claim_status in statuses for f in audit.findings)


@app.command()
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
    """One HTML file that can be mailed: curves, the guarantee with its status, the flags; computed again from rows."""
    import stobatch

    document = stobatch.report(runs, out, images=images, signers=signers, identity=identity)
    _print(document, as_json, f"report: {document.report}")


@app.command()
def where(
    item: Annotated[str | None, typer.Argument(help="As in 'Theorem 5'; all items if left out.")] = None,
    as_json: Json = False,
) -> None:
    """Find an item of the paper in the code, and learn whether it holds."""
    from stobatch import paper

    found = [paper.where(item)] if item else list(paper.items().values())
    rows = [{**vars(one), "file": paper.relative_file(one)} for one in found]
    lines = [
        f"{one.name}: src/{paper.relative_file(one)}:{one.line}  {one.summary}\n    {one.verdict}" for one in found
    ]
    _print({"items": rows}, as_json, *lines)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The run directory to write.")] = Path("runs/demo"),
    recipe: Annotated[str, typer.Option(help="Another recipe for the same job.")] = "demo",
    set_: Set = None,
    seed: Seed = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """The whole job on the embedded data: plan, train, certify, evaluate, audit, report, verify. Resumes itself."""
    import stobatch
    from stobatch.reporting.terminal import verified_page
    from stobatch.verification import verify

    settings = _config(recipe, None, set_, seed, device)
    the_plan = PlanDocument.from_dict(stobatch.plan(settings).to_dict())
    if not as_json:
        tables.show(tables.plan_parts(the_plan))
    stobatch.train(settings, out, resume=True, quiet=as_json)
    changed = {
        key: value
        for key, value in _assignments(set_).items()
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
    _print({**scores.to_dict(), **both}, as_json, *shown, *page)
    _exit_if_refuted(scores)
    if _refuted(audited, Status.PROVED) or verified.verdict is Outcome.DIFFERS:
        raise SystemExit(1)


def main() -> None:
    """Run the command line and turn every expected failure into one line and an exit code."""
    try:
        with obey_stops():
            try:
                _require_encodable(sys.argv[1:])
                app()
            finally:
                sys.stdout.flush()
    except EndedElsewhere as error:
        raise SystemExit(error.code) from None
    except StobatchError as error:
        if one_of_several() and not _speaks(error):
            raise SystemExit(2) from None
        _complain(str(error), 2)
    except (Interrupted, KeyboardInterrupt):
        # torchrun ends the others when one fails, which has said why.
        if one_of_several() and not _speaks(StobatchError(STOPPED, remedy="")):
            raise SystemExit(130) from None
        _complain(STOPPED, 130)
    except MemoryError:
        _complain("the memory is not enough. Lower machine.memory_mb, or take a smaller network or less data.", 2)
    except OSError as error:
        if _output_fails():
            # What the interpreter would flush at exit has nowhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _complain(f"cannot write the output: {error.strerror}. Send it somewhere else.", 2)
        what = f"cannot use {error.filename}" if error.filename is not None else "the system refused a request"
        _complain(f"{what}: {error.strerror or error}. Look at its place and permissions, then run again.", 2)


def _require_encodable(arguments: list[str]) -> None:
    """Refuse half a character before a parser of the command line trips over it, as some versions do."""
    for argument in arguments:
        try:
            os.fsencode(argument)
        except UnicodeEncodeError:
            raise SettingError(
                f"{argument!a} cannot be written in the system's encoding.",
                why="It names no file and no setting.",
                remedy="Write the argument anew.",
            ) from None


def _output_fails() -> bool:
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _speaks(error: StobatchError) -> bool:
    """Of several processes that fail one tells the user."""
    from stobatch.training.engines.group import speaks

    return speaks(error)


def _complain(message: str, code: int) -> NoReturn:
    print(f"stobatch: {message}", file=sys.stderr)
    raise SystemExit(code)


@app.command()
def doctor(
    out: Annotated[Path, typer.Option(help="The folder in which runs will be written.")] = Path("runs"),
    only: Annotated[list[str] | None, typer.Option(help="Only this check; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Try everything that training on this machine rests on: arithmetic, disk, data, processes, GPUs."""
    from stobatch.doctor import doctor as examine_machine
    from stobatch.reporting.terminal import health_table

    document = examine_machine(out, only=only or (), quiet=as_json)
    _print(document, as_json, health_table(document))
    if not document.ready:
        raise SystemExit(2)


@app.command()
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
        _print(document, as_json, f"checked {_line(document)}", *_warnings(document), _copies(document))
    elif out is not None:
        # Only where the data are and how they are read: nothing is trained.
        settings = _config(recipe or (None if config else "demo"), config, set_, None, None)
        document = shard(settings, out, num_shards=num_shards, seed=seed, quiet=as_json)
        use = f"train on it with --set data.name=shards --set machine.data_root={out}"
        _print(document, as_json, f"wrote {_line(document)}", _copies(document), use)


def _line(document: ShardFolder) -> str:
    info, smallest, largest = document.dataset, document.smallest_shard, document.largest_shard
    size = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    return (
        f"{document.folder}: {info.name}, {info.num_train:,} training examples in {document.num_shards} "
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
    positions = "; ".join(", ".join(map(str, group)) for group in repeated.first_positions)
    return [
        f"warning: {repeated.count:,} records occur more than once, {repeated.in_more_than_one_shard:,} of them "
        f"in more than one shard (positions {positions}). Two persons may look alike; one person twice is protected "
        "less than the guarantee says: remove the repetition and write the shards again."
    ]


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

    document = verify_run(run, sample=sample, signers=signers, identity=identity, seed=seed)
    _print(document, as_json, verified_page(document))
    if document.verdict is Outcome.DIFFERS:
        raise SystemExit(1)


@app.command()
def sign(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    key: Annotated[Path, typer.Option(help="A private key of ssh-keygen's, or of minisign's; kept outside the run.")],
    as_json: Json = False,
) -> None:
    """Sign a run's manifest: that these files are the ones you mean. Any verb that changes them takes it off again."""
    from stobatch.verification.checks import sign as sign_run

    signature = sign_run(run, key)
    _print({"run": str(run), "signature": str(signature)}, as_json, f"signed: {signature}")
