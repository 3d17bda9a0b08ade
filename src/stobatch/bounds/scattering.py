"""Norms of scattering: its stages as matrices, Lipschitz constants of its features, and their rounding errors.

Everything is read off the deployed filters, strides and padding, one stage at a time. Theorem and proof:
docs/guarantees/scattering.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod, sqrt
from typing import NamedTuple, Self

import torch
from torch import Tensor

from stobatch.bounds.linear import FLOAT32_UNIT, gamma
from stobatch.errors import ModelError
from stobatch.models.scattering import Scattering
from stobatch.models.spectrum import largest_eigenvalue

MAX_PIXELS = 1024
"""Largest number of pixels: a stage's matrix has a row for each of them."""
SLACK = 1 + 1e-9
"""Factor on squared norms that covers the rounding of sums and eigenvalues in float64: thousands of times 2⁻⁵³."""
_UNDERFLOW = 2.0**-50
"""More than underflow in float32 can change in a stage."""
_MODULUS = 8
"""Units in the last place within which the modulus of a complex number is computed."""
_WEIGHTS = ((1.0, 1.0), (1.25, 1.0), (1.5, 1.0), (2.0, 1.0), (1.0, 1.25), (1.5, 1.25), (2.0, 1.5))
"""Weights of the finest wavelets and of all others relative to the means. Every pair gives a bound; the smallest
counts."""


@dataclass(frozen=True)
class Stage:
    """A deployed linear stage as a float64 matrix A, transposed: pixels of the input x outputs."""

    rows: Tensor
    gram: Tensor
    """AᵀA, of which the largest eigenvalue is ‖A‖₂²."""
    absolute_norm: float
    """A bound on ‖|A|‖₂."""
    fan_in: int

    @classmethod
    @torch.no_grad()
    def of(cls, apply: Callable[[Tensor], Tensor], shape: tuple[int, int], fan_in: int) -> Self:
        """Return the matrix of a linear map of one-channel images: its values at the unit images."""
        rows = apply(torch.eye(prod(shape), dtype=torch.float64).view(-1, 1, *shape)).flatten(1)
        absolute = rows.abs()
        # Schur's test: ‖|A|‖₂² is at most the largest row sum times the largest column sum.
        return cls(rows, rows @ rows.T, sqrt(float(absolute.sum(0).max() * absolute.sum(1).max())), fan_in)


def squared_norm(*weighted: tuple[float, Stage]) -> float:
    """Return max Σ c‖Ax‖² over ‖x‖ = 1 for stages A with weights c: the largest eigenvalue of Σ c AᵀA."""
    gram = torch.stack([weight * stage.gram for weight, stage in weighted]).sum(0)
    return largest_eigenvalue(gram) * SLACK


class Response(NamedTuple):
    """Complex values of wavelets of one scale: ... x 2 x angles x outputs, and their moduli: ... x angles x outputs."""

    parts: Tensor
    size: Tensor

    def take(self, rows: Tensor) -> Response:
        """Return the responses of some inputs."""
        return Response(self.parts[rows], self.size[rows])


class Responses(NamedTuple):
    """Images in turned colours, and the wavelets of each scale, inputs x channels x ...; the last are of moduli."""

    channels: Tensor
    scales: tuple[Response, ...]
    second: Response | None

    def take(self, rows: Tensor) -> Responses:
        """Return the responses of some inputs."""
        scales = tuple(one.take(rows) for one in self.scales)
        return Responses(self.channels[rows], scales, self.second and self.second.take(rows))


