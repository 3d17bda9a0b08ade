"""Lower bounds of a margin behind scattering near one input: tangents of its moduli, and parabolas where it bends down.

A Lipschitz constant holds for all inputs, so it is that of the worst one. Near a given input the margin is almost its
tangent, whose slope is less than half of that constant. What a margin can lose against its tangent comes from moduli
with negative weights alone, and a parabola bounds it. Theorem and proof: docs/guarantees/scattering.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from stobatch.bounds.scattering import SLACK, Response, Responses, ScatteringLipschitz, squared_norm

_SECOND = 2.0
"""Curvature that is allowed to moduli of order 2, relative to others: they are smaller, so they bend more."""
_NEAR = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 8.0)
"""Distances at which a parabola is close, relative to the given one."""
_TINY = 1e-100
"""Added to moduli that are divided by."""


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
        return 2 * start / (self.slope + (self.slope.square() + 4 * self.bend * start).sqrt())


class ScatteringTangents:
    """Lower bounds of functionals of the features near given images.

    **Guarantee.** For each row w of weights of the features and its image x, `below` returns parabolas, of which each
    one p has w·(S(y) - S(x)) >= p(‖y - x‖₂) for all images y, in exact arithmetic, whatever the curvature and `near`.
    """

    def __init__(self, scattering: ScatteringLipschitz) -> None:
        self.scattering = scattering
        # Moduli of order 2 are functions of the fine ones, which move at most as far as the fine wavelets.
        fine = 1 + _SECOND * squared_norm((1.0, scattering.coarse))
        self.levels, self.directions = torch.linalg.eigh(fine * scattering.fine.gram + scattering.coarse.gram)
        self.levels += (SLACK - 1) * self.levels[-1]

    def below(self, functionals: Tensor, responses: Responses, curvature: Tensor, near: Tensor) -> Iterator[Parabola]:
        """Yield parabolas, each with an entry for each row.

        More curvature costs at a distance, less of it at once. Parabolas are best at distances about `near`.
        """
        scattering, angles = self.scattering, self.scattering.front.angles
        low, leaf, rows = scattering.low.rows.T, scattering.leaf.rows.T, len(functionals)
        maps = scattering.front.lifted(functionals).flatten(2)
        by_path = maps.view(rows, -1, scattering.front.paths, maps.shape[-1])
        first, fine, coarse, second = torch.split(by_path, [1, angles, angles, angles**2], dim=2)
        # Transposed means: weights of the features become weights of the moduli, rows x channels x maps x outputs.
        second_weights = (second @ leaf).reshape(rows, -1, angles, angles, leaf.shape[1])
        second_slopes, second_loss = _lines(second_weights, responses.second, _SECOND * curvature)
        # What lines of order 2 ask of the fine moduli adds to the weights that these have themselves.
        fine_weights = fine @ low + second_slopes.flatten(-3) @ scattering.coarse.rows.T
        fine_slopes, fine_loss = _lines(fine_weights, responses.fine, curvature)
        coarse_slopes, coarse_loss = _lines(coarse @ leaf, responses.coarse, curvature)
        gradient = (first @ low).squeeze(2)
        gradient = gradient + fine_slopes.flatten(-3) @ scattering.fine.rows.T
        gradient = gradient + coarse_slopes.flatten(-3) @ scattering.coarse.rows.T
        # The functional changes by at least -loss + g·d - dᵀCd, with C the curvature times a matrix of known levels.
        # For each u above them, g·d - dᵀCd >= -gᵀ(u - C)⁻¹g/4 - u‖d‖²: complete the square.
        energy = (gradient @ self.directions).square().sum(1) * SLACK
        loss = (second_loss + fine_loss + coarse_loss) * SLACK
        # Float64 misses far less of the gradient than this share of the weights, however much of it cancels.
        missed = (SLACK - 1) * maps.flatten(1).norm(dim=1) * scattering.colour_norm
        levels, size = curvature[:, None] * self.levels, energy.sum(1).sqrt() + _TINY
        for times in _NEAR:
            bend = levels[:, -1] + size / (2 * times * near)
            square = (energy / (4 * (bend[:, None] - levels))).sum(1) * SLACK
            yield Parabola(-loss - square, missed, bend * scattering.colour_norm**2 * SLACK)


def _lines(weights: Tensor, response: Response, curvature: Tensor) -> tuple[Tensor, Tensor]:
    """Return slopes s, with real and imaginary parts, and losses, one a row: Σ w|a + e| >= Σ w|a| - loss + s·e - c‖e‖².

    w >= 0: |a + e| >= Re(conj(a)(a + e))/|a|, the tangent, which loses nothing.
    w < 0: |a + e| <= |a + e|²/2t + t/2 for each t > 0. At e = 0 that is (t - |a|)²/2t too much, its slope is a/t, and
    it bends by |e|²/2t; t is |a|, or what makes |w|/2t the curvature c where |a| is less.
    """
    limit = curvature.view(-1, *[1] * (weights.ndim - 1))
    size, falling = response.size, weights.clamp(max=0).abs()
    touching = torch.maximum(size, falling / (2 * limit)) + _TINY
    losses = falling * (touching - size).square() / (2 * touching)
    return (weights / touching).unsqueeze(-3) * response.parts, losses.flatten(1).sum(1)
