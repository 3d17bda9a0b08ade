"""The runs that a figure needs: what is recorded of each, what lies half-made in its directory, what the rest costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stobatch import data
from stobatch.comparison.plan import Compared, change_rows, own_changes, require_own_directory, slug
from stobatch.config import PriorConfig, RunConfig
from stobatch.errors import RunError, SettingError
from stobatch.evaluation.tables import data_root
from stobatch.figures import cost
from stobatch.figures.catalogue import METHODS, PaperFigure, Place, wanted
from stobatch.figures.configurations import (
    can_start,
    configuration,
    pretraining,
    recipe_of,
    split_start,
    training_changes,
    with_start,
)
from stobatch.figures.records import main_attack, own_settings, shown_settings
from stobatch.prior import take_prior
from stobatch.results.figure import FigurePoint, FigureRun
from stobatch.results.prior import prior_files
from stobatch.runs import Run
from stobatch.settings import parse_assignment
from stobatch.types import Status


@dataclass(frozen=True)
class Asked:
    """What the caller changes of a figure's plan."""

    out: Path
    methods: tuple[str, ...] = ()
    epsilons: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    scale: str = "full"
    start: str | None = None
    """Public images that trainings start from, as `pretrain` names them; None for random weights."""

    def require_known(self, figures: Sequence[PaperFigure]) -> None:
        """Refuse a method or a budget that none of the figures has."""
        for name, chosen, known in (
            ("the method", self.methods, {method for figure in figures for method in figure.methods}),
            ("ε =", self.epsilons, {epsilon for figure in figures for epsilon in figure.epsilons}),
        ):
            for one in chosen:
                if one not in known:
                    every = ", ".join(map(str, sorted(known)))
                    raise SettingError(f"{name} {one} is not in this figure.", remedy=f"Choose among {every}.")
        if not any(self._methods_of(figure) for figure in figures):
            able = dict.fromkeys(method for figure in figures for method in figure.methods if can_start(figure, method))
            raise SettingError(
                f"none of {', '.join(self.methods)} starts from public weights.",
                why="What they prove, or claim, is of a training from random ones.",
                remedy=f"Choose among {', '.join(able)}, or leave --from-data out.",
            )

    def _methods_of(self, figure: PaperFigure) -> list[str]:
        """Return what is asked of a figure's methods; from a public start, those that take one."""
        named = [method for method in figure.methods if method in (self.methods or figure.methods)]
        return [method for method in named if self.start is None or can_start(figure, method)]

    def rows(self, figure: PaperFigure) -> list[tuple[str, float | None, int]]:
        """Return method, budget and seed of each training that is asked of a figure, seed by seed."""
        return [
            (method, epsilon, seed)
            for seed in self.seeds or figure.seeds
            for method in self._methods_of(figure)
            for epsilon in (figure.epsilons if METHODS[method].privacy is not Status.NONE else (None,))
            if epsilon in (None, *(self.epsilons or figure.epsilons))
        ]


@dataclass(frozen=True)
class PlannedRun:
    """One training of a figure with what is still wanted of it."""

    figure: PaperFigure
    scale: str
    method: str
    epsilon: float | None
    seed: int
    settings: tuple[str, ...]
    compared: Compared
    wanted: frozenset[Place]
    missing: frozenset[Place]

    @property
    def run(self) -> Run:
        return self.compared.run

    @property
    def config(self) -> RunConfig:
        return self.compared.config

    @property
    def training_hash(self) -> str:
        """Of the settings; a public start is named beside them, and its weights stand in the run."""
        return self.config.replace(prior=PriorConfig()).training_hash

    @property
    def certifies(self) -> bool:
        """Whether something certified is missing."""
        return any(place.kind == "certified" for place in self.missing)

    @property
    def state(self) -> str:
        if not self.missing:
            return "recorded"
        if self.run.is_trained:
            return "measured" if self.run.has("scores") else "trained"
        return "half-trained" if self.run.exists else "not begun"

    @property
    def steps_missing(self) -> list[int]:
        """T_a of the attacks that have to be run, one evaluation each."""
        found = sorted({place.steps for place in self.missing if place.steps})
        return found or ([self.figure.steps[0]] if self.missing else [])

    @property
    def minutes(self) -> float:
        """What the rest costs on this machine, about; what is half-trained is counted whole."""
        if not self.missing:
            return 0.0
        found = 0.0 if self.run.is_trained else cost.training_minutes(self.config)
        if self.compared.prior is not None and self.config.prior.name is None:
            found += cost.pretraining_minutes(self.config, *pretraining(self.scale))
        if self.certifies:
            found += cost.certifying_minutes(self.config, votes=METHODS[self.method].votes)
        each = (self.config.override("evaluation.attack_steps", steps) for steps in self.steps_missing)
        return found + sum(map(cost.attacking_minutes, each))

    @property
    def label(self) -> str:
        """Return its name for messages, with who vouches for its ε: its seed is public."""
        method, budget = METHODS[self.method], ""
        if self.epsilon is not None:
            refuted = method.privacy is Status.REFUTED
            budget = f", ε = {self.epsilon:g} ({'refuted' if refuted else f'void; {method.privacy} with secret seeds'})"
        return f"{method.label}{budget}, seed {self.seed}"

    def describe(self, *, estimated: bool) -> FigureRun:
        """Return the run as a row of the plan, with its minutes where they are asked for."""
        return FigureRun(
            run=str(self.run.path), method=self.method, epsilon=self.epsilon, privacy=METHODS[self.method].privacy,
            seed=self.seed, settings=self.settings, training_hash=self.training_hash,
            state=self.state,  # type: ignore[arg-type]
            recorded_points=len(self.wanted - self.missing), wanted_points=len(self.wanted),
            minutes=round(self.minutes, 2) if estimated else None,
        )  # fmt: skip


