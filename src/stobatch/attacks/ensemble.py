"""Attacks by name, what they may spend, and attacks made of attacks: restarts, and a run towards each likely class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from stobatch.attacks.ball import Ball
from stobatch.attacks.goals import Goal
from stobatch.attacks.loop import Attack, Best, GradientAttack, Victim, appraise
from stobatch.errors import SettingError
from stobatch.registry import ATTACKS


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


def restarted(attack: GradientAttack, budget: Budget) -> Attack:
    """The attack from as many random starts as the budget allows."""
    return attack if budget.restarts == 1 else Restarts(attack, times=budget.restarts)


def make_attack(name: str, budget: Budget) -> Attack:
    """Return the attack of that name, which spends the budget; FGSM takes one step whatever is allowed."""
    attack: object = ATTACKS.require(name)(budget)
    if not isinstance(attack, Attack):
        raise SettingError(
            f"the attack '{name}' cannot be used.",
            why=f"It is made as a {type(attack).__name__}, not as an Attack.",
            remedy="Let its function return a stobatch.attacks.Attack, or leave the attack out.",
        )
    return attack


def paper_ensemble(names: tuple[str, ...], steps: int) -> list[GradientAttack]:
    """The ensemble A of Algorithm 1 and of the paper's tests: T steps of size μ/T each (Eq. 8), Madry's too."""
    ensemble = []
    for name in names:
        attack = make_attack(name, Budget(steps))
        assert isinstance(attack, GradientAttack)
        ensemble.append(replace(attack, relative_step=1.0))
    return ensemble
