"""Parabolas below functionals of scattering, against searches for a picture that lies lower."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from stobatch.bounds import tangents as module
from stobatch.bounds.scattering import ScatteringLipschitz
from stobatch.bounds.tangents import Parabola, ScatteringTangents
from stobatch.models.scattering import Scattering

SIDE = 12
DISTANCES = (0.02, 0.1, 0.4, 1.5)
SIGNS = ("mixed", "falling", "order 2")
FLAT, STEEP = 0.5, 1e6
"""Curvatures: one that loses much at once, and one that bends so much that nothing is lost at the point itself."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def tangents() -> ScatteringTangents:
    return ScatteringTangents(ScatteringLipschitz(Scattering((3, SIDE, SIDE), angles=4, gains=(1.0, 2.0, 3.0))))


def pictures() -> Tensor:
    """Return pictures with rough and flat places, where moduli are small and bend most."""
    rough = torch.randn(8, 3, SIDE, SIDE, generator=seeded(0), dtype=torch.float64)
    return rough * torch.linspace(0.01, 0.3, SIDE, dtype=torch.float64)


def functionals(front: Scattering, signs: str) -> Tensor:
    """Return a functional for each picture; moduli with negative weights are what bends down."""
    weights = torch.randn(8, 3, front.paths, 9, generator=seeded(1), dtype=torch.float64)
    if signs == "order 2":
        weights[:, :, : 1 + 2 * front.angles] = 0
    if signs != "mixed":
        weights[:, :, 1:] = -weights[:, :, 1:].abs()
    return weights.flatten(1)


def lowest(front: Scattering, weights: Tensor, start: Tensor, distance: float) -> Tensor:
    """Descend on w·(S(y) - S(x)) over pictures y at this distance of x; return the least value of each row."""
    before = (front(start).flatten(1) * weights).sum(1)
    move = 1e-3 * torch.randn(start.shape, generator=seeded(2), dtype=torch.float64)
    best = torch.full_like(before, torch.inf)
    for _ in range(40):
        move = distance * move / move.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        move.requires_grad_()
        change = (front(start + move).flatten(1) * weights).sum(1) - before
        best = torch.minimum(best, change.detach())
        (gradient,) = torch.autograd.grad(change.sum(), move)
        step = gradient / gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        move = move.detach() - 0.5 * distance * step
    return best


def below(tangents: ScatteringTangents, weights: Tensor, start: Tensor, curvature: float) -> list[Parabola]:
    rows = torch.ones(len(start)).double()
    return list(tangents.below(weights, tangents.scattering.responses(start), curvature * rows, 0.1 * rows))


def highest(parabolas: Iterable[Parabola], distance: float) -> Tensor:
    return torch.stack([p.start - p.slope * distance - p.bend * distance**2 for p in parabolas]).amax(0)


@pytest.mark.parametrize("curvature", [FLAT, 5.0, STEEP])
@pytest.mark.parametrize("signs", SIGNS)
def test_no_picture_lies_below_a_parabola(tangents: ScatteringTangents, signs: str, curvature: float) -> None:
    front, start = tangents.scattering.front, pictures()
    weights = functionals(front, signs)
    bounds = below(tangents, weights, start, curvature)
    for distance in DISTANCES:
        assert bool((lowest(front, weights, start, distance) >= highest(bounds, distance)).all())


@pytest.mark.parametrize("signs", ["falling", "order 2"])
def test_bounds_that_forget_a_part_fall(
    tangents: ScatteringTangents, signs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken twins: moduli that do not bend, and parabolas over them that touch nothing at the point itself."""
    front, start = tangents.scattering.front, pictures()
    weights, straight = functionals(front, signs), copy(tangents)
    straight.levels = torch.zeros_like(tangents.levels)
    assert bool((lowest(front, weights, start, 0.4) < highest(below(straight, weights, start, STEEP), 0.4)).all())

    def lossless(*arguments: Any) -> tuple[Tensor, Tensor]:
        slopes, loss = whole(*arguments)
        return slopes, torch.zeros_like(loss)

    whole = module._lines
    monkeypatch.setattr(module, "_lines", lossless)
    assert bool((lowest(front, weights, start, 0.02) < highest(below(tangents, weights, start, FLAT), 0.02)).all())


def test_near_the_picture_the_bound_is_its_gradient(tangents: ScatteringTangents) -> None:
    front, start = tangents.scattering.front, pictures().requires_grad_()
    weights = functionals(front, "mixed")
    (gradient,) = torch.autograd.grad((front(start).flatten(1) * weights).sum(), start)
    rows, responses = torch.ones(8).double(), tangents.scattering.responses(start.detach())
    bounds = tangents.below(weights, responses, 1e5 * rows, 1e-6 * rows)
    torch.testing.assert_close(highest(bounds, 1e-6) / -1e-6, gradient.flatten(1).norm(dim=1), rtol=0.02, atol=0)


def test_flat_pictures_have_bounds_too(tangents: ScatteringTangents) -> None:
    """All moduli are 0 there, so nothing may be divided by them."""
    flat, weights = torch.zeros(8, 3, SIDE, SIDE, dtype=torch.float64), functionals(tangents.scattering.front, "mixed")
    bound = highest(below(tangents, weights, flat, 1.0), 0.4)
    assert bool(bound.isfinite().all())
    assert bool((lowest(tangents.scattering.front, weights, flat, 0.4) >= bound).all())


def test_root_is_where_a_parabola_ends() -> None:
    start, slope, bend = (torch.rand(50, generator=seeded(n), dtype=torch.float64) + 1e-3 for n in range(3))
    parabola = Parabola(start, slope, bend)
    torch.testing.assert_close(slope * parabola.root() + bend * parabola.root().square(), start, atol=1e-12, rtol=0)
    assert bool((parabola._replace(start=-start).root() == 0).all())
