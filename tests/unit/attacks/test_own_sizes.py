"""Balls of many sizes at once: row by row, everything is as in a ball of that one size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from oracles import NORMS, digits, length, random_points, rows, seeded, widest
from torch import Tensor, nn

from stobatch.attacks import ATTACKS, Ball, Budget, Goal, Plain
from stobatch.types import PAPER_RANGE, Norm, Radius

SHARES = (0.0, 1e-7, 0.003, 0.05, 0.4, 1.0)

every_norm = pytest.mark.parametrize("norm", NORMS)
every_shape = pytest.mark.parametrize("shape", [(7,), (2, 3, 3)])
every_precision = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def balls(norm: Norm, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Ball, list[Ball]]:
    """One ball of many sizes, and one ball for each of its rows."""
    centre = digits(len(SHARES), shape, dtype=dtype)
    sizes = torch.tensor(SHARES, dtype=torch.float64) * widest(norm, centre[0].numel())
    alone = [
        Ball.around(centre[i : i + 1], Radius(float(size), norm, PAPER_RANGE)) for i, size in enumerate(sizes.tolist())
    ]
    return Ball.around_each(centre, sizes, Radius(1.0, norm, PAPER_RANGE)), alone


def scattered(ball: Ball, seed: int) -> Tensor:
    return torch.randn(ball.centre.shape, generator=seeded(seed), dtype=torch.float64).to(ball.centre)


def each(points: Tensor) -> Iterator[Tensor]:
    return iter(points.split(1))


@every_norm
@every_shape
@every_precision
def test_projections_and_steps_are_those_of_each_row(norm: Norm, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    many, alone = balls(norm, shape, dtype)
    wished, gradient = many.centre + scattered(many, 1), scattered(many, 2)
    inside = many.project(wished)
    slack = 1e-12 if dtype is torch.float64 else 1e-5
    for one, wish, push, found, step in zip(
        alone, each(wished), each(gradient), each(inside), each(many.ascend(inside, gradient, 0.1)), strict=True
    ):
        assert torch.allclose(found, one.project(wish), rtol=0, atol=slack)
        assert torch.allclose(step, one.ascend(found, push, 0.1), rtol=0, atol=slack)


@every_norm
@every_shape
@every_precision
def test_every_point_is_made_feasible_in_its_own_ball(norm: Norm, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    many, alone = balls(norm, shape, dtype)
    for points in (
        many.make_feasible(many.centre + scattered(many, 3)),
        many.make_feasible(random_points(many, seeded(4))),
    ):
        for offset, one in zip(rows(points) - rows(many.centre), alone, strict=True):
            assert length(offset, norm) <= one.radius.size * (1 + 1e-14)
        assert np.abs(rows(points)).max() <= 1


@every_norm
@pytest.mark.parametrize("name", ["fgsm", "mim", "madry", "apgd_ce", "apgd_t", "square"])
def test_attacks_use_all_of_each_ball(name: str, norm: Norm) -> None:
    """On a linear model every attack with gradients gets as far in each ball as it does in that ball alone."""
    many, alone = balls(norm, (7,), torch.float64)
    model = nn.Linear(7, 3).double().requires_grad_(False)
    nn.init.normal_(model.weight, generator=seeded(5))
    # Far in front, so that no example is let go before the end.
    model.bias.copy_(torch.tensor([1000.0, 0.0, 0.0]))
    attack, goal = ATTACKS[name](Budget(steps=20, queries=150)), Goal(torch.zeros(len(SHARES)).long())
    victim = Plain(model)
    found = attack.run(victim, many, goal, seeded(6))
    for one, point in zip(alone, each(found), strict=True):
        twin = attack.run(victim, one, goal.part(slice(1)), seeded(6))
        lead, other = (float(model(x)[:, 1:].amax() - model(x)[:, 0]) for x in (point, twin))
        start = float(model(one.centre)[:, 1:].amax() - model(one.centre)[:, 0])
        assert lead - start >= (0.7 if name == "square" else 0.97) * (other - start) - 1e-9


@every_norm
def test_a_part_keeps_its_sizes(norm: Norm) -> None:
    many, _ = balls(norm, (7,), torch.float64)
    part = many.part(torch.tensor([4, 2]))
    assert part.sizes is not None
    assert part.sizes.tolist() == [many.sizes[4], many.sizes[2]]
    wanted = many.make_feasible(many.project(many.centre + 1))[[4, 2]]
    assert torch.allclose(part.make_feasible(part.project(part.centre + 1)), wanted, rtol=0, atol=1e-12)
