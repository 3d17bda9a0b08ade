"""Parabolas below functionals of scattering, against searches for a picture that lies lower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stobatch.bounds import tangents as module
from stobatch.bounds.scattering import SLACK, ScatteringLipschitz
from stobatch.bounds.tangents import Parabola, ScatteringTangents, Tangents, l2_stretch
from stobatch.models.scattering import Scattering
from stobatch.types import Norm

SIDE = 12
DISTANCES = (0.02, 0.1, 0.4, 1.5)
"""In l2; the balls of l-infinity are those that reach as far."""
NORMS = (Norm.L2, Norm.LINF)
SIGNS = ("mixed", "falling", "last")
FLAT, STEEP = 0.5, 1e6
"""Curvatures: one that loses much at once, and one that bends so much that nothing is lost at the point itself."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


FRONTS = {
    "two orders": Scattering((3, SIDE, SIDE), angles=4, gains=(1.0, 2.0, 2.0, 3.0)),
    "four scales": Scattering(
        (3, SIDE, SIDE), 4, (1.0, 3.0, 3.0, 2.0, 1.0), differences=(1.0, 0.0, 0.0, 2.0, 1.0), orders=1
    ),
    "mixtures": Scattering(
        *((3, SIDE, SIDE), 4, (1.0, 3.0, 3.0, 2.0, 1.0)),
        differences=(1.0, 0.0, 2.0, 0.0, 1.0),
        mixtures=(0.0, 0.0, 2.0, 2.0, 1.0),
        orders=1,
    ),
}


@pytest.fixture(scope="module", params=FRONTS)
def tangents(request: pytest.FixtureRequest) -> ScatteringTangents:
    return ScatteringTangents(ScatteringLipschitz(FRONTS[request.param]))


def pictures() -> Tensor:
    """Return pictures with rough and flat places, where moduli are small and bend most."""
    rough = torch.randn(8, 3, SIDE, SIDE, generator=seeded(0), dtype=torch.float64)
    return rough * torch.linspace(0.01, 0.3, SIDE, dtype=torch.float64)


def functionals(front: Scattering, signs: str) -> Tensor:
    """Return a functional for each picture; moduli with negative weights are what bends down."""
    weights = torch.randn(8, len(front.colours), front.paths, 9, generator=seeded(1), dtype=torch.float64)
    if signs == "last":  # order 2, or the widest scale
        weights[:, :, : front.paths - front.sizes[-1]] = 0
    if signs != "mixed":
        weights[:, :, 1:] = -weights[:, :, 1:].abs()
    return weights.flatten(1)


def lowest(front: Scattering, weights: Tensor, start: Tensor, distance: float, norm: Norm) -> Tensor:
    """Descend on w·(S(y) - S(x)) over pictures y in the ball around x; return the least value of each row."""
    before = (front(start).flatten(1) * weights).sum(1)
    best = torch.full_like(before, torch.inf)

    def on_the_edge(move: Tensor) -> Tensor:
        if norm is Norm.LINF:
            return distance * (move / move.abs().amax((1, 2, 3), keepdim=True)).clamp(-0.05, 0.05) / 0.05
        return distance * move / move.flatten(1).norm(dim=1).view(-1, 1, 1, 1)

    move = on_the_edge(torch.randn(start.shape, generator=seeded(2), dtype=torch.float64))
    for _ in range(40):
        move.requires_grad_()
        change = (front(start + move).flatten(1) * weights).sum(1) - before
        best = torch.minimum(best, change.detach())
        (gradient,) = torch.autograd.grad(change.sum(), move)
        if norm is Norm.LINF:
            move = (move.detach() - 0.3 * distance * gradient.sign()).clamp(-distance, distance)
        else:
            step = gradient / gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            move = on_the_edge(move.detach() - 0.5 * distance * step)
    return best


def tangents_of(
    tangents: ScatteringTangents, weights: Tensor, start: Tensor, curvature: float, touching: Tensor | None = None
) -> Tangents:
    rows = torch.ones(len(start)).double()
    return tangents.of(weights, tangents.scattering.responses(start), curvature * rows, touching)


def highest(found: Tangents, distance: float, norm: Norm) -> Tensor:
    """Return the best of the lower bounds: the tangent, squares completed for this distance and two others, and a
    square whose diagonal a factor proves.
    """
    rows = torch.ones_like(found.loss)
    squares = [found.completed(times * distance * rows, norm) for times in (0.3, 1.0, 3.0)]
    bounds = [found.parabola(norm), *(part.parabola for part in (*squares, found.factored(distance * rows, norm)))]
    return torch.stack([at(bound, distance) for bound in bounds]).amax(0)