class ScatteringLipschitz:
    """Lipschitz constants of scattering, and its rounding errors.

    **Guarantee.** For all images x and y and each row w of weights of the features,
    |w·(S(x) - S(y))| <= `of(w)`·‖x - y‖₂, in exact arithmetic; and ‖M(x) - M(y)‖₂ <= `maps`·‖x - y‖₂ for the maps M
    before gains. The deployed float32 pass is within `rounding`·(‖x‖₂ + 1) of M(x).
    """

    def __init__(self, front: Scattering) -> None:
        channels, height, width = front.input_shape
        if height * width > MAX_PIXELS:
            raise ModelError(
                f"images of {height} x {width} pixels are too large to compute the norm of their scattering.",
                remedy=f"Use images of at most {MAX_PIXELS} pixels.",
            )
        front = deepcopy(front).cpu().double()
        whole, half = (height, width), (height // 2, width // 2)
        self.low = Stage.of(front.means, whole, front.low_fine.numel())
        self.leaf = Stage.of(front.means, half, front.low_coarse.numel())
        self.scales = tuple(_wavelet_stage(front, scale, whole) for scale in range(front.num_scales))
        self.singles = tuple(stage.rows.float() for stage in self.scales)
        """Matrices of the scales in float32, for products that may miss something."""
        self.front, self.colour_norm = front, float(torch.linalg.matrix_norm(front.colours, 2)) * SLACK
        self.roots = {pair: squared_norm((1.0, self.low), *self._weighted(pair)) for pair in _WEIGHTS}
        coarse = self.scales[1:2] if front.orders == 2 else ()
        self.nodes = {
            weight: squared_norm((1.0, self.low), *((weight, stage) for stage in coarse)) for weight, _ in _WEIGHTS
        }
        # Each stage passes some maps on unchanged, so its norm is at least 1.
        squares = (self.roots[1.0, 1.0], self.nodes[1.0], squared_norm((1.0, self.leaf)))
        norms = [sqrt(max(1.0, square)) for square in squares]
        self.maps = self.colour_norm * prod(norms)
        stages = ((self.low, *self.scales), (self.low, *coarse), (self.leaf,))
        self.rounding = self._rounding(channels, norms, stages)

    def _weighted(self, pair: tuple[float, float]) -> list[tuple[float, Stage]]:
        return [(pair[min(scale, 1)], stage) for scale, stage in enumerate(self.scales)]

    def of(self, functionals: Tensor) -> Tensor:
        """Return the Lipschitz constant of each row of weights of the features, in float64.

        By Cauchy-Schwarz from the leaves to the root, as in docs/guarantees/scattering.md: with b the norms of the
        weights of a node's children and c > 0, ‖v‖·‖φd‖ + Σ bᵢ·‖ψᵢd‖ <= √(‖v‖² + Σ bᵢ²/c) · √(‖φd‖² + c Σ‖ψᵢd‖²).
        """
        first, scales, second = self.by_kind(functionals)

        def squared(part: Tensor) -> Tensor:
            return part.square().flatten(1).sum(1)

        children = [squared(self.of_moduli(part, scale)) for scale, part in enumerate(scales)]
        if second is not None:
            inner = squared(second @ self.leaf.rows.T)
            by_weight = [norm * (squared(scales[0]) + inner / weight) for weight, norm in self.nodes.items()]
            children[0] = torch.stack(by_weight).amin(0)
        root = [
            norm * (squared(first) + sum(child / pair[min(scale, 1)] for scale, child in enumerate(children)))
            for pair, norm in self.roots.items()
        ]
        return self.colour_norm * (torch.stack(root).amin(0) * SLACK).sqrt()

    def by_kind(self, functionals: Tensor) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Return weights of the features as weights of the maps of order 0, of each scale and of order 2, in float64:
        rows x channels x paths x pixels.
        """
        front = self.front
        maps = front.lifted(functionals.cpu().double()).flatten(2)
        parts = torch.split(maps.view(len(maps), -1, front.paths, maps.shape[-1]), front.sizes, dim=2)
        return parts[0], list(parts[1 : 1 + front.num_scales]), parts[-1] if front.orders == 2 else None

    def of_moduli(self, weights: Tensor, scale: int) -> Tensor:
        """Return weights of the maps of a scale as weights of the moduli that they average, where it reaches."""
        weights = weights[:, self.front.reach(scale)]
        return weights @ (self.low, self.leaf)[scale].rows.T if scale < 2 else weights

    def responses(self, images: Tensor) -> Responses:
        """Return what images give before their last means, in float64, by the stages' matrices."""
        front = self.front
        channels = torch.einsum("dc,nchw->ndhw", front.colours, images.cpu().double()).flatten(2)
        scales = tuple(
            self._response(channels[:, front.reach(scale)], stage) for scale, stage in enumerate(self.scales)
        )
        second = self._response(scales[0].size, self.scales[1]) if front.orders == 2 else None
        return Responses(channels, scales, second)

    def maps_of(self, responses: Responses) -> Tensor:
        """Return the maps before gains in float64, by the stages' matrices: what the filters should compute."""
        channels, scales, second = responses
        front, found = self.front, [(channels @ self.low.rows).unsqueeze(2)]
        for scale, response in enumerate(scales):
            means = response.size @ (self.low, self.leaf)[scale].rows if scale < 2 else response.size
            found.append(front.by_colour(means.flatten(0, 1), front.reach(scale)).flatten(3))
        if second is not None:
            found.append(second.size.flatten(2, 3) @ self.leaf.rows)
        return torch.cat(found, 2).reshape(len(channels), *front.map_shape)

    def _response(self, values: Tensor, stage: Stage) -> Response:
        parts = values @ stage.rows
        parts = parts.view(*parts.shape[:-1], 2, self.front.angles, -1)
        return Response(parts, parts.square().sum(-3).sqrt())

    def _rounding(self, channels: int, norms: list[float], stages: Sequence[Sequence[Stage]]) -> float:
        """Return e with ‖M̂(x) - M(x)‖₂ <= e(‖x‖₂ + 1): each stage multiplies the error by its norm and adds its own."""
        error, size = gamma(FLOAT32_UNIT, channels + 2) * sqrt(channels) * self.colour_norm, self.colour_norm
        for norm, parts in zip(norms, stages, strict=True):
            stage_error = sqrt(sum((gamma(FLOAT32_UNIT, part.fan_in + 2) * part.absolute_norm) ** 2 for part in parts))
            stage_error += gamma(FLOAT32_UNIT, _MODULUS) * (norm + stage_error)
            error = norm * error + stage_error * (size + error) + _UNDERFLOW
            size *= norm
        return error * SLACK


def _wavelet_stage(front: Scattering, scale: int, sides: tuple[int, int]) -> Stage:
    filters = front.wavelets(scale)
    fan_in = prod(sides) if filters.ndim == 2 else filters[0].numel()
    return Stage.of(lambda maps: front.filtered(maps, filters), sides, fan_in)
