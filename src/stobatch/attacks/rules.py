"""The paper's attacks as small final classes over the one loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from stobatch.attacks.gradient import Ball, GradientAttack
from stobatch.paper import implements


@implements("Eq. 7", verdict="a definition; post-processing of x̄, so as private as x̄, which is not private.")
@final
@dataclass(frozen=True)
class FGSM(GradientAttack):
    """One step of the sign of the gradient, as large as the radius."""

    steps: int = 1

    def direction(self, gradient: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return gradient.sign(), None


@implements("Eq. 8", verdict="a definition; see Eq. 7.")
@final
@dataclass(frozen=True)
class IFGSM(GradientAttack):
    """FGSM in T small steps, projected after each."""

    def direction(self, gradient: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return gradient.sign(), None


@final
@dataclass(frozen=True)
class MIM(GradientAttack):
    """I-FGSM with momentum on the normalised gradient (Dong et al.)."""

    decay: float = 1.0

    def direction(self, gradient: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        size = gradient.abs().flatten(1).mean(1).clamp(min=torch.finfo(gradient.dtype).tiny)
        fresh = gradient / size.reshape(-1, *[1] * (gradient.ndim - 1))
        momentum = fresh if memory is None else fresh.add_(memory, alpha=self.decay)
        return momentum.sign(), momentum


@final
@dataclass(frozen=True)
class Madry(GradientAttack):
    """Projected gradient steps from a random start (Madry et al.)."""

    relative_step: float = 2.5

    def start(self, ball: Ball, generator: torch.Generator) -> Tensor:
        noise = torch.rand(ball.centre.shape, generator=generator).to(ball.centre) * 2 - 1
        return ball.centre + ball.size * noise

    def direction(self, gradient: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return gradient.sign(), None


ATTACKS: dict[str, Callable[[int], GradientAttack]] = {
    "fgsm": lambda steps: FGSM(),
    "ifgsm": IFGSM,
    "mim": MIM,
    "madry": Madry,
}
"""Makes an attack of so many steps; FGSM takes one whatever is asked."""


def training_ensemble(names: tuple[str, ...], steps: int) -> list[GradientAttack]:
    """The ensemble A of Algorithm 1: every attack takes T_μ steps of size μ/T_μ (Eq. 8)."""
    return [replace(ATTACKS[name](steps), relative_step=1.0) for name in names]