def plan_figure(figure: PaperFigure, asked: Asked, recorded: Sequence[FigurePoint]) -> list[PlannedRun]:
    """Return every training of a figure, seed by seed; a record that this version would not make is refused."""
    require_recipes(figure, recorded)
    rows = asked.rows(figure)
    made = {str(row): configuration(figure, *row, asked.scale, asked.start) for row in rows}
    changed = change_rows(made, asked.changes) if made else {}
    return [_planned(figure, row, changed[str(row)], asked, recorded) for row in rows]


def _planned(
    figure: PaperFigure,
    row: tuple[str, float | None, int],
    config: RunConfig,
    asked: Asked,
    recorded: Sequence[FigurePoint],
) -> PlannedRun:
    method, epsilon, seed = row
    settings = with_start(training_changes(own_changes(config, asked.changes)), asked.start)
    words = [method, f"ε={epsilon:g}" if epsilon else "", f"from {asked.start}" if asked.start else ""]
    name = slug(" ".join([*words, config.replace(seed=None).training_hash[:6]]))
    folder = asked.out / f"{asked.scale}-runs" / figure.data / name
    prior = folder / "start" if asked.start else None
    compared = Compared(name, seed, config, Run(folder / f"seed-{seed}"), None, str(METHODS[method].privacy), prior)
    if prior is not None and prior_files(prior)[-1].exists():
        compared = begin_with_prior(compared)
    if prior is None or compared.config.prior.name is not None:
        require_own_directory(compared, None)
    every = frozenset(wanted(figure, method))
    there = {
        _place(point)
        for point in recorded
        if (point.method, point.epsilon, point.seed) == row
        and own_settings(point) == shown_settings(settings)
        and main_attack(point)
    }
    return PlannedRun(figure, asked.scale, *row, settings, compared, every, every - there)


def begin_with_prior(compared: Compared) -> Compared:
    """Return the training with what the card of its public start says in its settings."""
    config = compared.config
    started, _ = take_prior(config, data.describe(config.data, data_root(config)), compared.prior, None)
    return replace(compared, config=started)


def _place(point: FigurePoint) -> Place:
    steps = point.steps if point.protocol == "published protocol" else 0
    return Place(point.kind_of_accuracy, point.protocol, point.radius, steps)


def require_recipes(figure: PaperFigure, recorded: Sequence[FigurePoint]) -> None:
    """Refuse records of trainings that the recipes of this version would not make."""
    full = [point for point in recorded if point.scale == "full"]
    about = {(point.method, point.epsilon, point.seed, point.settings, point.training_hash) for point in full}
    for method, epsilon, seed, settings, found in about:
        changed, start = split_start(settings)
        changes = dict(map(parse_assignment, changed))
        expected = recipe_of(figure, method, epsilon, start).override_all(changes).replace(seed=seed).training_hash
        if expected != found:
            raise RunError(
                f"a point of Figure {figure.number} is of configuration {found}, and {method} with its settings is "
                f"{expected}.",
                why="Another version or somebody else's recipe made it.",
                remedy="Take it out of the records, or make it again with --retrain.",
            )
