"""Auto-PGD (Croce and Hein, 2020): projected gradient steps whose length adapts to what they gain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from stobatch.attacks.ball import Ball, per_example
from stobatch.attacks.ensemble import Budget, EveryAim, restarted
from stobatch.attacks.loop import Attack, GradientAttack, Memory, StepInfo

_FIRST, _CLOSER, _CLOSEST = 0.22, 0.03, 0.06
"""The first checkpoint, how much closer together the next ones come, and how close they may: shares of all steps."""
_ENOUGH_GAINS = 0.75
_INERTIA = 0.75


def checkpoints(steps: int) -> list[int]:
    """Return the steps before which the step length is reconsidered.

    >>> checkpoints(100)
    [22, 41, 57, 70, 80, 87, 93, 99]
    """
    gap, closer, closest = (max(1, int(share * steps)) for share in (_FIRST, _CLOSER, _CLOSEST))
    found = [gap]
    while found[-1] < steps:
        gap = max(gap - closer, closest)
        found.append(found[-1] + gap)
    return [step for step in found if step < steps]


@final
@dataclass(frozen=True)
class APGD(GradientAttack):
    """Steps start at twice the radius and halve, example by example, where they stop to pay.

    Where they halve, the walk goes on from the best point so far.
    """

    steps: int = 50
    relative_step: float = 2.0

    @cached_property
    def _checkpoints(self) -> list[int]:
        return checkpoints(self.steps)

    def offsets(self, ball: Ball, count: int, generator: torch.Generator) -> Tensor:
        return ball.random_offsets(count, generator)

    def move(self, ball: Ball, points: Tensor, sight: StepInfo, memory: Memory) -> Tensor:
        if not memory:
            self._begin(ball, points, sight, memory)
        else:
            memory["gains"] += sight.objective > memory["objective"]
        memory["objective"] = sight.objective
        self._remember_best(points, sight, memory)
        gradient, before = sight.gradient, memory["before"]
        if sight.step in self._checkpoints:
            points, gradient, before = self._reconsider(points, gradient, memory, sight.step)
        ahead = ball.climb(points, gradient, per_example(memory["length"], points))
        memory["before"] = points
        if sight.step == 0:
            return ahead
        return ball.project(points + _INERTIA * (ahead - points) + (1 - _INERTIA) * (points - before))

    def kept(self, memory: Memory) -> tuple[Tensor, Tensor]:
        return memory["best_points"], memory["best_objective"]

    def _begin(self, ball: Ball, points: Tensor, sight: StepInfo, memory: Memory) -> None:
        length = torch.zeros_like(sight.objective) + self.relative_step * ball.size_for(sight.objective)
        memory.update(
            length=length,
            gains=torch.zeros_like(sight.objective),
            before=points,
            best_objective=torch.full_like(sight.objective, -torch.inf),
            best_points=points.clone(),
            best_gradient=sight.gradient.clone(),
            old_length=torch.full_like(length, torch.inf),
            old_best=torch.full_like(length, -torch.inf),
        )

    def _remember_best(self, points: Tensor, sight: StepInfo, memory: Memory) -> None:
        better = sight.objective > memory["best_objective"]
        wide = per_example(better, points)
        memory["best_objective"] = torch.where(better, sight.objective, memory["best_objective"])
        memory["best_points"] = torch.where(wide, points, memory["best_points"])
        memory["best_gradient"] = torch.where(wide, sight.gradient, memory["best_gradient"])

    def _reconsider(self, points: Tensor, gradient: Tensor, memory: Memory, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Halve the steps of examples that gained too rarely, or neither changed length nor gained at all."""
        index = self._checkpoints.index(step)
        elapsed = step - (self._checkpoints[index - 1] if index else 0)
        rarely = memory["gains"] < _ENOUGH_GAINS * elapsed
        stuck = (memory["old_length"] == memory["length"]) & (memory["old_best"] >= memory["best_objective"])
        halve = rarely | stuck
        wide = per_example(halve, points)
        memory["old_length"], memory["old_best"] = memory["length"], memory["best_objective"]
        memory["length"] = torch.where(halve, memory["length"] / 2, memory["length"])
        memory["gains"] = torch.zeros_like(memory["gains"])
        points = torch.where(wide, memory["best_points"], points)
        return (
            points,
            torch.where(wide, memory["best_gradient"], gradient),
            torch.where(wide, points, memory["before"]),
        )


def apgd_ce(budget: Budget) -> Attack:
    return restarted(APGD(budget.steps), budget)


def apgd_dlr(budget: Budget) -> Attack:
    return restarted(APGD(budget.steps, loss="dlr"), budget)


def apgd_t(budget: Budget) -> Attack:
    return EveryAim(APGD(budget.steps, loss="dlr"), num_aims=budget.num_aims)
