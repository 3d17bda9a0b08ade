"""How a model is attacked. A score always carries the protocol it was measured under.

`published` is what the paper's authors did: attacks on a noise-free copy, its own predictions as labels, last points.
`adaptive` is what an adversary would do: attacks on the deployed function, over its noise, with true labels, restarts,
and the worst of everything that was tried, example by example.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar, final

import torch
from torch import Tensor, nn

from stobatch.attacks import Ball, Budget, Goal, craft, make_attack, paper_ensemble
from stobatch.config import EvaluationConfig
from stobatch.errors import ModelError, UnitError
from stobatch.evaluation.functions import Deployed
from stobatch.files import Columns
from stobatch.models.classifier import Classifier
from stobatch.models.network import Network, ReferenceNorm
from stobatch.progress import Tick, no_progress
from stobatch.types import PAPER_RANGE, Norm, Radius


def attacked_column(attack: str, radius: float, part: str = "prediction") -> str:
    """Return the name of a column of records.

    >>> attacked_column("madry", 0.2), attacked_column("madry", 0.2, "distance")
    ('madry@0.2', 'madry@0.2/distance')
    """
    return f"{attack}@{radius:.12g}" if part == "prediction" else f"{attack}@{radius:.12g}/{part}"


def radii_of(config: EvaluationConfig, values_per_input: int) -> list[Radius]:
    """Return the radii asked for, smallest first, each with its unit; refuse one wider than the whole range."""
    norm = Norm(config.norm)
    widest = {Norm.LINF: 1.0, Norm.L2: values_per_input**0.5, Norm.L1: float(values_per_input)}[norm]
    for size in config.radii:
        if size > widest * PAPER_RANGE.width:
            raise UnitError(
                f"a radius of {size:g} in {norm} is wider than the whole input range {PAPER_RANGE}.",
                remedy="Give radii in the units of inputs in [-1, 1]: 8/255 of the pixel scale is 0.063.",
            )
    return [Radius(size, norm, PAPER_RANGE) for size in sorted(config.radii)]


@dataclass(frozen=True)
class Protocol(ABC):
    """A way to attack, with a name and what exactly it means."""

    name: ClassVar[str]
    meaning: ClassVar[str]
    config: EvaluationConfig

    @abstractmethod
    def attack_names(self, function: Deployed) -> tuple[str, ...]:
        """Return the attacks that get a column each."""

    @abstractmethod
    def rows(
        self, function: Deployed, inputs: Tensor, labels: Tensor, generator: torch.Generator, tick: Tick = no_progress
    ) -> Columns:
        """Return predictions on clean inputs and on every attack's points at every radius; `tick` reports progress."""


@final
@dataclass(frozen=True)
class Published(Protocol):
    """The released code's test."""

    name: ClassVar[str] = "published"
    meaning: ClassVar[str] = (
        "the released code's test: attacks on a copy without noise and without batch or reference normalisation, led "
        "away from that copy's own prediction, last points; the deployed function then classifies them"
    )

    def attack_names(self, function: Deployed) -> tuple[str, ...]:
        return self.config.attacks

    def rows(
        self, function: Deployed, inputs: Tensor, labels: Tensor, generator: torch.Generator, tick: Tick = no_progress
    ) -> Columns:
        surrogate = NoiseFreeSurrogate(function.network).eval().requires_grad_(False)
        with torch.no_grad():
            away_from = torch.cat([surrogate(part).argmax(1) for part in torch.split(inputs, function.rows)])
        attacks = paper_ensemble(self.config.attacks, self.config.attack_steps)
        columns = {"label": labels.tolist(), **function.answer(inputs, generator)}
        for radius in radii_of(self.config, inputs[0].numel()):
            ball = Ball.around(inputs, radius)
            for name, attack in zip(self.config.attacks, attacks, strict=True):
                points = craft(surrogate, ball, [attack], generator, labels=away_from, chunk=function.rows)
                columns |= _answers(function, ball, ball.make_feasible(points), name, generator)
                tick(1 / (len(attacks) * len(self.config.radii)))
        return columns


