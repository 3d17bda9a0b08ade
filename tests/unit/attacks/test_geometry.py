"""Balls cut by the range, against oracles in NumPy and SciPy. Random points: each test alarms falsely at 1e-9."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import (
    NORMS,
    ROUNDING,
    SHAPES,
    Floats,
    ball,
    best_offset,
    digits,
    excess,
    length,
    random_points,
    rows,
    seeded,
)
from scipy.optimize import linprog, minimize
from scipy.stats import beta, kstwo
from torch import Tensor

from stobatch.attacks import Ball
from stobatch.attacks.ball import Geometry, MaxNorm
from stobatch.errors import ModelError
from stobatch.types import UNIT_RANGE, Norm, Radius

FALSE_ALARM, DRAWS = 1e-9, 10_000

every_norm = pytest.mark.parametrize("norm", NORMS)
few = settings(max_examples=30)
shares = st.one_of(st.sampled_from([0.0, 1e-6, 1e-3, 1.0]), st.floats(0, 1))
seeds = st.integers(0, 10_000)
shapes = st.sampled_from(SHAPES)


def gauss(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=seeded(seed), dtype=torch.float64).to(like)


def first_order_gap(around: Ball, wished: Tensor, found: Tensor) -> float:
    """Zero exactly for the nearest point: no feasible direction may then lead any closer to what was wished."""
    gaps = []
    for centre, wish, point in zip(rows(around.centre), rows(wished), rows(found), strict=True):
        pull = wish - point
        best = best_offset(pull, -1 - centre, 1 - centre, around.radius.size, around.radius.norm)
        gaps.append(float(pull @ (centre + best - point)))
    return max(gaps)


@every_norm
@pytest.mark.parametrize("seed", range(4))
def test_the_oracle_for_the_best_point_agrees_with_scipy(norm: Norm, seed: int) -> None:
    centre, gradient = rows(digits(1, (6,), seed=seed))[0], rows(gauss(digits(1, (6,)), seed))[0]
    low, high, size = -1 - centre, 1 - centre, 0.7
    if norm is Norm.L2:
        solved = minimize(
            lambda x: -gradient @ x,
            np.zeros(6),
            bounds=list(zip(low, high, strict=True)),
            constraints=[{"type": "ineq", "fun": lambda x: size**2 - x @ x}],
            method="SLSQP",
            options={"ftol": 1e-12, "maxiter": 500},
        )
    else:
        # Upward and downward parts, each with its own room.
        limit = size if norm is Norm.LINF else np.inf
        bounds = [(0, min(limit, room)) for room in (*high, *-low)]
        total = (np.ones((1, 12)), [size]) if norm is Norm.L1 else (None, None)
        solved = linprog(np.concatenate([-gradient, gradient]), *total, bounds=bounds)
    assert gradient @ best_offset(gradient, low, high, size, norm) == pytest.approx(-solved.fun, abs=1e-6)


@every_norm
@few
@given(shape=shapes, share=shares, seed=seeds)
def test_projection_gives_the_nearest_point(norm: Norm, shape: tuple[int, ...], share: float, seed: int) -> None:
    around = ball(digits(3, shape, seed=seed), norm, share)
    wished = around.centre + 2 * gauss(around.centre, seed)
    found = around.project(wished)
    assert excess(around, found) <= 1e-12 * (1 + around.radius.size)
    assert first_order_gap(around, wished, found) <= 1e-8


@pytest.mark.parametrize("norm", [Norm.L1, Norm.L2])
def test_scaling_and_then_clamping_is_not_the_nearest_point(norm: Norm) -> None:
    """The broken twin, a common shortcut: feasible, but too near to the centre wherever the range cuts the ball."""
    around = ball(digits(4), norm, 0.3)
    offset = 2 * gauss(around.centre, 0)
    scale = around.radius.size / torch.tensor([length(row, norm) for row in rows(offset)])
    found = (around.centre + offset * scale.clamp(max=1)[:, None, None, None]).clamp(-1, 1)
    assert excess(around, found) <= 1e-12
    assert first_order_gap(around, around.centre + offset, found) > 0.01


@pytest.mark.parametrize("norm", [Norm.L1, Norm.L2])
@pytest.mark.parametrize("seed", range(4))
def test_projection_agrees_with_a_quadratic_program(norm: Norm, seed: int) -> None:
    around = ball(digits(1, (5,), seed=seed), norm, 0.15)
    wished = around.centre + 2 * gauss(around.centre, seed)
    centre, wish, size = rows(around.centre)[0], rows(wished)[0], around.radius.size
    if norm is Norm.L1:
        # Upward and downward parts, each with its own room.
        into, room = np.hstack([np.eye(5), -np.eye(5)]), [(0, r) for r in (*(1 - centre), *(1 + centre))]
        inside = {"type": "ineq", "fun": lambda x: size - x.sum()}
    else:
        into, room = np.eye(5), list(zip(-1 - centre, 1 - centre, strict=True))
        inside = {"type": "ineq", "fun": lambda x: size**2 - x @ x}
    solved = minimize(
        lambda x: float(((centre + into @ x - wish) ** 2).sum()),
        np.zeros(len(room)),
        bounds=room,
        constraints=[inside],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert np.allclose(rows(around.project(wished))[0], centre + into @ solved.x, atol=1e-4)


@every_norm
@few
@given(shape=shapes, share=shares, seed=seeds)
def test_projecting_twice_is_projecting_once(norm: Norm, shape: tuple[int, ...], share: float, seed: int) -> None:
    around = ball(digits(3, shape, seed=seed), norm, share)
    once = around.project(around.centre + gauss(around.centre, seed))
    assert torch.allclose(around.project(once), once, rtol=0, atol=1e-9)


@every_norm
@few
@given(shape=shapes, share=shares, seed=seeds)
def test_points_of_the_ball_are_their_own_projection(
    norm: Norm, shape: tuple[int, ...], share: float, seed: int
) -> None:
    around = ball(digits(3, shape, seed=seed), norm, share)
    corner = rows(around.centre) + [
        0.99 * best_offset(row, -1 - centre, 1 - centre, around.radius.size, norm)
        for row, centre in zip(rows(gauss(around.centre, seed)), rows(around.centre), strict=True)
    ]
    inside = torch.from_numpy(corner).reshape(around.centre.shape)
    assert torch.allclose(around.project(inside), inside, rtol=0, atol=1e-12)


@every_norm
@few
@given(shape=shapes, share=shares, seed=seeds, spread=st.floats(0, 3))
def test_a_step_of_a_radius_from_the_centre_ends_at_the_best_point(
    norm: Norm, shape: tuple[int, ...], share: float, seed: int, spread: float
) -> None:
    """Also where few values carry most of the gradient."""
    around = ball(digits(3, shape, seed=seed), norm, share)
    gradient = gauss(around.centre, seed) * torch.exp(spread * gauss(around.centre, seed + 1))
    found = around.ascend(around.centre, gradient, around.radius.size)
    assert excess(around, found) <= 1e-12 * (1 + around.radius.size)
    for centre, slope, point in zip(rows(around.centre), rows(gradient), rows(found), strict=True):
        best = best_offset(slope, -1 - centre, 1 - centre, around.radius.size, norm)
        assert slope @ (point - centre) == pytest.approx(slope @ best, rel=1e-8, abs=1e-12)


def best_points(around: Ball, gradient: Tensor) -> Tensor:
    best = [
        centre + best_offset(slope, -1 - centre, 1 - centre, around.radius.size, around.radius.norm)
        for centre, slope in zip(rows(around.centre), rows(gradient), strict=True)
    ]
    return torch.from_numpy(np.array(best)).reshape(around.centre.shape)


@every_norm
@few
@given(shape=shapes, share=shares, step=st.floats(0, 2), seed=seeds)
def test_the_best_point_stays_put(norm: Norm, shape: tuple[int, ...], share: float, step: float, seed: int) -> None:
    """However long the step: otherwise an attack circles around the best point and never gets there."""
    around = ball(digits(3, shape, seed=seed), norm, share)
    gradient = gauss(around.centre, seed)
    best = best_points(around, gradient)
    after = around.ascend(best, gradient, step * around.radius.size)
    gain = ((after - best) * gradient).flatten(1).sum(1)
    assert float(gain.min()) >= -1e-7 * (1 + around.radius.size)


@pytest.mark.parametrize("norm", [Norm.L1, Norm.L2])
def test_a_step_that_stops_at_the_range_before_it_is_projected_leaves_the_best_point(norm: Norm) -> None:
    """The broken twin: projecting then takes from the values that gain most, as from all others."""
    around = ball(digits(4), norm, 0.3)
    gradient = gauss(around.centre, 0)
    best = best_points(around, gradient)
    step = around.geometry.steepest(gradient, around.lower - best, around.upper - best, around.radius.size)
    after = around.project(best + step)
    assert float(((after - best) * gradient).flatten(1).sum(1).min()) < -0.01


@every_norm
@few
@given(shape=shapes, share=shares, seed=seeds, step=st.floats(0, 2))
def test_repeated_steps_gain_every_time(
    norm: Norm, shape: tuple[int, ...], share: float, seed: int, step: float
) -> None:
    around = ball(digits(3, shape, seed=seed), norm, share)
    gradient, points = gauss(around.centre, seed), random_points(around, seeded(seed))
    for _ in range(5):
        ahead = around.ascend(points, gradient, step * around.radius.size)
        assert excess(around, ahead) <= 1e-10 * (1 + around.radius.size)
        assert float(((ahead - points) * gradient).flatten(1).sum(1).min()) >= -1e-8 * (1 + around.radius.size)
        points = ahead


@every_norm
def test_each_example_may_have_a_step_of_its_own(norm: Norm) -> None:
    around = ball(digits(3), norm, 0.4)
    gradient, points = gauss(around.centre, 1), random_points(around, seeded())
    sizes = torch.tensor([0.1, 0.0, 0.3], dtype=torch.float64) * around.radius.size
    together = around.ascend(points, gradient, sizes[:, None, None, None])
    for index in range(3):
        part = slice(index, index + 1)
        alone = around.part(part).ascend(points[part], gradient[part], float(sizes[index]))
        assert torch.allclose(together[part], alone, rtol=0, atol=1e-12)
    assert torch.allclose(together[1], points[1], rtol=0, atol=1e-12)


@every_norm
def test_without_a_gradient_nothing_moves(norm: Norm) -> None:
    around = ball(digits(3), norm, 0.4)
    points = random_points(around, seeded())
    still = around.ascend(points, torch.zeros_like(points), around.radius.size)
    assert torch.allclose(still, points, rtol=0, atol=1e-12)


@every_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@few
@given(shape=shapes, share=shares, seed=seeds)
def test_random_points_are_inside(
    norm: Norm, dtype: torch.dtype, shape: tuple[int, ...], share: float, seed: int
) -> None:
    around = ball(digits(5, shape, seed=seed, dtype=dtype), norm, share)
    points = random_points(around, seeded(seed))
    assert points.dtype == dtype
    assert excess(around, points) <= 1e-6 * (1 + around.radius.size)


def wrong_law(offsets: Floats, size: float, norm: Norm) -> bool:
    """Whether offsets are not uniform in the ball: by their length, and by the size of their first value.

    Both laws are known: length/size is the n-th root of a uniform number, the first value is a Beta number (or its
    root). Each of the two Kolmogorov-Smirnov tests alarms falsely at half of the rate.
    """
    values = offsets.shape[1]
    lengths = np.array([length(offset, norm) for offset in offsets]) / size
    first = np.abs(offsets[:, 0]) / size
    law = {Norm.LINF: beta(1, 1), Norm.L1: beta(1, values), Norm.L2: beta(0.5, (values + 1) / 2)}[norm]
    levels = [lengths**values, law.cdf(first**2 if norm is Norm.L2 else first)]
    ranks = np.arange(len(offsets) + 1) / len(offsets)
    gaps = [max((ranks[1:] - np.sort(u)).max(), (np.sort(u) - ranks[:-1]).max()) for u in levels]
    return bool(max(gaps) > kstwo.isf(FALSE_ALARM / 2, len(offsets)))


@every_norm
def test_random_points_are_spread_uniformly_where_the_range_does_not_cut(norm: Norm) -> None:
    """False alarms: 1e-9."""
    around = Ball.around(torch.zeros(DRAWS, 6), Radius(0.5, norm))
    offsets = rows(random_points(around, seeded()))
    assert not wrong_law(offsets, 0.5, norm)
    # Signs of all values: a fair coin lands outside of six deviations with probability 2e-9.
    assert np.abs((offsets > 0).mean(0) - 0.5).max() < 3 / np.sqrt(DRAWS)


@every_norm
def test_points_on_the_surface_or_in_another_ball_are_caught(norm: Norm) -> None:
    """The broken twins."""
    offsets = rows(random_points(Ball.around(torch.zeros(DRAWS, 6), Radius(0.5, norm)), seeded()))
    lengths = np.array([[length(offset, norm)] for offset in offsets])
    assert wrong_law(0.5 * offsets / lengths, 0.5, norm)
    other = {Norm.LINF: Norm.L2, Norm.L2: Norm.L1, Norm.L1: Norm.LINF}[norm]
    foreign = rows(random_points(Ball.around(torch.zeros(DRAWS, 6), Radius(0.5, other)), seeded()))
    foreign_lengths = np.array([[length(offset, norm)] for offset in foreign])
    assert wrong_law(foreign * lengths / foreign_lengths, 0.5, norm)


@every_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@few
@given(shape=shapes, share=st.floats(0.01, 1), seed=seeds)
def test_settling_leaves_points_alone_that_are_inside(
    norm: Norm, dtype: torch.dtype, shape: tuple[int, ...], share: float, seed: int
) -> None:
    around = ball(digits(3, shape, seed=seed, dtype=dtype), norm, share)
    inside = around.centre + 0.9 * (random_points(around, seeded(seed)) - around.centre)
    assert torch.equal(around.make_feasible(inside), inside)


@every_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (1, 28, 28)])
@pytest.mark.parametrize("size", [0.0, 1e-7, 1e-6, 1e-5, 1e-3, 0.3, 1.7, 5000.0])
def test_feasible_points_are_inside_in_double_precision_and_stay_put(
    norm: Norm, dtype: torch.dtype, shape: tuple[int, ...], size: float
) -> None:
    """Radii that float32 can hardly resolve beside values of 1, too: there rounding is as large as the offset."""
    around = Ball.around(digits(4, shape, dtype=dtype), Radius(size, norm))
    for seed in range(3):
        rounded = around.ascend(around.centre, gauss(around.centre, seed), size) + 1e-7 * gauss(around.centre, seed)
        settled = around.make_feasible(rounded.clamp(-1, 1))
        assert excess(around, settled) <= ROUNDING
        if size >= 1e-3:
            assert float((settled - rounded).abs().max()) <= 1e-6 * (2 + size) + max(0.0, excess(around, rounded))


@pytest.mark.parametrize("size", [0.0, 1e-8, 1e-7, 1e-6, 0.01, 0.1, 0.2, 1 / 3, 8 / 255, 0.5, 1.7])
def test_a_first_correction_in_single_precision_changes_no_bit(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Correcting in double precision alone is the oracle."""
    centre = digits(20, (1, 9, 9), dtype=torch.float32)
    # Zeros and values far below the radius, whose differences are not exact in single precision.
    centre[5:10] *= 10.0 ** -torch.arange(1, 6).reshape(-1, 1, 1, 1)
    centre[10, 0, :3] = 0.0
    around = Ball.around(centre, Radius(size))
    ends = [around.ascend(centre, gauss(centre, seed), share * size) for seed, share in enumerate((1.0, 1.0, 0.7, 3.0))]
    moved = [end + 1e-7 * gauss(centre, 9) for end in ends]
    corrected = [around.make_feasible(points) for points in ends + moved]
    monkeypatch.setattr(MaxNorm, "round_inwards", Geometry.round_inwards)
    assert all(torch.equal(around.make_feasible(a), b) for a, b in zip(ends + moved, corrected, strict=True))


