"""One gradient loop for every attack; an attack is only how it starts and which way it steps.

Every attack maximises the cross-entropy inside an l-infinity ball. The ball owns ranges and projection, so no attack
can return a point outside of it. Several attacks run as one fused batch: each gets its own slice, all share the
forward and backward passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.errors import ModelError, SettingError
from stobatch.types import Norm, Radius

Scores = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Ball:
    """The points within an l-infinity radius of each centre that also lie in the box [low, high]."""

    centre: Tensor
    lower: Tensor
    upper: Tensor
    size: float

    @classmethod
    def around(cls, centre: Tensor, radius: Radius, *, shift: Tensor | None = None) -> Ball:
        """A ball in the input range; `shift` moves the range for inputs that already carry a fixed noise."""
        if radius.norm is not Norm.LINF:
            raise SettingError(f"attacks in {radius.norm} are not available.", remedy="Use an linf radius.")
        low: Tensor | float = radius.range.low if shift is None else radius.range.low + shift
        high: Tensor | float = radius.range.high if shift is None else radius.range.high + shift
        lower = torch.maximum(centre - radius.size, torch.as_tensor(low, dtype=centre.dtype, device=centre.device))
        upper = torch.minimum(centre + radius.size, torch.as_tensor(high, dtype=centre.dtype, device=centre.device))
        return cls(centre, lower, upper, radius.size)

    def project(self, points: Tensor) -> Tensor:
        return torch.clamp(points, self.lower, self.upper)

    def part(self, where: slice) -> Ball:
        return Ball(self.centre[where], self.lower[where], self.upper[where], self.size)


@dataclass(frozen=True)
class GradientAttack(ABC):
    """How one attack starts and steps; frozen, so an attack is a value."""

    steps: int = 10
    relative_step: float = 1.0

    def step_size(self, radius: float) -> float:
        return self.relative_step * radius / self.steps

    def start(self, ball: Ball, generator: torch.Generator) -> Tensor:
        return ball.centre.clone()

    @abstractmethod
    def direction(self, gradient: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The signed direction of one step, and what the attack remembers for the next."""


def input_gradient(scores: Scores, points: Tensor, labels: Tensor | None, chunk: int) -> Tensor:
    """The gradient of the cross-entropy with respect to the inputs only; the model's own `.grad` is never touched.

    Without labels the model's own prediction at the present point is used, so that no true label leaks (Eq. 8).
    """
    gradients = []
    for start in range(0, len(points), chunk):
        part = points[start : start + chunk].detach().requires_grad_()
        with torch.enable_grad():
            logits = scores(part)
            target = logits.detach().argmax(1) if labels is None else labels[start : start + chunk]
            loss = F.cross_entropy(logits, target, reduction="sum")
        gradients.append(torch.autograd.grad(loss, part)[0])
    return gradients[0] if len(gradients) == 1 else torch.cat(gradients)


def craft(
    scores: Scores,
    ball: Ball,
    attacks: Sequence[GradientAttack],
    generator: torch.Generator,
    *,
    labels: Tensor | None = None,
    chunk: int = 833,
) -> Tensor:
    """Adversarial points in the ball, an equal slice of the batch for each attack.

    **Guarantee.** Every returned point is inside the ball and the input range, and every gradient was finite.
    """
    slices = ensemble_slices(len(ball.centre), len(attacks))
    steps = attacks[0].steps
    if any(attack.steps != steps for attack in attacks):
        raise SettingError("attacks of one fused batch take different numbers of steps.", remedy="Give all the same.")
    points = torch.cat([a.start(ball.part(s), generator) for a, s in zip(attacks, slices, strict=True)])
    points = ball.project(points)
    memories: list[Tensor | None] = [None] * len(attacks)
    health = torch.zeros((), dtype=ball.centre.dtype, device=ball.centre.device)
    for _ in range(steps):
        gradient = input_gradient(scores, points, labels, chunk)
        health += gradient.sum()
        for index, (attack, where) in enumerate(zip(attacks, slices, strict=True)):
            direction, memories[index] = attack.direction(gradient[where], memories[index])
            points[where].add_(direction, alpha=attack.step_size(ball.size))
        points = torch.clamp(points, ball.lower, ball.upper, out=points)
    # sign(NaN) is 0: without this check a broken gradient would look like a robust model. One look, after the loop.
    if not bool(torch.isfinite(health)):
        raise ModelError(
            "an attack met a gradient that is not a number.", remedy="Lower the learning rate or check the inputs."
        )
    return points


def ensemble_slices(batch_size: int, num_attacks: int) -> list[slice]:
    """m/|A| consecutive examples for each attack (Algorithm 1, line 10)."""
    if batch_size % num_attacks:
        below = batch_size - batch_size % num_attacks
        raise SettingError(
            f"batch_size={batch_size} is not a multiple of the {num_attacks} attacks.",
            why="Algorithm 1 gives each attack an equal share.",
            remedy=f"Use {below} or {below + num_attacks}." if below else f"Use {num_attacks}.",
        )
    share = batch_size // num_attacks
    return [slice(i * share, (i + 1) * share) for i in range(num_attacks)]
