"""Square attack (Andriushchenko et al., 2020): random search with square patches, no gradients.

It needs no gradients, so it breaks models that only mask their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import final

import torch
from torch import Tensor

from stobatch.attacks.ball import Ball
from stobatch.attacks.ensemble import Budget
from stobatch.attacks.goals import Goal
from stobatch.attacks.loop import Attack, Best, Victim, evaluate_victim
from stobatch.types import Norm

_HALVE_AT = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""Out of 10,000 queries, those after which the share of the image that a patch covers halves."""


@final
@dataclass(frozen=True)
class Square(Attack):
    """Propose a patch of ±radius for each example; keep it where the margin grew.

    In l2 and l1 a patch is added to the current offset, at a share of the radius that falls with the patch's size, and
    the projection then shrinks earlier patches. Inputs without height and width are treated as one row of pixels.
    """

    queries: int = 1000
    first_share: float = 0.8

    def search(self, victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator, chunk: int) -> Tensor:
        goal = replace(goal, loss="margin", aim=None)
        best, rows = Best(ball.centre), torch.arange(len(ball.centre), device=ball.centre.device)
        best.update(rows, ball.centre, *evaluate_victim(victim, ball.centre, goal, generator, chunk))
        rows = best.unreached()
        points, ball_left, goal_left = self._stripes(ball, generator)[rows], ball.part(rows), goal.part(rows)
        for query in range(self.queries if len(rows) else 0):
            best.update(rows, points, *evaluate_victim(victim, points, goal_left, generator, chunk))
            if len(left := best.unreached()) < len(rows):
                rows, ball_left, goal_left = left, ball.part(left), goal.part(left)
            if not len(rows):
                break
            points = self._propose(ball_left, best.points[rows], self._share(query), generator)
        return best.points

    def _share(self, query: int) -> float:
        scaled = query * 10_000 / self.queries
        halvings = sum(scaled > limit for limit in _HALVE_AT)
        return self.first_share * 0.5**halvings

    def _stripes(self, ball: Ball, generator: torch.Generator) -> Tensor:
        """Return vertical stripes of random sign, the authors' initialisation."""
        centre = _as_images(ball.centre)
        count, channels, _, width = centre.shape
        signs = torch.randint(0, 2, (count, channels, 1, width), generator=generator).to(ball.centre) * 2 - 1
        size = ball.size_for(centre) / self._norm_of_ones(ball, centre[0].numel())
        return ball.project((centre + size * signs).reshape(ball.centre.shape))

    def _propose(self, ball: Ball, points: Tensor, share: float, generator: torch.Generator) -> Tensor:
        """Put a random patch on the points: one position for all examples, a sign for each example and channel."""
        centre, images = _as_images(ball.centre), _as_images(points)
        count, channels, height, width = images.shape
        side = max(1, round(sqrt(share * height * width)))
        tall, wide = min(side, height), min(side, width)
        top = int(torch.randint(0, height - tall + 1, (), generator=generator))
        left = int(torch.randint(0, width - wide + 1, (), generator=generator))
        window = (..., slice(top, top + tall), slice(left, left + wide))
        signs = torch.randint(0, 2, (count, channels, 1, 1), generator=generator).to(points) * 2 - 1
        patch = ball.size_for(images) / self._norm_of_ones(ball, channels * tall * wide) * signs
        if ball.radius.norm is Norm.LINF:
            # In l-infinity values are independent, and those outside the patch are in the box already.
            ends = (_as_images(end.expand_as(points))[window] for end in (ball.lower, ball.upper))
            images[window] = (centre[window] + patch).clamp_(*ends)
            return points
        images[window] += sqrt(share) * patch
        return ball.project(points)

    @staticmethod
    def _norm_of_ones(ball: Ball, values: int) -> float:
        """Return the norm of a vector of `values` ones."""
        return {Norm.LINF: 1.0, Norm.L2: sqrt(values), Norm.L1: float(values)}[ball.radius.norm]


def _as_images(points: Tensor) -> Tensor:
    return points if points.ndim == 4 else points.reshape(len(points), 1, 1, -1)


def square(budget: Budget) -> Attack:
    return Square(budget.queries)
