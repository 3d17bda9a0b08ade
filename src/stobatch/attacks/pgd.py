"""The paper's four attacks as small final classes over the one loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from stobatch.attacks.ball import Ball, per_example
from stobatch.attacks.ensemble import Budget, with_restarts
from stobatch.attacks.loop import Attack, GradientAttack, Memory, StepInfo
from stobatch.paper import implements


@implements("Eq. 7", verdict="a definition; post-processing of x̄, so as private as x̄, which is not private.")
@final
@dataclass(frozen=True)
class FGSM(GradientAttack):
    """Fast gradient sign method (Goodfellow et al., 2015): one steepest step, as long as the radius."""

    steps: int = 1


@implements("Eq. 8", verdict="a definition; see Eq. 7.")
@final
@dataclass(frozen=True)
class IFGSM(GradientAttack):
    """Iterative FGSM (Kurakin et al., 2017): T small steps, each projected into the ball."""


@final
@dataclass(frozen=True)
class MIM(GradientAttack):
    """Momentum iterative method (Dong et al., 2018): I-FGSM with momentum on the l1-normalised gradient."""

    decay: float = 1.0

    def move(self, ball: Ball, points: Tensor, info: StepInfo, memory: Memory) -> Tensor:
        scale = info.gradient.abs().flatten(1).mean(1).clamp(min=torch.finfo(points.dtype).tiny)
        normalised = info.gradient / per_example(scale, points)
        memory["momentum"] = (
            normalised.add_(memory["momentum"], alpha=self.decay) if "momentum" in memory else normalised
        )
        return ball.ascend(points, memory["momentum"], self.step_size(ball))


@final
@dataclass(frozen=True)
class Madry(GradientAttack):
    """PGD (Madry et al., 2018): projected gradient steps from a random start."""

    relative_step: float = 2.5

    def offsets(self, ball: Ball, count: int, generator: torch.Generator) -> Tensor:
        return ball.random_offsets(count, generator)


def fgsm(budget: Budget) -> Attack:
    return FGSM()


def ifgsm(budget: Budget) -> Attack:
    return IFGSM(budget.steps)


def mim(budget: Budget) -> Attack:
    return MIM(budget.steps)


def madry(budget: Budget) -> Attack:
    return with_restarts(Madry(budget.steps), budget)