def at(parabola: Parabola, distance: float) -> Tensor:
    return parabola.start - parabola.slope * distance - parabola.bend * distance**2


def inside(norm: Norm, distance: float) -> float:
    """Return the radius of the ball in this norm that reaches this far in l2."""
    return distance / l2_stretch(norm, (3, SIDE, SIDE))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("curvature", [FLAT, 5.0, STEEP])
@pytest.mark.parametrize("signs", SIGNS)
def test_no_picture_lies_below_a_parabola(
    tangents: ScatteringTangents, signs: str, curvature: float, norm: Norm
) -> None:
    front, start = tangents.scattering.front, pictures()
    weights = functionals(front, signs)
    found = tangents_of(tangents, weights, start, curvature)
    for distance in DISTANCES:
        radius = inside(norm, distance)
        least = lowest(front, weights, start, radius, norm)
        assert bool((least >= highest(found, radius, norm)).all())
        worst = found.completed(radius * torch.ones_like(found.loss), norm).worst
        closer = tangents_of(tangents, weights, start, curvature, touching=worst)
        assert bool((least >= highest(closer, radius, norm)).all())


@pytest.mark.parametrize("norm", NORMS)
def test_bounds_that_touch_at_the_worst_picture_prove_more(tangents: ScatteringTangents, norm: Norm) -> None:
    """They are true wherever they touch; a twin that forgets what tangents lose elsewhere is not."""
    front, start, distance = tangents.scattering.front, pictures(), inside(norm, 0.4)
    weights = functionals(front, "mixed")
    least, rows = lowest(front, weights, start, distance, norm), torch.ones(len(start), dtype=torch.float64)
    found = tangents_of(tangents, weights, start, 40.0)
    square = found.completed(distance * rows, norm)
    size = square.worst.abs().amax((1, 2)) if norm is Norm.LINF else square.worst.flatten(1).norm(dim=1)
    assert bool((size <= distance * (1 + 1e-9)).all())
    closer = tangents_of(tangents, weights, start, 40.0, touching=square.worst)
    before, after = (at(part.factored(distance * rows, norm).parabola, distance) for part in (found, closer))
    assert float(before.mean()) < float(after.mean())
    assert bool((after <= least).all())
    anywhere, close = 0.3 * torch.randn(found.gradient.shape, generator=seeded(5), dtype=torch.float64), 0.01 * distance
    elsewhere = tangents_of(tangents, -functionals(front, "falling"), start, 40.0, touching=anywhere)
    least = lowest(front, -functionals(front, "falling"), start, close, norm)
    assert bool((highest(elsewhere, close, norm) <= least).all())
    lossless = replace(elsewhere, loss=0 * elsewhere.loss)
    assert bool((highest(lossless, close, norm) > least).any())


