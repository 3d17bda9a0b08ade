"""The paper's four attacks as small final classes over the one loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from stobatch.attacks.ball import Ball, per_example
from stobatch.attacks.ensemble import Budget, restarted
from stobatch.attacks.loop import Attack, GradientAttack, Memory, StepInfo
from stobatch.paper import implements


@implements("Eq. 7", verdict="a definition; post-processing of x̄, so as private as x̄, which is not private.")
@final
@dataclass(frozen=True)
class FGSM(GradientAttack):
    """One steepest step, as long as the radius."""

    steps: int = 1

    def move(self, ball: Ball, points: Tensor, sight: StepInfo, memory: Memory) -> Tensor:
        return ball.climb(points, sight.gradient, self.step_size(ball))


@implements("Eq. 8", verdict="a definition; see Eq. 7.")
@final
@dataclass(frozen=True)
class IFGSM(GradientAttack):
    """FGSM in T small steps, projected after each."""

    def move(self, ball: Ball, points: Tensor, sight: StepInfo, memory: Memory) -> Tensor:
        return ball.climb(points, sight.gradient, self.step_size(ball))


@final
@dataclass(frozen=True)
class MIM(GradientAttack):
    """I-FGSM with momentum on the normalised gradient (Dong et al.)."""

    decay: float = 1.0

    def move(self, ball: Ball, points: Tensor, sight: StepInfo, memory: Memory) -> Tensor:
        size = sight.gradient.abs().flatten(1).mean(1).clamp(min=torch.finfo(points.dtype).tiny)
        fresh = sight.gradient / per_example(size, points)
        memory["momentum"] = fresh.add_(memory["momentum"], alpha=self.decay) if "momentum" in memory else fresh
        return ball.climb(points, memory["momentum"], self.step_size(ball))


@final
@dataclass(frozen=True)
class Madry(GradientAttack):
    """Projected gradient steps from a random start (Madry et al.)."""

    relative_step: float = 2.5

    def offsets(self, ball: Ball, count: int, generator: torch.Generator) -> Tensor:
        return ball.random_offsets(count, generator)

    def move(self, ball: Ball, points: Tensor, sight: StepInfo, memory: Memory) -> Tensor:
        return ball.climb(points, sight.gradient, self.step_size(ball))


def fgsm(budget: Budget) -> Attack:
    return FGSM()


def ifgsm(budget: Budget) -> Attack:
    return IFGSM(budget.steps)


def mim(budget: Budget) -> Attack:
    return MIM(budget.steps)


def madry(budget: Budget) -> Attack:
    return restarted(Madry(budget.steps), budget)
