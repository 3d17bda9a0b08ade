"""Deterministic l2 certificates of a linear head behind wavelet scattering: a lead, over how fast leads can fall.

Scores are linear in the features, and features move by a bounded multiple of what the picture moves. The multiple is
computed for the very filters, strides and margins that are deployed, one stage at a time, from the stage's own matrix;
what float32 rounds is allowed for (docs/guarantees/scattering.md).
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from math import prod, sqrt
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.bounds.arithmetic import require_plain_float32
from stobatch.bounds.certifier import BoundCertificates
from stobatch.bounds.linear import FLOAT32_UNIT, gamma
from stobatch.errors import DataError, ModelError
from stobatch.models.scattering import Scattering, is_linear_behind
from stobatch.models.spectrum import largest_eigenvalue
from stobatch.types import PAPER_RANGE, Norm, Radius, Status
from stobatch.verifier import CertificateKind, require_stack, require_unaltered

MOST_PIXELS = 1024
"""Of a picture: a stage's matrix has a row for each of them."""
_SLACK = 1 + 1e-9
"""Of squared norms, for what sums and eigenvalues in float64 miss: thousands of roundings of 2⁻⁵³."""
_TINY = 2.0**-50
"""More than all that numbers too small for float32 can change in a stage."""
_MODULUS = 8
"""Units in the last place within which the modulus of a complex number is computed."""
_COMPARED = 2
"""Inputs of each hundred whose scores are computed a second time, in float64 and by other sums."""
_WEIGHTS = ((1.0, 1.0), (1.25, 1.0), (1.5, 1.0), (2.0, 1.0), (1.0, 1.25), (1.5, 1.25), (2.0, 1.5))
"""How much the fine and the coarse wavelets count beside the means. Every weight gives a bound; the least counts."""


@dataclass(frozen=True)
class Stage:
    """A linear stage as it is deployed, as a matrix in float64."""

    rows: Tensor
    """A row for each pixel that it is given."""
    gram: Tensor
    size: float
    """A bound on the norm of the matrix of sizes."""
    fan_in: int

    @classmethod
    @torch.no_grad()
    def of(cls, apply: object, shape: tuple[int, int], fan_in: int) -> Self:
        """Of a linear map from pictures of one channel, in float64."""
        assert callable(apply)
        rows = apply(torch.eye(prod(shape), dtype=torch.float64).view(-1, 1, *shape)).flatten(1)
        sizes = rows.abs()
        # Schur's test: a norm is at most the root of the largest row sum times the largest column sum.
        return cls(rows, rows @ rows.T, sqrt(float(sizes.sum(0).max() * sizes.sum(1).max())), fan_in)


def largest(*weighted: tuple[float, Stage]) -> float:
    """Return the squared norm of several stages side by side, each with a weight on its square."""
    gram = torch.stack([weight * stage.gram for weight, stage in weighted]).sum(0)
    return largest_eigenvalue(gram) * _SLACK


