"""`figure`: draw the paper's figures from records, or plan, train, attack and certify what they need first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from stobatch import data
from stobatch.comparison.compare import make
from stobatch.comparison.plan import Compared
from stobatch.errors import RunError, SettingError
from stobatch.evaluation.tables import data_root
from stobatch.figures.catalogue import METHODS, OURS, PaperFigure, find
from stobatch.figures.configurations import in_smoke, pretraining, require_changes, split_start
from stobatch.figures.drawing import figure_page, figure_svg, t_tests
from stobatch.figures.plan import Asked, PlannedRun, begin_with_prior, plan_figure
from stobatch.figures.records import CURVES, add_curves, file_of, merged, read_paper, read_points, write_points
from stobatch.files import write_atomically
from stobatch.pretraining.pretrain import pretrain
from stobatch.progress import say
from stobatch.reporting.format import unit
from stobatch.reporting.summary import Facts
from stobatch.results import AttackedShare, FigureMade, FigurePoint, FiguresMade, Kind, LearningCurve, ShareAt, Training
from stobatch.results.figure import AccuracyKind
from stobatch.results.prior import prior_files
from stobatch.runs import Run
from stobatch.types import Status

RECORDS = Path("results/figures")
"""Where records of figures lie in a checkout of this project."""


@dataclass(frozen=True)
class _Opened:
    """A figure with its points, recorded and of its own runs, and its plan."""

    figure: PaperFigure
    asked: Asked
    records: Path
    recorded: list[FigurePoint]
    runs: list[PlannedRun]

    @property
    def own_file(self) -> Path:
        return file_of(self.asked.out, self.figure, self.asked.scale)

    def points(self) -> list[FigurePoint]:
        return merged(self.recorded, read_points(self.own_file, self.figure, self.asked.scale))


def figure(
    which: str,
    asked: Asked,
    *,
    records: Path = RECORDS,
    minutes: float | None = None,
    retrain: bool = False,
    dry_run: bool = False,
    quiet: bool = False,
) -> FiguresMade:
    """Draw figures of the paper into a folder from the points that are recorded; train for them where that is asked.

    `minutes` is how long it may train for what is missing, `retrain` makes everything anew, whatever is recorded, and
    a smoke run trains always. Points are written run by run, so that a killed call continues and loses none.
    """
    require_changes(asked.changes)
    figures = [in_smoke(one) if asked.scale == "smoke" else one for one in find(which)]
    asked.require_known(figures)
    opened = [_open(one, asked, records, anew=retrain) for one in figures]
    trains = retrain or minutes is not None or asked.scale == "smoke"
    if not dry_run:
        if trains:
            _train(opened, minutes, quiet)
        elif not any(one.points() for one in opened):
            raise _nothing(opened, records)
    made = [_describe(one) if dry_run else _draw(one) for one in opened]
    device = next((run.config.machine.device for one in opened for run in one.runs), "cpu")
    return FiguresMade(dry_run=dry_run, device=device, figures=tuple(made))


def _open(one: PaperFigure, asked: Asked, records: Path, *, anew: bool) -> _Opened:
    apart = anew or asked.scale == "smoke"
    recorded = [] if apart else read_points(file_of(records, one, asked.scale), one, asked.scale)
    own = read_points(file_of(asked.out, one, asked.scale), one, asked.scale)
    return _Opened(one, asked, records, recorded, plan_figure(one, asked, merged(recorded, own)))


def _nothing(opened: Sequence[_Opened], records: Path) -> RunError:
    numbers = ", ".join(str(one.figure.number) for one in opened)
    return RunError(
        f"there are no points of Figure {numbers} in {records}.",
        why="A figure is drawn from records, and trained for only where that is asked.",
        remedy="Name their folder with --records, look at what training costs with --dry-run, or try --scale smoke.",
    )


def _train(opened: Sequence[_Opened], minutes: float | None, quiet: bool) -> None:
    """Make the runs that fit into the time given, in the order of the plan; data and device are tried first."""
    wanted = [(one, run) for one in opened for run in one.runs if run.missing]
    if minutes is not None:
        _require_enough(wanted, minutes)
    each = {run.config.data.name: run.config for _, run in wanted}
    for config in each.values() if len(each) > 1 else ():
        # One that is missing is found before runs on another are made; a single one is found by its first run.
        data.load(config.data.replace(augment=False), root=data_root(config))
    started = time.monotonic()
    for place, (one, run) in enumerate(wanted):
        spent = (time.monotonic() - started) / 60
        if minutes is not None and spent + run.minutes > minutes:
            left = f"left out, {minutes - spent:.1f} minutes are left: {run.label}, {run.minutes:.1f} minutes"
            say(left, quiet=quiet)
            continue
        number = f"{place + 1} of {len(wanted)}: Figure {one.figure.number}"
        say(f"{number}, {run.label}, about {run.minutes:.1f} minutes", quiet=quiet)
        for points in _measure(run, quiet):
            before = read_points(one.own_file, one.figure, one.asked.scale)
            write_points(one.own_file, merged(before, points))
        if one.asked.scale == "full":
            add_curves(one.asked.out / CURVES, [_curve(run)])


def _require_enough(wanted: Sequence[tuple[_Opened, PlannedRun]], minutes: float) -> None:
    if not minutes > 0:
        raise SettingError(f"--minutes {minutes:g} is no time.", remedy="Give a number above 0.")
    if not wanted:
        return
    costs = [run.minutes for _, run in wanted]
    shortest = min(wanted, key=lambda pair: pair[1].minutes)[1]
    if min(costs) > minutes:
        raise SettingError(
            f"--minutes {minutes:g} buys nothing here.",
            why=f"Of {len(wanted)} runs that are missing the shortest, {shortest.label}, takes about {min(costs):.1f} "
            f"minutes on this machine, all together {sum(costs):.0f}.",
            remedy=f"Give --minutes {ceil(min(costs))} or more, fewer test images with --limit, or --device cuda.",
        )


def _measure(planned: PlannedRun, quiet: bool) -> Iterator[list[FigurePoint]]:
    """Pretrain, train, certify and attack; yield the points of each evaluation as soon as it has ended."""
    compared = _started(planned, quiet)
    for steps in planned.steps_missing:
        config = compared.config.override("evaluation.attack_steps", steps)
        make(replace(compared, config=config), certificates=planned.certifies, quiet=quiet)
        yield points_of(planned, planned.run, steps)


def _started(planned: PlannedRun, quiet: bool) -> Compared:
    """Return the training with its public start, which is made first where it is not there."""
    compared, (_, start) = planned.compared, split_start(planned.settings)
    if start is None or compared.prior is None or compared.config.prior.name is not None:
        return compared
    if not prior_files(compared.prior)[-1].exists():
        steps, batch_size = pretraining(planned.scale)
        pretrain(compared.config, start, compared.prior, steps=steps, batch_size=batch_size, quiet=quiet)
    return begin_with_prior(compared)


def _curve(planned: PlannedRun) -> LearningCurve:
    training = Training.read(planned.run)
    return LearningCurve(
        data=planned.figure.data, method=planned.method, settings=planned.settings, epsilon=planned.epsilon,
        privacy=METHODS[planned.method].privacy, seed=planned.seed, training_hash=planned.training_hash,
        device=training.device, seconds=training.seconds_since_last_start, history=training.history,
    )  # fmt: skip


def points_of(planned: PlannedRun, run: Run, steps: int) -> list[FigurePoint]:
    """Return the points that the scores and certificates of a run give to a figure."""
    facts, training, figure = Facts.read(run), Training.read(run), planned.figure
    ours = planned.method in OURS

    def point(
        kind: AccuracyKind, protocol: str, attack: str, row: ShareAt | AttackedShare, **more: object
    ) -> FigurePoint:
        return FigurePoint(
            figure=figure.number,
            scale=planned.scale,  # type: ignore[arg-type]
            data=figure.data,
            method=planned.method,
            settings=planned.settings,
            protocol=protocol,  # type: ignore[arg-type]
            kind_of_accuracy=kind,
            axis=figure.axis,
            epsilon=planned.epsilon,
            privacy=METHODS[planned.method].privacy,
            attack=attack,
            radius=row.radius,
            unit=unit(facts.scores.norm, facts.scores.input_range),
            accuracy=row.value,
            images=row.total,
            training_hash=planned.training_hash,
            training_steps=training.steps,
            seed=facts.seed,
            device=training.device,
            seconds=training.seconds_since_last_start,
            source=f"run {facts.scores.weights_sha256 or facts.scores.training_hash}"[:16],
            **more,  # type: ignore[arg-type]
        )

    found = []
    kinds = {kind.name: kind for kind in facts.all_kinds}
    for table in facts.scores.under_attack:
        protocol = f"{table.protocol.name} protocol"
        spent = steps if table.protocol.name == "published" else planned.config.evaluation.adaptive_steps
        more = {"status": "measured", "certificate": None, "steps": spent}
        if ours or ("conventional" in figure.kinds and table.function == facts.main_function):
            found += [point("conventional", protocol, row.attack, row, **more) for row in table.accuracy]
        for rule, rows in table.certified_at_attacked.items():
            # The paper's certified accuracy is by the rule that is claimed and not proved.
            if "certified" in figure.kinds and rule in kinds and kinds[rule].status is not Status.PROVED:
                more = {"status": str(kinds[rule].status), "certificate": rule, "steps": spent}
                found += [point("certified", protocol, row.attack, row, **more) for row in rows]
    if (ours or "certified" in figure.kinds) and (best := _best_proved(facts)) is not None:
        more = {"status": "proved", "certificate": best.name, "steps": 0}
        found += [point("certified", "proved", "none", row, **more) for row in facts.all_certified(best)]
    for kind in (kind for kind in kinds.values() if "certified" in figure.kinds and kind.status is not Status.PROVED):
        more = {"status": str(kind.status), "certificate": kind.name, "steps": 0}
        found += [point("certified", "published protocol", "none", row, **more) for row in facts.all_certified(kind)]
    return [one for one in found if one.radius in figure.radii]


def _best_proved(facts: Facts) -> Kind | None:
    """The proved rule that certifies most."""
    proved = [kind for kind in facts.all_kinds if kind.status is Status.PROVED]
    return max(proved, key=lambda kind: sum(row.value for row in facts.all_certified(kind)), default=None)


def _describe(one: _Opened, files: Sequence[Path] = ()) -> FigureMade:
    points, estimated = one.points(), not files
    rows = [run.describe(estimated=estimated) for run in one.runs]
    left = [run for run in one.runs if run.missing]
    return FigureMade(
        figure=one.figure.number,
        scale=one.asked.scale,
        caption=one.figure.caption,
        runs=tuple(rows),
        minutes=round(sum(row.minutes or 0.0 for row in rows), 1) if estimated else None,
        points=len(points),
        missing=tuple(f"{run.label}: {len(run.missing)} of {len(run.wanted)} points" for run in left),
        files=tuple(map(str, files)),
        t_tests=tuple(t_tests(one.figure, points)),
    )


def _draw(one: _Opened) -> FigureMade:
    """Write the picture and the page with its table; plan again, since runs may have been made."""
    points = one.points()
    paper = read_paper(one.records, one.figure) if one.asked.scale == "full" else []
    stem = one.own_file.with_suffix("")
    files = [stem.with_suffix(".svg"), stem.with_suffix(".md")]
    made = _describe(replace(one, runs=plan_figure(one.figure, one.asked, points)), files)
    picture = figure_svg(one.figure, points, paper)
    page = figure_page(made, one.figure, points, paper, files[0].name)
    write_atomically(files[0], lambda out: out.write(picture))
    write_atomically(files[1], lambda out: out.write(page.encode()))
    return made
