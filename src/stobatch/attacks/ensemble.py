"""Attacks by name and budget; restarts; targeted runs at several classes; and `attack` for any module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from stobatch.attacks.ball import Ball
from stobatch.attacks.goals import Goal
from stobatch.attacks.loop import Attack, Best, GradientAttack, Plain, Victim, evaluate_victim, require_no_nan
from stobatch.errors import ModelError, SettingError
from stobatch.models.validators import unchanged
from stobatch.registry import ATTACKS
from stobatch.types import PAPER_RANGE, InputRange, Norm, Radius


@dataclass(frozen=True)
class _Repeated(Attack, ABC):
    """Run another attack again on the examples that it has not broken; the worst point of all runs counts."""

    attack: Attack

    @abstractmethod
    def goals(self, victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator, chunk: int) -> Iterator[Goal]:
        """Return the goal of each run, over all examples."""

    def search(self, victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator, chunk: int) -> Tensor:
        best, rows = Best(ball.centre), torch.arange(len(ball.centre), device=ball.centre.device)
        for run_goal in self.goals(victim, ball, goal, generator, chunk):
            points = self.attack.search(victim, ball.part(rows), run_goal.part(rows), generator, chunk)
            best.update(rows, points, *evaluate_victim(victim, points, goal.part(rows), generator, chunk))
            rows = best.unreached()
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
class MultiTargeted(_Repeated):
    """One run at each of the `num_aims` most likely other classes (Gowal et al., 2019); one run for a targeted goal."""

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
    """How much an attack may compute: steps of a gradient attack, restarts, queries of Square, classes of apgd_t."""

    steps: int = 10
    restarts: int = 1
    queries: int = 200
    num_aims: int = 3


def with_restarts(attack: GradientAttack, budget: Budget) -> Attack:
    """Return the attack from as many random starts as the budget allows."""
    return attack if budget.restarts == 1 else Restarts(attack, times=budget.restarts)


def make_attack(name: str, budget: Budget) -> Attack:
    """Return the attack of that name with this budget; FGSM always takes one step."""
    attack: object = ATTACKS.require(name)(budget)
    if not isinstance(attack, Attack):
        raise SettingError(
            f"the attack '{name}' cannot be used.",
            why=f"Its function returns a {type(attack).__name__}, not an Attack.",
            remedy="Let its function return a stobatch.attacks.Attack, or leave the attack out.",
        )
    return attack


def paper_ensemble(names: tuple[str, ...], steps: int) -> list[GradientAttack]:
    """Return the ensemble A of Algorithm 1 and of the paper's tests: T steps of size μ/T each (Eq. 8), Madry's too."""
    ensemble = []
    for name in names:
        attack = make_attack(name, Budget(steps))
        assert isinstance(attack, GradientAttack)
        ensemble.append(replace(attack, relative_step=1.0))
    return ensemble


@dataclass(frozen=True, repr=False)
class AttackResult:
    """The worst point found for each input, and whether it is a success.

    An attack that failed proves nothing: it may have been too weak.
    """

    points: Tensor
    success: Tensor
    """Where the prediction at the point is not the label, or is the target; clean inputs that are wrong count too."""
    distance: Tensor
    """The distance of each point from its input, in float64; at most the radius."""
    radius: Radius
    name: str

    def __repr__(self) -> str:
        broken = int(self.success.sum())
        return f"<{self.name}: {broken} of {len(self.success)} inputs broken within {self.radius}; the rest not proved>"


def attack(
    module: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    radius: Radius | float,
    *,
    norm: Norm | str = Norm.LINF,
    input_range: InputRange = PAPER_RANGE,
    name: str = "apgd_ce",
    steps: int = 50,
    restarts: int = 1,
    queries: int = 1_000,
    targeted: bool = False,
    generator: torch.Generator | None = None,
    rows_at_once: int = 357,
) -> AttackResult:
    """Attack any deterministic module in a ball around each input; `name` is one of `ATTACKS`.

    `module` maps inputs to logits. Labels are those to leave, or with `targeted` those to reach. A radius that is a
    number has the given `norm` and `input_range`. For a module that draws random numbers attack its mean instead:
    `attacks.Expectation(attacks.module_sample(module), draws)` is a victim for `make_attack(name, Budget()).run`.

    **Guarantee.** Every point returned lies in its ball and in the input range, checked in float64, and `success` is
    the module's prediction at that very point, in one more pass. The module and its gradients are left unchanged.

    >>> module = nn.Linear(2, 2)
    >>> _ = module.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
    >>> inputs, labels = torch.tensor([[0.3, 0.0], [0.9, 0.0]]), torch.tensor([0, 0])
    >>> attack(module, inputs, labels, 0.2, generator=torch.Generator().manual_seed(0))
    <apgd_ce: 1 of 2 inputs broken within linf 0.2 over [-1, 1]; the rest not proved>
    """
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    size = Radius.of(radius, norm, input_range)
    ball, goal = Ball.around(inputs, size), Goal(labels, targeted)
    search = make_attack(name, Budget(steps=steps, restarts=restarts, queries=queries))
    with torch.no_grad(), unchanged(module):
        few = inputs[:rows_at_once]
        if not torch.equal(module(few.clone()), module(few.clone())):
            raise ModelError(
                "the module gives the same inputs different scores each time.",
                why="Whether a point breaks it would be luck.",
                remedy="Call module.eval(), or attack its mean with attacks.Expectation and attacks.module_sample.",
            )
        points = search.run(Plain(module), ball, goal, generator, chunk=rows_at_once)
        logits = torch.cat([module(part) for part in torch.split(points, rows_at_once)])
        require_no_nan(logits)
        return AttackResult(points, goal.reached(logits), ball.distance(points), size, name)