@every_norm
def test_points_that_are_are_nan_are_refused(norm: Norm) -> None:
    around = ball(digits(3, dtype=torch.float32), norm, 0.2)
    points = around.centre.clone()
    points[1, 0, 0, 0] = torch.nan
    with pytest.raises(ModelError, match="NaN"):
        around.make_feasible(points)


@every_norm
def test_a_radius_of_nothing_is_the_centre_and_a_wide_one_the_whole_range(norm: Norm) -> None:
    centre = digits(4, dtype=torch.float32)
    wished, gradient = centre + gauss(centre, 0), gauss(centre, 1)
    nothing, everything = ball(centre, norm, 0.0), ball(centre, norm, 1.0)
    for found in (nothing.project(wished), nothing.ascend(centre, gradient, 0.0), random_points(nothing, seeded())):
        assert torch.equal(nothing.make_feasible(found), centre)
    assert torch.allclose(everything.project(wished), wished.clamp(-1, 1), atol=1e-6)
    best = everything.ascend(centre, gradient, everything.radius.size)
    assert torch.allclose(best, gradient.sign(), atol=1e-6)


@every_norm
@few
@given(shape=shapes, share=st.floats(0, 0.2), seed=seeds)
def test_a_ball_over_the_unit_range_is_the_same_ball(
    norm: Norm, shape: tuple[int, ...], share: float, seed: int
) -> None:
    paper = ball(digits(3, shape, seed=seed), norm, share)
    unit = Ball.around((paper.centre + 1) / 2, paper.radius.to(UNIT_RANGE))
    wished = paper.centre + gauss(paper.centre, seed)
    assert torch.allclose(2 * unit.project((wished + 1) / 2) - 1, paper.project(wished), rtol=0, atol=1e-9)


@every_norm
@pytest.mark.parametrize("which", [slice(1, 3), torch.tensor([False, True, True, False]), torch.tensor([1, 2])])
def test_parts_of_a_shifted_ball_are_balls_around_parts(norm: Norm, which: slice | Tensor) -> None:
    inputs = digits(4)
    for shift in (torch.full((1, 4, 4), 3.0).double(), gauss(inputs, 0)):
        around = Ball.around(inputs + shift, Radius(0.5, norm), shift=shift)
        wished = around.centre + gauss(inputs, 1)
        assert torch.allclose(around.part(which).project(wished[which]), around.project(wished)[which], atol=1e-12)
        assert float((around.project(wished) - shift).abs().max()) <= 1 + 1e-12
