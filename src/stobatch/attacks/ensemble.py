"""Attacks by name, and attacks made of attacks: restarts, and one run towards each likely class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from stobatch.attacks.apgd import APGD
from stobatch.attacks.ball import Ball
from stobatch.attacks.goals import Goal
from stobatch.attacks.loop import Attack, Best, GradientAttack, Victim, appraise
from stobatch.attacks.pgd import FGSM, IFGSM, MIM, Madry
from stobatch.attacks.square import Square


@dataclass(frozen=True)
class _Repeated(Attack, ABC):
    """Another attack, run again on the examples that still resist; the worst point of all runs counts."""

    attack: Attack

    @abstractmethod
    def goals(self, victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator, chunk: int) -> Iterator[Goal]:
        """The goal of each run, over all examples."""

    def search(self, victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator, chunk: int) -> Tensor:
        best, rows = Best(ball.centre), torch.arange(len(ball.centre), device=ball.centre.device)
        for aim in self.goals(victim, ball, goal, generator, chunk):
            found = self.attack.search(victim, ball.part(rows), aim.part(rows), generator, chunk)
            best.see(rows, found, *appraise(victim, found, goal.part(rows), generator, chunk))
            rows = best.resisting()
            if not len(rows):
                break
        return best.points


@final
@dataclass(frozen=True)
class Restarts(_Repeated):
    """The same attack from several random starts."""

    times: int = 2

    def goals(self, victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator, chunk: int) -> Iterator[Goal]:
        for _ in range(self.times):
            yield goal


@final
@dataclass(frozen=True)
class EveryAim(_Repeated):
    """One run towards each of the most likely other classes; for a goal that is targeted already, just one run."""

    num_aims: int = 3

    @torch.no_grad()
    def goals(self, victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator, chunk: int) -> Iterator[Goal]:
        if goal.targeted or goal.labels is None:
            yield goal
            return
        scores = victim.draw(generator)
        logits = torch.cat([scores(part) for part in torch.split(ball.centre, chunk)])
        others = logits.scatter(1, goal.labels[:, None], -torch.inf).argsort(1, descending=True)
        for rank in range(min(self.num_aims, logits.shape[1] - 1)):
            yield replace(goal, aim=others[:, rank])


@dataclass(frozen=True)
class Budget:
    """What an attack may spend."""

    steps: int = 10
    restarts: int = 1
    queries: int = 200
    num_aims: int = 3


def _restarted(attack: GradientAttack, budget: Budget) -> Attack:
    return attack if budget.restarts == 1 else Restarts(attack, times=budget.restarts)


ATTACKS: dict[str, Callable[[Budget], Attack]] = {
    "fgsm": lambda budget: FGSM(),
    "ifgsm": lambda budget: IFGSM(budget.steps),
    "mim": lambda budget: MIM(budget.steps),
    "madry": lambda budget: _restarted(Madry(budget.steps), budget),
    "apgd_ce": lambda budget: _restarted(APGD(budget.steps), budget),
    "apgd_dlr": lambda budget: _restarted(APGD(budget.steps, loss="dlr"), budget),
    "apgd_t": lambda budget: EveryAim(APGD(budget.steps, loss="dlr"), num_aims=budget.num_aims),
    "square": lambda budget: Square(budget.queries),
}
"""Makes an attack that spends a budget; FGSM takes one step whatever is allowed."""

_PAPER_ATTACKS: dict[str, Callable[[int], GradientAttack]] = {
    "fgsm": lambda steps: FGSM(),
    "ifgsm": IFGSM,
    "mim": MIM,
    "madry": Madry,
}


def paper_ensemble(names: tuple[str, ...], steps: int) -> list[GradientAttack]:
    """The ensemble A of Algorithm 1 and of the paper's tests: T steps of size μ/T each (Eq. 8), Madry's too."""
    return [replace(_PAPER_ATTACKS[name](steps), relative_step=1.0) for name in names]
