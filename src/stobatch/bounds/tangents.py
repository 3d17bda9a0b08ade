"""Lower bounds of a margin behind scattering near one input: tangents of its moduli, and how much they bend down.

A Lipschitz constant holds for all inputs, so it is that of the worst one. Near a given input the margin is almost its
tangent, whose slope is less than half of that constant. What a margin can lose against its tangent comes from moduli
with negative weights alone, and a quadratic form of the perturbation bounds it. Bounds of moduli may touch them at any
image; the one that a first bound finds to be worst is a good place. Theorem and proof: docs/guarantees/scattering.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Self

import torch
from torch import Tensor

from stobatch.bounds.linear import FLOAT32_UNIT, gamma
from stobatch.bounds.scattering import SLACK, Response, Responses, ScatteringLipschitz, squared_norm
from stobatch.types import Norm

_ABOVE = 1.02
"""How far a diagonal lies above the form that is taken off it, relative to the form's largest value."""
_STEPS = 4
"""Steps of conjugate gradients. Twice as many prove a thousandth more."""
_POWER_STEPS = 20
_FLOORS = (0.8, 0.9, 1.05, 1.3)
"""Least entries of a diagonal, in units of the form's largest value as iterations find it, that are tried in turn:
entries above the others make up for some that are below that value."""
_GAP = 0.01
"""What is asked of the least eigenvalue, in the same units."""
_FLOAT64_UNIT = 2.0**-53
_TINY = 1e-100
"""Added to what is divided by."""
_CANCELLED = 1e-12
"""More than float64 misses of what a tangent loses, which is a difference, relative to the modulus."""
_UNDERFLOW = 1e-30
"""More than underflow in float32 can change in a matrix."""


class Parabola(NamedTuple):
    """A function of the distance r: start - slope·r - bend·r², one for each row."""

    start: Tensor
    slope: Tensor
    bend: Tensor

    def root(self) -> Tensor:
        """Return the distance up to which it is positive; 0 where it starts below 0.

        >>> one, zero = torch.ones(1), torch.zeros(1)
        >>> Parabola(6 * one, one, one).root().item(), Parabola(3 * one, 2 * one, zero).root().item()
        (2.0, 1.5)
        """
        start = self.start.clamp(min=0)
        return 2 * start / (self.slope + (self.slope.square() + 4 * self.bend * start).sqrt() + _TINY)

    def add(self, lead: Tensor, slope: Tensor) -> Parabola:
        """Return the parabola below a margin that starts with this lead and loses this slope besides."""
        return Parabola(lead + self.start, slope + self.slope, self.bend)


class Square(NamedTuple):
    """A parabola from a completed square, and about where the margin is least in the ball that it was completed for."""

    parabola: Parabola
    worst: Tensor


