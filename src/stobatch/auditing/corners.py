"""Vertices and random points of a ball: no walk, so nothing about the function can lead it astray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from stobatch.attacks import Attack, Ball, Goal, Victim
from stobatch.attacks.geometry import per_example
from stobatch.attacks.gradient import Best, appraise

_MOST_FLIPS = 0.5
"""Of the values that move along the gradient, this share is turned round at most; half of them is pure chance."""


@final
@dataclass(frozen=True)
class Corners(Attack):
    """The outermost points of the ball in many directions, and points inside; the worst for each example.

    Directions: all values up, all values down (where a sum over many values is weakest, and a gradient may be flat),
    then in turn the gradient at the centre with some signs flipped, random signs, and points anywhere in the ball.
    In l-infinity an outermost point is a corner, in l1 a corner too, in l2 a point of the sphere.
    """

    points: int = 100

    def search(self, victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator, chunk: int) -> Tensor:
        goal = replace(goal, loss="margin", aim=None)
        best, rows = Best(ball.centre), torch.arange(len(ball.centre), device=ball.centre.device)
        best.see(rows, ball.centre, *appraise(victim, ball.centre, goal, generator, chunk))
        slope = _gradient(victim, ball.centre, goal, generator, chunk)
        for turn in range(self.points):
            rows = best.resisting()
            if not len(rows):
                break
            found = self._propose(turn, ball.part(rows), slope[rows], generator)
            best.see(rows, found, *appraise(victim, found, goal.part(rows), generator, chunk))
        return best.points

    @staticmethod
    def _propose(turn: int, ball: Ball, slope: Tensor, generator: torch.Generator) -> Tensor:
        centre = ball.centre
        if turn < 2:
            direction = torch.full_like(centre, 1.0 if turn == 0 else -1.0)
        elif turn % 3 == 2:
            # The first time nothing is flipped: a corner that walks may pass by.
            most = 0.0 if turn == 2 else _MOST_FLIPS
            share = per_example(most * torch.rand(len(centre), generator=generator), centre)
            flipped = torch.rand(centre.shape, generator=generator) < share
            direction = torch.where(flipped.to(centre.device), -slope, slope)
        elif turn % 3 == 0:
            direction = torch.randn(centre.shape, generator=generator).to(centre)
        else:
            return ball.at(ball.random_offsets(len(centre), generator))
        return ball.climb(centre, direction, ball.size_for(centre))


def _gradient(victim: Victim, points: Tensor, goal: Goal, generator: torch.Generator, chunk: int) -> Tensor:
    """Of the objective at the points; zero where the function has none."""
    scores, parts = victim.draw(generator), []
    for start in range(0, len(points), chunk):
        which = slice(start, start + chunk)
        leaf = points[which].detach().requires_grad_()
        with torch.enable_grad():
            total = goal.objective(scores(leaf), which).sum()
        parts.append(torch.autograd.grad(total, leaf)[0] if total.requires_grad else torch.zeros_like(leaf))
    return torch.cat(parts)
