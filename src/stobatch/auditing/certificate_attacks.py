"""The attacks on one kind's certificates, and the judges: each input's worst point found, and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor

from stobatch.attacks import Attack, Ball, Budget, Goal, Plain, Victim, make_attack
from stobatch.attacks.ball import per_example
from stobatch.attacks.goals import margin
from stobatch.attacks.loop import Best, evaluate_victim, require_no_nan
from stobatch.auditing.vote_counts import count
from stobatch.errors import DataError, ModelError
from stobatch.evaluation.functions import SinglePass, Vote
from stobatch.models import Classifier
from stobatch.progress import Tick
from stobatch.settings import Settings, setting
from stobatch.types import Norm, Status
from stobatch.verifier import CertificateKind, Flags, Labels, Verifier
from stobatch.votes.confidence import Floats

WITH_GRADIENTS = ("apgd_ce", "apgd_t", "madry", "mim")
WITHOUT_GRADIENTS = ("square", "corners")

_CHOOSE_BY = 0.1
"""Draws that choose an input's worst point, as a share of those that judge it."""
_SHARES = tuple(tenths / 10 for tenths in range(1, 10))
"""Of the way from an input to its worst point: where else to look."""


class FalsifierSettings(Settings):
    """What the attempt to break certificates may spend, and how sure a refutation has to be."""

    num_inputs: int | None = setting(
        100, at_least=1, doc="Number of certified inputs to attack of each kind, the nearest to losing; none: all"
    )
    attacks: tuple[str, ...] = setting(
        (*WITH_GRADIENTS, *WITHOUT_GRADIENTS),
        choices=(*WITH_GRADIENTS, *WITHOUT_GRADIENTS),
        doc="Attacks inside of every ball",
    )
    steps: int = setting(50, at_least=1, doc="Steps of attacks that follow gradients")
    restarts: int = setting(2, at_least=1, doc="Random starts of apgd_ce and madry")
    num_aims: int = setting(3, at_least=1, doc="Classes that apgd_t aims at")
    queries: int = setting(200, at_least=1, doc="Queries of the square attack")
    random_points: int = setting(100, at_least=1, doc="Corners and random points tried in each ball")
    noise_draws: int | None = setting(
        None, at_least=1, doc="Draws an attack on a vote averages over at each step; none: as many as gradients need"
    )
    judging_draws: int = setting(2000, at_least=1, doc="Fresh draws that judge a point found against a vote")
    retests: int = setting(
        100, at_least=1, doc="Fresh certificates for inputs whose certificate broke, over all of one part"
    )
    confidence: float = setting(
        0.99, above=0, below=1, doc="Where all claims hold, none is refuted with at least this probability"
    )

    def make_attacks(self) -> dict[str, Attack]:
        budget = Budget(self.steps, self.restarts, self.queries, self.num_aims)
        return {
            name: RandomSearch(self.random_points) if name == "corners" else make_attack(name, budget)
            for name in self.attacks
        }


@dataclass(frozen=True)
class AttackedCertificates:
    """One kind's certificates: for each input a label, and how far it is said to hold; 0 where nothing is said."""

    kind: CertificateKind
    inputs: Tensor
    label: Labels
    radius: Floats
    index: Labels
    """Where each input stands among all of them."""

    @classmethod
    def of(cls, kind: CertificateKind, inputs: Tensor, label: Any, columns: Mapping[str, Any]) -> Self:
        """Read a verifier's columns, or the records of `certify`, where the certified label is `prediction`."""
        label, radius = np.asarray(label, dtype=np.int64), np.asarray(columns[kind.column], dtype=np.float64)
        abstain = np.asarray(columns["abstain"], dtype=bool)
        if not len(inputs) == len(label) == len(radius) == len(abstain):
            raise DataError(
                f"{len(inputs)} inputs come with {len(label)} labels, {len(radius)} radii and {len(abstain)} flags.",
                remedy="Give the answers for exactly these inputs.",
            )
        if not bool((radius >= 0).all()):
            raise DataError(f"radii of '{kind.name}' are negative or not numbers.", remedy="Certify again.")
        # The paper's rule never abstains; a proved rule claims nothing where it does.
        radius = np.where(abstain & (kind.status is Status.PROVED), 0.0, radius)
        values = inputs[0].numel() if len(inputs) else 1
        widest = {Norm.LINF: 1.0, Norm.L2: sqrt(values), Norm.L1: float(values)}[kind.unit.norm] * kind.unit.range.width
        # A ball that holds the whole range says as much as any larger one.
        return cls(kind, inputs, label, np.minimum(radius, widest), np.arange(len(label)))

    def part(self, rows: Labels) -> AttackedCertificates:
        where = torch.from_numpy(rows).to(self.inputs.device)
        return AttackedCertificates(
            self.kind, self.inputs[where], self.label[rows], self.radius[rows], self.index[rows]
        )

    def certified(self) -> Labels:
        """Return the rows about which something is claimed."""
        return np.flatnonzero(self.radius > 0)

    def ball(self, network: Classifier) -> Ball:
        """Return a ball around every input, in the precision and on the device of the network."""
        centre = self.inputs.to(device=network.device, dtype=network.dtype)
        return Ball.around_each(centre, torch.from_numpy(self.radius), self.kind.unit)

    def goal(self, network: Classifier) -> Goal:
        return Goal(torch.from_numpy(self.label).to(network.device))


