"""PGD whose first step is as long as the radius, the second half of it, and so on."""

from dataclasses import dataclass

from torch import Tensor

from stobatch.attacks import Attack, Ball, Budget, GradientAttack
from stobatch.attacks.loop import Memory, StepInfo


@dataclass(frozen=True)
class ShrinkingSteps(GradientAttack):
    """The loop, the ball and the goal are the library's: an attack is how it starts and how it steps."""

    def move(self, ball: Ball, points: Tensor, info: StepInfo, memory: Memory) -> Tensor:
        return ball.ascend(points, info.gradient, ball.size_for(points) / (info.step + 1))


def shrinking_steps(budget: Budget) -> Attack:
    """The function that the entry point names: from what may be spent to an attack."""
    return ShrinkingSteps(budget.steps)