@final
@dataclass(frozen=True)
class Adaptive(Protocol):
    """The deployed function, with all that is known about it."""

    name: ClassVar[str] = "adaptive"
    meaning: ClassVar[str] = (
        "white-box attacks on the deployed function itself, in expectation over its fresh noise, with restarts; an "
        "example counts as broken if any attack breaks it"
    )

    def attack_names(self, function: Deployed) -> tuple[str, ...]:
        if function.deterministic:
            return self.config.adaptive_attacks
        return tuple(f"{name}:{victim}" for name in self.config.vote_attacks for victim in ("score", "vote"))

    def rows(
        self, function: Deployed, inputs: Tensor, labels: Tensor, generator: torch.Generator, tick: Tick = no_progress
    ) -> Columns:
        clean = function.answer(inputs, generator)
        goal = self._goal(function, inputs, labels, clean["prediction"], generator)
        victims = function.victims(inputs, goal, generator)
        columns: Columns = {"label": labels.tolist(), **clean}
        if function.deterministic:
            columns["gradient"] = _gradient_sizes(function, inputs, labels)
        for attack_name in self.attack_names(function):
            name, _, victim = attack_name.partition(":")
            attack = make_attack(name, self._budget())
            done = _Carried(function, inputs, labels, clean)
            for radius in radii_of(self.config, inputs[0].numel()):
                ball, rows = Ball.around(inputs, radius), done.open_rows()
                if len(rows):
                    part = ball.part(rows)
                    points = attack.run(victims[victim], part, goal.part(rows), generator, chunk=function.rows)
                    done.take(rows, part, points, generator)
                columns |= done.columns(attack_name, radius)
                tick(1 / (len(self.attack_names(function)) * len(self.config.radii)))
        return columns

    def _budget(self) -> Budget:
        config = self.config
        return Budget(config.adaptive_steps, config.restarts, config.queries, config.num_aims)

    def _goal(
        self, function: Deployed, inputs: Tensor, labels: Tensor, predicted: Sequence[int], generator: torch.Generator
    ) -> Goal:
        config, num_classes = self.config, function.network.num_classes
        source = labels if config.labels == "true" else torch.as_tensor(predicted, device=labels.device)
        if config.target == "none":
            return Goal(source)
        if config.target == "random":
            jump = torch.randint(1, num_classes, (len(labels),), generator=generator).to(labels.device)
            return Goal((source + jump) % num_classes, targeted=True)
        with torch.no_grad():
            logits = torch.cat([function.network(part) for part in torch.split(inputs, function.rows)])
        return Goal(logits.scatter(1, source[:, None], torch.inf).argmin(1), targeted=True)


class _Carried:
    """One attack's answers from radius to radius.

    A point that breaks a deterministic function inside a small ball lies inside every larger one, so such an example is
    broken there, too, and need not be attacked again. A vote is asked again at every radius.
    """

    def __init__(self, function: Deployed, inputs: Tensor, labels: Tensor, clean: Columns) -> None:
        self.function, self.labels = function, labels.tolist()
        self.answers = {name: list(column) for name, column in clean.items()}
        self.answers["distance"] = [0.0] * len(inputs)
        self.device = inputs.device

    def open_rows(self) -> Tensor:
        broken = [a != b for a, b in zip(self.answers["prediction"], self.labels, strict=True)]
        rows = [row for row, is_broken in enumerate(broken) if not (is_broken and self.function.deterministic)]
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    def take(self, rows: Tensor, ball: Ball, points: Tensor, generator: torch.Generator) -> None:
        fresh = {**self.function.answer(points, generator), "distance": ball.distance(points).tolist()}
        for name, column in fresh.items():
            for row, value in zip(rows.tolist(), column, strict=True):
                self.answers[name][row] = value

    def columns(self, attack: str, radius: Radius) -> Columns:
        return {attacked_column(attack, radius.size, part): list(column) for part, column in self.answers.items()}


def _answers(function: Deployed, ball: Ball, points: Tensor, attack: str, generator: torch.Generator) -> Columns:
    columns = {**function.answer(points, generator), "distance": ball.distance(points).tolist()}
    return {attacked_column(attack, ball.radius.size, part): column for part, column in columns.items()}


def _gradient_sizes(function: Deployed, inputs: Tensor, labels: Tensor) -> list[float]:
    """Return the largest entry of each input's gradient: zero where an attack that follows gradients cannot move."""
    sizes: list[float] = []
    for points, wanted in zip(torch.split(inputs, function.rows), torch.split(labels, function.rows), strict=True):
        leaf = points.detach().requires_grad_()
        with torch.enable_grad():
            loss = torch.nn.functional.cross_entropy(function.network(leaf), wanted, reduction="sum")
        sizes += torch.autograd.grad(loss, leaf)[0].abs().flatten(1).amax(1).tolist()
    return sizes


PROTOCOLS: dict[str, type[Protocol]] = {protocol.name: protocol for protocol in (Published, Adaptive)}


_SWITCHED_OFF = (ReferenceNorm, nn.BatchNorm1d, nn.BatchNorm2d)

M = TypeVar("M", bound=nn.Module)


class NoiseFreeSurrogate(nn.Module):
    """A copy without χ1 and χ2, without batch or reference normalisation, without the bound on the last hidden layer.

    This is the released code's attack head: its batch normalisation ran with statistics that were never updated, which
    switches it off. It shares the weights with the deployed function and little else. A network of another kind has no
    χ1, no χ2 and no such bound: there the copy is the network itself, but for the same normalisations.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        if not isinstance(network, Classifier):
            raise ModelError(
                f"a {type(network).__name__} has no noise-free copy to attack.",
                why="The published protocol copies the library's classifiers.",
                remedy="Set evaluation.protocols=adaptive.",
            )
        self.layers = nn.Sequential(*_without_noise(network))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layers(inputs)
        return scores


def _without_noise(network: Classifier) -> tuple[nn.Module, ...]:
    if not isinstance(network, Network):
        return (_without_norms(network),)
    head = _without_norms(network.head)
    return copy.deepcopy(network.encoder), head.norm, head.body, head.output


def _without_norms(module: M) -> M:
    """Return a copy in which normalisations by a batch or by reference images do nothing."""
    copied = copy.deepcopy(module)
    for path, part in list(copied.named_modules(remove_duplicate=False)):
        if isinstance(part, _SWITCHED_OFF):
            parent, _, name = path.rpartition(".")
            setattr(copied.get_submodule(parent), name, nn.Identity())
    return copied