@dataclass(frozen=True)
class WorstPoints:
    """For each input the worst point found in its ball: inside, checked in float64, in the deployed precision."""

    points: Tensor
    found: Labels
    """The label there; of a vote, the class that the label was compared with."""
    margin: Floats
    """How far the certified label is ahead there: in scores, or of a vote in shares of the draws."""
    attack: list[str]
    broken: Flags
    chance: Floats
    """How probable such votes are if the label has not lost; a single pass leaves nothing to chance."""
    broken_float64: list[bool | None]
    """Whether an exact pass would give another label at a point of the ball; not asked of a vote."""


@torch.no_grad()
def break_pass(
    network: Classifier,
    certificates: AttackedCertificates,
    settings: FalsifierSettings,
    generator: torch.Generator,
    memory_mb: int,
    tick: Tick,
) -> WorstPoints:
    """Attack the network and a copy of it in float64, whose gradients do not vanish so soon.

    **Guarantee.** `broken` says what the deployed pass itself answers at a point of its own precision that lies in the
    ball and the range; `broken_float64` what the copy answers at a float64 point of the ball. The network is not
    changed.
    """
    own = SinglePass.of(network, memory_mb)
    exact = SinglePass(deepcopy(network).double(), max(1, own.rows // 2))
    balls = {network.dtype: certificates.ball(network), torch.float64: certificates.ball(exact.network)}
    goal, attacks = certificates.goal(network), settings.make_attacks()
    label = goal.labels
    assert label is not None
    points, labels, attack = balls[network.dtype].centre.clone(), label.clone(), [""] * len(label)
    least = torch.full(label.shape, torch.inf, dtype=torch.float64, device=label.device)
    broken, broken_float64 = torch.zeros_like(label, dtype=torch.bool), torch.zeros_like(label, dtype=torch.bool)
    runs = [(dtype, name) for dtype in balls for name in attacks]
    for dtype, name in runs:
        rows = (~broken).nonzero()[:, 0]
        if len(rows):
            function, part = own if dtype == network.dtype else exact, goal.part(rows)
            tried = attacks[name].run(
                Plain(function.network), balls[dtype].part(rows), part, generator, chunk=function.rows
            )
            here = balls[network.dtype].part(rows).make_feasible(tried.to(points.dtype))
            scores = _scores(own, here)
            lead = -margin(scores, label[rows]).double()
            better = part.reached(scores) | (lead < least[rows])
            which = rows[better]
            points[which], labels[which], least[which] = here[better], scores.argmax(1)[better], lead[better]
            broken[rows] = part.reached(scores)
            for row in which.tolist():
                attack[row] = name if dtype == network.dtype else f"{name} in float64"
            there = balls[torch.float64].part(rows).make_feasible(tried.double())
            broken_float64[rows] |= part.reached(_scores(exact, there))
        tick(1 / len(runs))
    flags = broken.cpu().numpy()
    return WorstPoints(
        points, labels.cpu().numpy(), least.cpu().numpy(), attack, flags, 1.0 - flags, list(broken_float64.tolist())
    )


def break_vote(
    verifier: Verifier,
    certificates: AttackedCertificates,
    settings: FalsifierSettings,
    generator: torch.Generator,
    memory_mb: int,
    level: float,
    tick: Tick,
) -> WorstPoints:
    """Attack a vote in expectation over its noise, choose each input's worst point on some draws, judge it on others.

    In the network's own precision only: rounding moves the probabilities of a vote by nothing that draws could show.

    **Guarantee.** An input whose label leads everywhere in its ball is called broken with probability at most `level`.
    """
    function = Vote.of(verifier, memory_mb, settings.noise_draws)
    ball, goal = certificates.ball(function.network), certificates.goal(function.network)
    victims, attacks = function.victims(ball.centre, goal, generator), settings.make_attacks()
    if not victims:
        raise ModelError(
            f"'{verifier.kinds[0].name}' deploys a vote and offers no samples of it to attack.",
            remedy="Return what an attacker would differentiate from its samples().",
        )
    # Without gradients there is no need for a smooth form: the last one comes nearest to what is counted.
    runs = [
        (name, victim) for victim in victims for name in attacks if name in WITH_GRADIENTS or victim == [*victims][-1]
    ]
    tried = {"no attack": ball.centre}
    for name, victim in runs:
        moved = attacks[name].run(victims[victim], ball, goal, generator, chunk=function.rows)
        tried[f"{name} on {victim}"] = moved
        tick(1 / len(runs))
    names, points, label = list(tried), torch.stack(list(tried.values())), certificates.label
    repeated = np.tile(label, len(names))
    draws = max(1, int(_CHOOSE_BY * settings.judging_draws))
    choosing = count(verifier, points.flatten(0, 1), draws, generator)
    rivals = choosing.rival(repeated)
    best = choosing.lead(repeated, rivals).reshape(len(names), -1).argmin(0)
    each = np.arange(len(label))
    rival = rivals.reshape(len(names), -1)[best, each]
    worst = _move_inwards(verifier, ball, points[best, each], label, rival, draws, level, generator)
    judged = count(verifier, worst, settings.judging_draws, generator)
    chance = judged.chance(label, rival)
    return WorstPoints(
        worst,
        rival,
        judged.lead(label, rival),
        [names[i] for i in best],
        chance <= level,
        chance,
        [None] * len(label),
    )


def _move_inwards(
    verifier: Verifier,
    ball: Ball,
    points: Tensor,
    label: Labels,
    rival: Labels,
    draws: int,
    level: float,
    generator: torch.Generator,
) -> Tensor:
    """Move every point towards its centre for as long as the label is clearly lost there; keep it where it never is.

    Attacks end at the edge of the ball, which a fresh certificate may miss by little. The nearer a bad point, the
    surer a claim that is too large reaches past it again.
    """
    nearer = [ball.make_feasible(ball.centre + share * (points - ball.centre)) for share in _SHARES]
    ways = torch.stack([*nearer, points])
    seen = count(verifier, ways.flatten(0, 1), draws, generator)
    lost = seen.chance(np.tile(label, len(ways)), np.tile(rival, len(ways))).reshape(len(ways), -1) <= level
    lost[-1] = True
    return ways[lost.argmax(0), np.arange(len(label))]


def _scores(function: SinglePass, points: Tensor) -> Tensor:
    scores = torch.cat([function.network(part) for part in torch.split(points, function.rows)])
    require_no_nan(scores)
    return scores


_MOST_FLIPS = 0.5
"""Of the values that move along the gradient, this share is turned round at most; half of them is pure chance."""


@final
@dataclass(frozen=True)
class RandomSearch(Attack):
    """The outermost points of the ball in many directions, and points inside; the worst for each example.

    Directions: all values up, all values down (where a sum over many values is weakest, and a gradient may be flat),
    then in turn the gradient at the centre with some signs flipped, random signs, and points anywhere in the ball.
    In l-infinity an outermost point is a corner, in l1 a corner too, in l2 a point of the sphere.
    """

    points: int = 100

    def search(self, victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator, chunk: int) -> Tensor:
        goal = replace(goal, loss="margin", aim=None)
        best, rows = Best(ball.centre), torch.arange(len(ball.centre), device=ball.centre.device)
        best.update(rows, ball.centre, *evaluate_victim(victim, ball.centre, goal, generator, chunk))
        slope = _gradient(victim, ball.centre, goal, generator, chunk)
        for turn in range(self.points):
            rows = best.unreached()
            if not len(rows):
                break
            proposals = self._propose(turn, ball.part(rows), slope[rows], generator)
            best.update(rows, proposals, *evaluate_victim(victim, proposals, goal.part(rows), generator, chunk))
        return best.points

    @staticmethod
    def _propose(turn: int, ball: Ball, slope: Tensor, generator: torch.Generator) -> Tensor:
        centre = ball.centre
        if turn < 2:
            direction = torch.full_like(centre, 1.0 if turn == 0 else -1.0)
        elif turn % 3 == 2:
            # The first time nothing is flipped: a corner that walks may pass by.
            most = 0.0 if turn == 2 else _MOST_FLIPS
            share = per_example(most * torch.rand(len(centre), generator=generator), centre)
            flipped = torch.rand(centre.shape, generator=generator) < share
            direction = torch.where(flipped.to(centre.device), -slope, slope)
        elif turn % 3 == 0:
            direction = torch.randn(centre.shape, generator=generator).to(centre)
        else:
            return ball.at(ball.random_offsets(len(centre), generator))
        return ball.ascend(centre, direction, ball.size_for(centre))


def _gradient(victim: Victim, points: Tensor, goal: Goal, generator: torch.Generator, chunk: int) -> Tensor:
    """Return the gradient of the objective at the points; zero where the function has none."""
    scores, parts = victim.draw(generator), []
    for start in range(0, len(points), chunk):
        which = slice(start, start + chunk)
        leaf = points[which].detach().requires_grad_()
        with torch.enable_grad():
            total = goal.objective(scores(leaf), which).sum()
        parts.append(torch.autograd.grad(total, leaf)[0] if total.requires_grad else torch.zeros_like(leaf))
    return torch.cat(parts)