def test_what_float64_misses_of_a_gradient_follows_its_slopes(
    tangents: ScatteringTangents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds that touch far away are steep, against sums in long double; a share of the weights alone is too small."""
    front, start = tangents.scattering.front, pictures()
    weights, slopes = -functionals(front, "falling").abs(), []

    def watched(*arguments: Any) -> Any:
        slopes.append(lines(*arguments))
        return slopes[-1]

    lines = module._lines
    monkeypatch.setattr(module, "_lines", watched)
    found = tangents_of(tangents, weights, start, 1e15, touching=(1e-9 - 1) * start.flatten(2))
    first = tangents.scattering.by_kind(weights)[0]
    turned = exact_product(first, tangents.scattering.low.rows)[:, :, 0]
    for scale, part in enumerate(slopes[-front.num_scales :]):
        turned[:, front.reach(scale)] += exact_product(part.slopes.flatten(-3), tangents.scattering.scales[scale].rows)
    exact = np.einsum("dc,ndp->ncp", front.colours.numpy().astype(np.longdouble), turned)
    off = (found.gradient.numpy() - exact).reshape(len(start), -1)
    off = torch.from_numpy(np.sqrt((off**2).sum(1)).astype(np.float64))
    assert bool((off <= found.missed).all())
    assert bool((off > (SLACK - 1) * front.lifted(weights).flatten(1).norm(dim=1)).all())


def exact_product(left: Tensor, rows: Tensor) -> Any:
    """Return left @ rows.T in long double."""
    return np.matmul(left.numpy().astype(np.longdouble), rows.T.numpy().astype(np.longdouble))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("signs", ["falling", "last"])
def test_bounds_that_forget_a_part_fall(
    tangents: ScatteringTangents, signs: str, norm: Norm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken twins: moduli that do not bend, and lines over them that touch nothing at the point itself."""
    front, start = tangents.scattering.front, pictures()
    weights = functionals(front, signs)
    whole = tangents_of(tangents, weights, start, STEEP)
    straight = replace(whole, bends=tuple(0 * part for part in whole.bends), level=1e-9 * whole.level)
    far, close = inside(norm, 0.4), inside(norm, 0.02)
    assert bool((lowest(front, weights, start, far, norm) < highest(straight, far, norm)).all())

    def lossless(*arguments: Any) -> Any:
        return lines(*arguments)._replace(loss=torch.zeros(len(start)).double())

    lines = module._lines
    monkeypatch.setattr(module, "_lines", lossless)
    found = tangents_of(tangents, weights, start, FLAT)
    assert bool((lowest(front, weights, start, close, norm) < highest(found, close, norm)).all())


def test_a_box_is_no_ball(tangents: ScatteringTangents) -> None:
    """A broken twin: in a box the gradient counts by its l1 norm, and its l2 norm promises too much."""
    front, start = tangents.scattering.front, pictures()
    weights, radius = functionals(front, "mixed"), inside(Norm.LINF, 1e-4)
    found = tangents_of(tangents, weights, start, 1e4).parabola(Norm.L2)
    assert bool((lowest(front, weights, start, radius, Norm.LINF) < at(found, radius)).all())


@pytest.mark.parametrize("norm", NORMS)
def test_near_the_picture_the_bound_is_its_gradient(tangents: ScatteringTangents, norm: Norm) -> None:
    front, start = tangents.scattering.front, pictures().requires_grad_()
    weights = functionals(front, "mixed")
    (gradient,) = torch.autograd.grad((front(start).flatten(1) * weights).sum(), start)
    found = tangents_of(tangents, weights, start.detach(), 1e5)
    size = gradient.flatten(1).abs().sum(1) if norm is Norm.LINF else gradient.flatten(1).norm(dim=1)
    torch.testing.assert_close(highest(found, 1e-7, norm) / -1e-7, size, rtol=0.02, atol=0)


def dense(found: Tangents, row: int) -> Tensor:
    """Return the form of a row, column by column."""
    values = found.gradient[0].numel()
    units = torch.eye(values, dtype=torch.float64).view(values, *found.gradient.shape[1:])
    return found.take(torch.full((values,), row))._form(units).reshape(values, values)


@pytest.mark.parametrize("steps", [0, 2, 4])
def test_inverse_forms_are_not_too_small(
    tangents: ScatteringTangents, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a dense solution, however few steps are taken; without the residual's part it would be too small."""
    start = pictures()[:2]
    found = tangents_of(tangents, functionals(tangents.scattering.front, "falling")[:2], start, 5.0)
    form = torch.stack([dense(found, row) for row in range(2)])
    torch.testing.assert_close(form, form.mT)
    assert bool((torch.linalg.eigvalsh(form)[:, -1] <= found.level).all())
    assert bool((torch.linalg.eigvalsh(form)[:, 0] >= -1e-9).all())
    spread = torch.linspace(1.02, 3.0, len(form[0]), dtype=torch.float64).view(found.gradient.shape[1:])
    diagonal = found.level.view(-1, 1, 1) * spread
    matrix = torch.diag_embed(diagonal.flatten(1)) - form
    gradient = found.gradient.flatten(1)
    exact = (gradient * torch.linalg.solve(matrix, gradient)).sum(1)
    monkeypatch.setattr(module, "_STEPS", steps)
    solution = found._solved(diagonal)
    bound = found._inverse_form(diagonal, solution, 0.02 * found.level)
    assert bool((bound >= exact).all())
    if steps == 4:
        assert bool((bound <= 1.05 * exact).all())
    if steps == 2:
        short = found._inverse_form(diagonal, solution, torch.full_like(found.level, torch.inf))
        assert bool((short < exact).all())


def test_products_in_float32_miss_less_than_their_bound(tangents: ScatteringTangents) -> None:
    """Nothing of it is beyond the bound; a bound for float64 would be too small."""
    found = tangents_of(tangents, functionals(tangents.scattering.front, "falling"), pictures(), 5.0)
    for row in range(2):
        matrix, missed = found.take(torch.tensor([row]))._matrix()
        off = torch.linalg.matrix_norm(matrix - dense(found, row), 2)
        assert 2.0**-29 * missed < off <= missed < 0.01 * found.level[row]


@pytest.mark.parametrize("norm", NORMS)
def test_factors_prove_more_and_nothing_that_is_not_so(
    tangents: ScatteringTangents, norm: Norm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Diagonals are above the form, and what is proved is at least gᵀ(D - Q)⁻¹g. Of diagonals far below the form, which
    a twin that asks for no factor would take, nothing is proved.
    """
    found = tangents_of(tangents, functionals(tangents.scattering.front, "mixed"), pictures(), 5.0)
    distance = inside(norm, 4.0)
    rows = distance * torch.ones_like(found.loss)
    by_factors, by_level = (
        at(part.parabola, distance).mean() for part in (found.factored(rows, norm), found.completed(rows, norm))
    )
    assert float(by_factors) > 0.97 * float(by_level)
    form, row = dense(found, 0), found.take(torch.tensor([0]))
    diagonal, solution, bound = row._factored(rows[:1], norm)
    matrix, gradient = torch.diag(diagonal.flatten()) - form, row.gradient.flatten()
    assert float(torch.linalg.eigvalsh(matrix)[0]) > 0
    solved = torch.linalg.solve(matrix, gradient)
    torch.testing.assert_close(solution.flatten(), solved, rtol=1e-3, atol=1e-5)
    exact = float(gradient @ solved)
    assert exact <= float(bound) <= 1.001 * exact
    monkeypatch.setattr(module, "_FLOORS", (0.01,))
    diagonal, _, bound = replace(row, gradient=1e-3 * row.gradient)._factored(rows[:1], norm)
    assert float(torch.linalg.eigvalsh(torch.diag(diagonal.flatten()) - form)[0]) < 0
    assert float(bound) == torch.inf


@pytest.mark.parametrize("norm", NORMS)
def test_flat_pictures_have_bounds_too(tangents: ScatteringTangents, norm: Norm) -> None:
    """All moduli are 0 there, so nothing may be divided by them."""
    front, flat = tangents.scattering.front, torch.zeros(8, 3, SIDE, SIDE, dtype=torch.float64)
    weights, radius = functionals(front, "mixed"), inside(norm, 0.4)
    bound = highest(tangents_of(tangents, weights, flat, 1.0), radius, norm)
    assert bool(bound.isfinite().all())
    assert bool((lowest(front, weights, flat, radius, norm) >= bound).all())


def test_root_is_where_a_parabola_ends() -> None:
    start, slope, bend = (torch.rand(50, generator=seeded(n), dtype=torch.float64) + 1e-3 for n in range(3))
    parabola = Parabola(start, slope, bend)
    torch.testing.assert_close(slope * parabola.root() + bend * parabola.root().square(), start, atol=1e-12, rtol=0)
    assert bool((parabola._replace(start=-start).root() == 0).all())


def test_the_allowance_for_products_is_that_of_their_sums(tangents: ScatteringTangents) -> None:
    """Scaled from float64 to float32 it covers products in float32; a millionth of it would not."""
    start = pictures()
    found = tangents_of(tangents, functionals(tangents.scattering.front, "falling"), start, 5.0)
    moves = torch.randn(found.gradient.shape, generator=seeded(4), dtype=torch.float64)
    exact = found._form(moves)
    front = tangents.scattering.front
    stages = [stage.rows for stage in tangents.scattering.scales]
    channels = torch.einsum("dc,ncp->ndp", front.colours.float(), moves.float())
    turned = torch.zeros_like(channels)
    for scale, (rows, bends) in enumerate(zip(stages, found.bends, strict=True)):
        reach = front.reach(scale)
        parts = (channels[:, reach] @ rows.float()).view(len(bends), len(reach), 2, *bends.shape[2:])
        turned[:, reach] += (parts * bends.float().unsqueeze(2)).flatten(2) @ rows.float().T
    rounded = torch.einsum("dc,ndp->ncp", front.colours.float(), turned)
    off = (rounded.double() - exact).flatten(1).norm(dim=1)
    allowed = 2.0**29 * found.float64 * found.level * moves.flatten(1).norm(dim=1)
    assert bool((off <= allowed).all())
    assert bool((off > 1e-6 * allowed).all())
