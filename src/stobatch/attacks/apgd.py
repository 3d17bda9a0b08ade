"""Auto-PGD (Croce and Hein, 2020): projected gradient steps whose length adapts to what they gain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from stobatch.attacks.ball import Ball, per_example
from stobatch.attacks.ensemble import Budget, MultiTargeted, with_restarts
from stobatch.attacks.loop import Attack, GradientAttack, Memory, StepInfo

_FIRST_GAP, _GAP_DECREASE, _SMALLEST_GAP = 0.22, 0.03, 0.06
"""First checkpoint, decrease of the gap between two checkpoints, smallest gap: shares of all steps."""
_ENOUGH_INCREASES = 0.75
"""ρ of the paper: the share of steps since the last checkpoint that have to increase the objective."""
_NEW_STEP_WEIGHT = 0.75
"""α of the paper: the weight of the new step; the previous step has the rest (momentum)."""


def checkpoints(steps: int) -> list[int]:
    """Return the steps before which step sizes are adapted.

    >>> checkpoints(100)
    [22, 41, 57, 70, 80, 87, 93, 99]
    """
    shares = (_FIRST_GAP, _GAP_DECREASE, _SMALLEST_GAP)
    gap, decrease, smallest = (max(1, int(share * steps)) for share in shares)
    checkpoint, result = gap, []
    while checkpoint < steps:
        result.append(checkpoint)
        gap = max(gap - decrease, smallest)
        checkpoint += gap
    return result


@final
@dataclass(frozen=True)
class APGD(GradientAttack):
    """Step sizes start at twice the radius and halve, example by example, where progress stalls.

    Where they halve, the search continues from the best point so far.
    """

    steps: int = 50
    relative_step: float = 2.0

    @cached_property
    def _checkpoints(self) -> list[int]:
        return checkpoints(self.steps)

    def offsets(self, ball: Ball, count: int, generator: torch.Generator) -> Tensor:
        return ball.random_offsets(count, generator)

    def move(self, ball: Ball, points: Tensor, info: StepInfo, memory: Memory) -> Tensor:
        if not memory:
            self._initialise(ball, points, info, memory)
        else:
            memory["increases"] += info.objective > memory["objective"]
        memory["objective"] = info.objective
        self._update_best(points, info, memory)
        gradient, previous = info.gradient, memory["previous"]
        if info.step in self._checkpoints:
            points, gradient, previous = self._adapt_step_sizes(points, gradient, memory, info.step)
        ahead = ball.ascend(points, gradient, per_example(memory["step_size"], points))
        memory["previous"] = points
        if info.step == 0:
            return ahead
        momentum = (1 - _NEW_STEP_WEIGHT) * (points - previous)
        return ball.project(points + _NEW_STEP_WEIGHT * (ahead - points) + momentum)

    def best_seen(self, memory: Memory) -> tuple[Tensor, Tensor]:
        return memory["best_points"], memory["best_objective"]

    def _initialise(self, ball: Ball, points: Tensor, info: StepInfo, memory: Memory) -> None:
        step_size = torch.zeros_like(info.objective) + self.relative_step * ball.size_for(info.objective)
        memory.update(
            step_size=step_size,
            increases=torch.zeros_like(info.objective),
            previous=points,
            best_objective=torch.full_like(info.objective, -torch.inf),
            best_points=points.clone(),
            best_gradient=info.gradient.clone(),
            old_step_size=torch.full_like(step_size, torch.inf),
            old_best=torch.full_like(step_size, -torch.inf),
        )

    def _update_best(self, points: Tensor, info: StepInfo, memory: Memory) -> None:
        better = info.objective > memory["best_objective"]
        mask = per_example(better, points)
        memory["best_objective"] = torch.where(better, info.objective, memory["best_objective"])
        memory["best_points"] = torch.where(mask, points, memory["best_points"])
        memory["best_gradient"] = torch.where(mask, info.gradient, memory["best_gradient"])

    def _adapt_step_sizes(
        self, points: Tensor, gradient: Tensor, memory: Memory, step: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Halve the step sizes of examples whose objective rose too rarely, or whose best value and size stayed.

        Return points, gradients and previous points to go on from: the best ones where the step size was halved.
        """
        index = self._checkpoints.index(step)
        elapsed = step - (self._checkpoints[index - 1] if index else 0)
        rarely = memory["increases"] < _ENOUGH_INCREASES * elapsed
        stuck = (memory["old_step_size"] == memory["step_size"]) & (memory["old_best"] >= memory["best_objective"])
        halve = rarely | stuck
        mask = per_example(halve, points)
        memory["old_step_size"], memory["old_best"] = memory["step_size"], memory["best_objective"]
        memory["step_size"] = torch.where(halve, memory["step_size"] / 2, memory["step_size"])
        memory["increases"] = torch.zeros_like(memory["increases"])
        points = torch.where(mask, memory["best_points"], points)
        return (
            points,
            torch.where(mask, memory["best_gradient"], gradient),
            torch.where(mask, points, memory["previous"]),
        )


def apgd_ce(budget: Budget) -> Attack:
    return with_restarts(APGD(budget.steps), budget)


def apgd_dlr(budget: Budget) -> Attack:
    return with_restarts(APGD(budget.steps, loss="dlr"), budget)


def apgd_t(budget: Budget) -> Attack:
    return MultiTargeted(APGD(budget.steps, loss="dlr"), num_aims=budget.num_aims)