class Stretch:
    """How far scattering can move, for a picture that moves by 1.

    **Guarantee.** For all pictures x and y and each row w of weights of the features,
    |w·(S(x) - S(y))| <= `of(w)`·‖x - y‖₂, in exact arithmetic; and ‖M(x) - M(y)‖₂ <= `maps`·‖x - y‖₂ for the maps M
    before gains. The deployed float32 pass is within `rounding`·(‖x‖₂ + 1) of M(x).
    """

    def __init__(self, front: Scattering) -> None:
        channels, height, width = front.input_shape
        if height * width > MOST_PIXELS:
            raise ModelError(
                f"pictures of {height} x {width} pixels are too large for the norm of their scattering.",
                remedy=f"Use pictures of at most {MOST_PIXELS} pixels.",
            )
        front = deepcopy(front).cpu().double()
        whole, half = (height, width), (height // 2, width // 2)
        self.low = Stage.of(front.means, whole, front.low_fine.numel())
        self.fine = Stage.of(lambda maps: front.filtered(maps, front.fine), whole, front.fine[0].numel())
        self.coarse = Stage.of(lambda maps: front.filtered(maps, front.coarse), whole, front.coarse[0].numel())
        self.leaf = Stage.of(front.means, half, front.low_coarse.numel())
        self.front, self.turn = front, float(torch.linalg.matrix_norm(front.colours, 2)) * _SLACK
        self.roots = {
            pair: largest((1.0, self.low), *zip(pair, (self.fine, self.coarse), strict=True)) for pair in _WEIGHTS
        }
        self.nodes = {weight: largest((1.0, self.low), (weight, self.coarse)) for weight, _ in _WEIGHTS}
        # Each stage leaves some maps as they are, so none counts for less than 1.
        steps = [
            sqrt(max(1.0, square)) for square in (self.roots[1.0, 1.0], self.nodes[1.0], largest((1.0, self.leaf)))
        ]
        self.maps = self.turn * prod(steps)
        self.rounding = self._rounding(channels, steps)

    def of(self, functionals: Tensor) -> Tensor:
        """Return the bound for each row of weights, in float64."""
        front, angles = self.front, self.front.angles
        maps = front.lifted(functionals.cpu().double())
        by_path = maps.view(len(maps), -1, front.paths, *maps.shape[2:])
        first, fine, coarse, second = (
            part.flatten(0, 1) for part in torch.split(by_path, [1, angles, angles, angles**2], dim=2)
        )

        def squared(part: Tensor) -> Tensor:
            return part.square().flatten(1).sum(1).view(len(maps), -1).sum(1)

        def spread(part: Tensor) -> Tensor:
            """Return the weights of the means as weights of what they are means of."""
            padding = (front.low_coarse.shape[-1] - 2) // 2
            one = part.reshape(-1, 1, *part.shape[2:])
            back = F.conv_transpose2d(one, front.low_coarse, stride=2, padding=padding)
            return back.view(*part.shape[:2], *back.shape[2:])

        outer, inner = squared(spread(coarse)), squared(spread(second))
        behind = torch.stack([norm * (squared(fine) + inner / weight) for weight, norm in self.nodes.items()]).amin(0)
        root = [
            norm * (squared(first) + behind / weight + outer / other) for (weight, other), norm in self.roots.items()
        ]
        return self.turn * (torch.stack(root).amin(0) * _SLACK).sqrt()

    def maps_of(self, pictures: Tensor) -> Tensor:
        """Return the maps before gains in float64, by the stages' matrices: what the filters should compute."""
        front, angles = self.front, self.front.angles

        def moduli(values: Tensor, stage: Stage) -> Tensor:
            found = values @ stage.rows
            return found.view(*found.shape[:-1], 2, angles, -1).square().sum(-3).sqrt()

        turned = torch.einsum("dc,nchw->ndhw", front.colours, pictures).flatten(2)
        fine, coarse = moduli(turned, self.fine), moduli(turned, self.coarse)
        second = moduli(fine, self.coarse).flatten(2, 3)
        first = (turned @ self.low.rows).unsqueeze(2)
        low = (first, fine @ self.low.rows, coarse @ self.leaf.rows, second @ self.leaf.rows)
        return torch.cat(low, 2).reshape(len(pictures), *front.map_shape)

    def _rounding(self, channels: int, steps: list[float]) -> float:
        """Return e with ‖M̂(x) - M(x)‖₂ <= e(‖x‖₂ + 1): what a stage is given wrong it stretches, and adds its own."""
        error, size = gamma(FLOAT32_UNIT, channels + 2) * sqrt(channels) * self.turn, self.turn
        stages = ((self.low, self.fine, self.coarse), (self.low, self.coarse), (self.leaf,))
        for step, parts in zip(steps, stages, strict=True):
            own = sqrt(sum((gamma(FLOAT32_UNIT, part.fan_in + 2) * part.size) ** 2 for part in parts))
            own += gamma(FLOAT32_UNIT, _MODULUS) * (step + own)
            error = step * error + own * (size + error) + _TINY
            size *= step
        return error * _SLACK


def margin_kind(norm: Norm) -> CertificateKind:
    """Say what a radius by margins means in this norm, and what it rests on."""
    source = "margin over the norm of the scattering, docs/guarantees/scattering.md"
    if norm is not Norm.L2:
        source += f"; the {norm} ball lies inside an l2 ball"
    assumptions = (
        "the deployed pass is a call of the saved network, without hooks, in float32: sums of products in any order, "
        "fused or not; no TF32, half precision, quantisation, Winograd or FFT; moduli within 8 units in the last place",
        "every output depends on its own input alone",
    )
    return CertificateKind(
        *("margins", Status.PROVED, source, Radius(1.0, norm, PAPER_RANGE), 0.0, assumptions), function="single_pass"
    )


class _Falls:
    """How fast leads between classes can fall, for one linear head: c0 + c1·r at most, at distance r."""

    def __init__(self, stretch: Stretch, head: nn.Linear) -> None:
        self.stretch, front = stretch, stretch.front
        self.weight, self.bias = head.weight.detach().double().cpu(), head.bias.detach().double().cpu()
        self.sizes = self.weight.abs()
        differences = [self.weight - row for row in self.weight]
        self.speed = torch.stack([stretch.of(rows) for rows in differences])
        self.lengths = torch.stack([front.lifted(rows).flatten(1).norm(dim=1) for rows in differences])
        self.own_lengths = front.lifted(self.weight).flatten(1).norm(dim=1)
        self.size_lengths = front.lifted(self.sizes).flatten(1).norm(dim=1)
        # The sum over features, and in every one of them a gain, the sum with its mirrored one and a product.
        self.unit = gamma(FLOAT32_UNIT, head.in_features + 8)

    def of_scores(self, sizes: Tensor, reach: Tensor) -> Tensor:
        """Return how far each deployed score may lie from the real one, given sizes of features and ‖x‖₂ + 1."""
        error = self.stretch.rounding * reach[:, None]
        # Sizes are deployed ones as well, so they may be off by that error, too.
        weighed = sizes @ self.sizes.T + 2 * self.size_lengths * error + self.bias.abs()
        allowed: Tensor = (self.own_lengths * error + self.unit * weighed) * _SLACK
        return allowed

    def radii(self, scores: Tensor, labels: Tensor, sizes: Tensor, reach: Tensor) -> Tensor:
        own, each = labels[:, None], self.of_scores(sizes, reach)
        lead, allowed = scores.gather(1, own) - scores, each.gather(1, own) + each
        both = self.size_lengths[own] + self.size_lengths
        rounding = self.stretch.rounding
        by_distance = self.lengths[labels] * rounding + self.unit * both * (self.stretch.maps + 2 * rounding)
        # The scores here and those at the other end may both be off.
        farthest = (lead - 2 * allowed) / (self.speed[labels] + by_distance) / _SLACK
        nearest = farthest.scatter(1, own, torch.inf).amin(1)
        values = prod(self.stretch.front.input_shape)
        # Distances may be measured, and points of a ball rounded, in float32.
        kept: Tensor = nearest * (1 - gamma(FLOAT32_UNIT, values + 8)) - 2.0**-22 * sqrt(values)
        return kept.nan_to_num(nan=0.0).clamp(min=0)


class MarginCertifier:
    """Proves that no picture within an l2 radius changes the class, for scattering followed by one linear layer.

    **Guarantee.** Every float32 input of [-1, 1] within the returned radius of the given one gets the same label from
    the deployed float32 pass, on any device that keeps to the assumptions of `margin_kind`.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.front, self.head = self._parts()
        self.stretch = Stretch(self.front)

    def _parts(self) -> tuple[Scattering, nn.Linear]:
        layers = require_stack(self.network)
        if not is_linear_behind(layers):
            raise ModelError(
                "margins are for scattering followed by one linear layer.",
                remedy="Set model.architecture='scatter 8, linear', or another certificate.",
            )
        for name, layer in layers.named_modules():
            require_unaltered(f"layer '{name}'", layer)
        front, head = layers[0], layers[-1]
        assert isinstance(front, Scattering)
        assert isinstance(head, nn.Linear)
        if {value.dtype for value in (*front.buffers(), *head.parameters()) if value.is_floating_point()} != {
            torch.float32
        }:
            raise ModelError("the network is not in float32.", remedy="Call .float().")
        return front, head

    @torch.no_grad()
    def certificates(self, inputs: Tensor, norm: Norm, rows_at_once: int = 100) -> BoundCertificates:
        """The deployed labels, and the largest radius that is proved for each input; 0 where none is."""
        shape = self.front.input_shape
        if inputs.shape[1:] != shape or inputs.dtype != torch.float32 or not bool((inputs.abs() <= 1).all()):
            raise DataError(
                f"inputs are not pictures of shape {shape}, in float32 numbers of [-1, 1].",
                remedy="Scale them as stobatch.data does.",
            )
        front, head = self._parts()
        require_plain_float32((front, head), head.weight.device)
        bounds = _Falls(self.stretch, head)
        found = [self._part(part, bounds) for part in torch.split(inputs, rows_at_once)]
        labels, radii = (torch.cat(parts) if parts else torch.zeros(0) for parts in zip(*found, strict=True))
        inside = 1.0 if norm is not Norm.LINF else 1 / sqrt(prod(self.front.input_shape))
        return BoundCertificates(labels.numpy().astype(np.int64), inside * radii.numpy(), margin_kind(norm))

    def _part(self, inputs: Tensor, falls: _Falls) -> tuple[Tensor, Tensor]:
        there = inputs.to(self.head.weight.device)
        scores = self.network(there.clone()).double().cpu()
        sizes = self.front.folded(self.front.maps(there).abs()).flatten(1).double().cpu()
        reach = inputs.cpu().double().flatten(1).norm(dim=1) + 1
        self._require_same(inputs[:_COMPARED], scores[:_COMPARED], falls, sizes[:_COMPARED], reach[:_COMPARED])
        labels = scores.argmax(1)
        return labels, falls.radii(scores, labels, sizes, reach)

    def _require_same(self, inputs: Tensor, scores: Tensor, falls: _Falls, sizes: Tensor, reach: Tensor) -> None:
        """Raise unless the deployed scores are those of the matrices whose norms are used, but for rounding."""
        maps = self.stretch.maps_of(inputs.cpu().double())
        expected = self.stretch.front.folded(maps).flatten(1) @ falls.weight.T + falls.bias
        if not bool(((scores - expected).abs() <= falls.of_scores(sizes, reach)).all()):
            raise ModelError(
                "the network's scores are not those that its layers give in float32.",
                why="It computes another function, or by other arithmetic, than what is certified.",
                remedy="Remove whatever changes its passes: patched functions, reduced precision, another back-end.",
            )