@dataclass(frozen=True)
class Tangents:
    """Functionals w of the features near their images x, each with -loss + g·δ - δᵀQδ <= w·(S(x + δ) - S(x)).

    g is the gradient, off by at most `missed` in l2; Q is given by the curvature of each modulus, and no form is above
    `level`.
    """

    scattering: ScatteringLipschitz
    loss: Tensor
    gradient: Tensor
    missed: Tensor
    bends: tuple[Tensor, ...]
    level: Tensor
    float64: float
    """More than float64 misses of a product with D - Q, relative to norms: docs/guarantees/scattering.md."""

    def parabola(self, norm: Norm) -> Parabola:
        """Return a lower bound at every distance in this norm: the tangent, with the largest bend in each direction."""
        size = self.gradient.abs().sum((1, 2)) if norm is Norm.LINF else self.gradient.flatten(1).norm(dim=1)
        return self._parabola(-self.loss, size, self.level * self._stretch(norm) ** 2, norm)

    def completed(self, near: Tensor, norm: Norm) -> Square:
        """Return a lower bound that is close at distances about `near`, by completing the square.

        For each diagonal D above Q, g·δ - δᵀQδ = g·δ + δᵀ(D - Q)δ - δᵀDδ >= -gᵀ(D - Q)⁻¹g/4 - δᵀDδ. Without Q the
        best D is |g|/2r at each value in an l-infinity ball of radius r, and everywhere ‖g‖₂/2r in an l2 ball.
        """
        diagonal = self._diagonal(_ABOVE * self.level, near, norm)
        gap, solution = (_ABOVE - 1) * self.level, self._solved(diagonal)
        return self._completed(diagonal, solution, self._inverse_form(diagonal, solution, gap), near, norm)

    def factored(self, near: Tensor, norm: Norm) -> Square:
        """Return the same with smaller diagonals, where a Cholesky factor proves that they are above Q.

        No form is above `level`, but Q is mostly far below. It costs an n x n matrix and its factor for each row. Where
        no diagonal is proved, the parabola is negative.
        """
        found = [self.take(torch.tensor([row]))._factored(near[row : row + 1], norm) for row in range(len(near))]
        diagonals, solutions, bounds = map(torch.cat, zip(*found, strict=True))
        return self._completed(diagonals, solutions, bounds, near, norm)

    def _factored(self, near: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
        """Return a diagonal D above Q, about (D - Q)⁻¹g, and at least gᵀ(D - Q)⁻¹g; infinity if none is proved. Of one
        row.
        """
        matrix, missed = self._matrix()
        gradient = vector = self.gradient.flatten()
        for _ in range(_POWER_STEPS):
            before, vector = vector, matrix @ vector
        largest = vector.norm() / (before.norm() + _TINY)
        gap = _GAP * largest + missed
        for floor in _FLOORS:
            diagonal = self._diagonal(floor * largest.expand(1), near, norm)
            _, failed = torch.linalg.cholesky_ex(torch.diag(diagonal.flatten() - gap) - matrix)
            if not bool(failed):
                factor, _ = torch.linalg.cholesky_ex(torch.diag(diagonal.flatten()) - matrix)
                solution = torch.cholesky_solve(gradient[:, None], factor)
                # No eigenvalue of an n x n matrix B that has a factor is below -(n + 1)u·tr B (Rump, 2006).
                proved = gap - missed - (len(gradient) + 2) * _FLOAT64_UNIT * diagonal.sum()
                solution = solution.view_as(diagonal)
                return diagonal, solution, self._inverse_form(diagonal, solution, proved)
        return diagonal, self.gradient, torch.full_like(near, torch.inf)

    def _matrix(self) -> tuple[Tensor, Tensor]:
        """Return Q of one row, from products in float32, and a bound on the norm of what these miss."""
        front, pixels = self.scattering.front, self.gradient.shape[-1]
        by_colour = torch.zeros(len(front.colours), pixels, pixels)
        magnitudes, most = torch.zeros(len(front.colours), pixels, dtype=torch.float64), 0
        for scale, (stage, bends) in enumerate(zip(self.scattering.scales, self.bends, strict=True)):
            rows, absolute = self.scattering.singles[scale], stage.rows.abs()
            outputs, most = absolute.sum(0), max(most, stage.rows.shape[1])
            for place, colour in enumerate(front.reach(scale)):
                weights = bends[0, place].flatten().repeat(2)
                by_colour[colour] += (rows * weights.float()) @ rows.T
                magnitudes[colour] += absolute @ (weights * outputs)
        matrix = torch.einsum("dc,dpq,de->cpeq", front.colours, by_colour.double(), front.colours)
        # Each value is off by this share of a sum of magnitudes; the norm of a matrix is at most its largest row sum.
        share = gamma(FLOAT32_UNIT, most + len(self.bends) + 8)
        colours = front.colours.abs()
        by_pixel = torch.einsum("dc,dp->cp", colours * colours.sum(1, keepdim=True), magnitudes)
        missed = share * by_pixel.max() * SLACK + self.float64 * self.level[0] + _UNDERFLOW
        return matrix.reshape(self.gradient[0].numel(), -1), missed

    def _diagonal(self, least: Tensor, near: Tensor, norm: Norm) -> Tensor:
        """Return diagonals with these least entries that prove much at these distances."""
        bends = _dot(self.gradient, self._form(self.gradient))
        along = bends / (_dot(self.gradient, self.gradient) + _TINY)
        size = self.gradient.abs() if norm is Norm.LINF else self.gradient.flatten(1).norm(dim=1)[:, None, None]
        found = torch.maximum(size / (2 * near[:, None, None]) + along[:, None, None], least[:, None, None])
        return found.expand_as(self.gradient)

    def _completed(self, diagonal: Tensor, solution: Tensor, square: Tensor, near: Tensor, norm: Norm) -> Square:
        """Return the parabola of a diagonal D above Q and of at least gᵀ(D - Q)⁻¹g."""
        bend = diagonal.sum((1, 2)) if norm is Norm.LINF else diagonal.amax((1, 2))
        parabola = self._parabola(-self.loss - square / 4 * SLACK, torch.zeros_like(bend), bend, norm)
        worst, radius = -solution / 2, near[:, None, None]
        if norm is Norm.LINF:
            return Square(parabola, worst.minimum(radius).maximum(-radius))
        return Square(parabola, worst * (radius / (worst.flatten(1).norm(dim=1)[:, None, None] + _TINY)))

    def take(self, rows: Tensor) -> Self:
        """Return the tangents of some rows."""
        bends = tuple(part[rows] for part in self.bends)
        parts = (self.loss[rows], self.gradient[rows], self.missed[rows])
        return type(self)(self.scattering, *parts, bends, self.level[rows], self.float64)

    def _parabola(self, start: Tensor, slope: Tensor, bend: Tensor, norm: Norm) -> Parabola:
        return Parabola(start, slope * SLACK + self.missed * self._stretch(norm), bend * SLACK)

    def _stretch(self, norm: Norm) -> float:
        return l2_stretch(norm, self.gradient.shape[1:])

    def _form(self, moves: Tensor) -> Tensor:
        """Return Qδ of each row: through turned colours and wavelets, weighted by curvatures, and back."""
        front, colours = self.scattering.front, self.scattering.front.colours
        channels = torch.einsum("dc,ncp->ndp", colours, moves)
        turned = torch.zeros_like(channels)
        for scale, (stage, bends) in enumerate(zip(self.scattering.scales, self.bends, strict=True)):
            reach = front.reach(scale)
            parts = channels[:, reach] @ stage.rows
            parts = parts.view(len(bends), len(reach), 2, *bends.shape[2:]) * bends.unsqueeze(2)
            turned[:, reach] += parts.flatten(2) @ stage.rows.T
        return torch.einsum("dc,ndp->ncp", colours, turned)

    def _solved(self, diagonal: Tensor) -> Tensor:
        """Return x with (D - Q)x ≈ g of each row, by conjugate gradients."""
        found, residual = torch.zeros_like(self.gradient), self.gradient
        step = residual / diagonal
        size = _dot(residual, step)
        for _ in range(_STEPS):
            applied = diagonal * step - self._form(step)
            share = (size / (_dot(step, applied) + _TINY))[:, None, None]
            found, residual = found + share * step, residual - share * applied
            before, size = size, _dot(residual, residual / diagonal)
            step = residual / diagonal + (size / (before + _TINY))[:, None, None] * step
        return found

    def _inverse_form(self, diagonal: Tensor, found: Tensor, gap: Tensor) -> Tensor:
        """Return at least gᵀA⁻¹g of each row, A = D - Q, whose eigenvalues are at least `gap`, given any x.

        With the residual ρ = g - Ax, gᵀA⁻¹g = gᵀx + xᵀρ + ρᵀA⁻¹ρ <= gᵀx + xᵀρ + ‖ρ‖²/gap, which is close if Ax ≈ g.
        """
        residual = self.gradient - diagonal * found + self._form(found)
        length, highest = found.flatten(1).norm(dim=1), diagonal.amax((1, 2)) + self.level
        off = self.float64 * (highest * length + self.gradient.flatten(1).norm(dim=1))
        left = residual.flatten(1).norm(dim=1) + off
        bound: Tensor = _dot(self.gradient + residual, found) + off * length + left.square() / gap
        return bound


class ScatteringTangents:
    """Lower bounds of functionals of the features near given images.

    **Guarantee.** For each row w of weights of the features and its image x, `of` returns tangents, of whose parabolas
    p in a norm each one has w·(S(y) - S(x)) >= p(‖y - x‖) for all images y, in exact arithmetic, whatever the
    curvature, `touching` and `near`.
    """

    def __init__(self, scattering: ScatteringLipschitz) -> None:
        self.scattering = scattering
        finest, *others = scattering.scales
        # Moduli of order 2 are functions of the finest ones, which move at most as far as the finest wavelets.
        self.of_second = squared_norm((1.0, others[0])) if scattering.front.orders == 2 else 0.0
        largest = squared_norm((1 + self.of_second, finest), *((1.0, stage) for stage in others))
        self.level = scattering.colour_norm**2 * largest
        # Sums over the outputs of a stage, of sums over pixels, of sums over colours, and back.
        products = max(stage.rows.shape[1] for stage in scattering.scales) + finest.rows.shape[0] + 16
        colours = float(torch.linalg.matrix_norm(scattering.front.colours.abs(), 2))
        absolute = (1 + self.of_second) * finest.absolute_norm**2 + sum(stage.absolute_norm**2 for stage in others)
        self.float64 = gamma(_FLOAT64_UNIT, products) * (1 + colours**2 * absolute / self.level) * SLACK

    def of(
        self, functionals: Tensor, responses: Responses, curvature: Tensor, touching: Tensor | None = None
    ) -> Tangents:
        """Return tangents, an entry for each row. More curvature costs at a distance, less of it at once.

        `touching` are moves from the images to where bounds touch moduli; without them that is at the images.
        """
        scattering, front = self.scattering, self.scattering.front
        first, scales, second = scattering.by_kind(functionals)
        # Transposed means: weights of the features become weights of the moduli, rows x channels x maps x outputs.
        weights = [scattering.of_moduli(part, scale) for scale, part in enumerate(scales)]
        loss, gradient = torch.zeros_like(curvature), (first @ scattering.low.rows.T).squeeze(2)
        # Squares of weights and of slopes, which are steeper where falling moduli are touched far from the image.
        size = sum(map(_squares, (*scales, *([] if second is None else [second]))), _squares(first))
        if second is not None and responses.second is not None:
            second_size = responses.second.size.shape[-1]
            by_parent = (second @ scattering.leaf.rows.T).view(len(second), -1, front.angles, front.angles, second_size)
            lines = _lines(by_parent, responses.second, curvature)
            # What lines of order 2 ask of the finest moduli adds to the weights that these have themselves.
            weights[0] = weights[0] + lines.slopes.flatten(-3) @ scattering.scales[1].rows.T
            loss = loss + lines.loss
        bends = []
        turned = None if touching is None else torch.einsum("dc,ncp->ndp", front.colours, touching)
        for scale, (weight, response) in enumerate(zip(weights, responses.scales, strict=True)):
            shift = None if turned is None else turned[:, front.reach(scale)] @ scattering.scales[scale].rows
            lines = _lines(weight, response, curvature, shift)
            loss, size = loss + lines.loss, size + _squares(lines.slopes)
            gradient[:, front.reach(scale)] += lines.slopes.flatten(-3) @ scattering.scales[scale].rows.T
            bends.append(lines.bends)
        bends[0] = bends[0] + self.of_second * curvature[:, None, None, None]
        return Tangents(
            scattering,
            loss=loss * SLACK,
            gradient=torch.einsum("dc,ndp->ncp", front.colours, gradient),
            # Float64 misses far less of the gradient than this share, however much of it cancels.
            missed=(SLACK - 1) * size.sqrt() * scattering.colour_norm,
            bends=tuple(bends),
            level=curvature * self.level,
            float64=self.float64,
        )


def l2_stretch(norm: Norm, shape: tuple[int, ...]) -> float:
    """Return how far a ball of radius 1 in this norm reaches in l2, for inputs of this shape."""
    return prod(shape) ** 0.5 if norm is Norm.LINF else 1.0


class _Lines(NamedTuple):
    slopes: Tensor
    bends: Tensor
    loss: Tensor


def _lines(weights: Tensor, response: Response, curvature: Tensor, shift: Tensor | None = None) -> _Lines:
    """Return slopes s, with real and imaginary parts, bends b up to the curvature, and losses, one a row:
    Σ w|a + e| >= Σ w|a| - loss + s·e - Σ b|e|².

    Bounds touch at e = shift, or at 0: let z be a + e there.
    w >= 0: |a + e| >= Re(conj(z)(a + e))/|z|, the tangent at z, which does not bend, and loses nothing at z.
    w < 0: |a + e| <= |a + e|²/2t + t/2 for each t > 0. At e = 0 that is (t - |a|)²/2t too much, its slope is a/t, and
    it bends by |e|²/2t; t is |z|, or what makes |w|/2t the curvature where |z| is less.
    """
    limit = curvature.view(-1, *[1] * (weights.ndim - 1))
    parts, size, touched, length = response.parts, response.size, response.parts, response.size
    if shift is not None:
        touched = parts + shift.view_as(parts)
        length = touched.square().sum(-3).sqrt()
    rising, falling = weights.clamp(min=0), weights.clamp(max=0).abs()
    along = touched / (length + _TINY).unsqueeze(-3)
    touching = torch.maximum(length, falling / (2 * limit)) + _TINY
    losses = falling * (touching - size).square() / (2 * touching)
    losses = losses + rising * (size * (1 + _CANCELLED) - (along * parts).sum(-3))
    slopes = rising.unsqueeze(-3) * along - (falling / touching).unsqueeze(-3) * parts
    return _Lines(slopes, falling / (2 * touching), losses.flatten(1).sum(1))


def _squares(parts: Tensor) -> Tensor:
    return parts.square().flatten(1).sum(1)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).flatten(1).sum(1)
