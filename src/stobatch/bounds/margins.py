"""Deterministic l2 certificates of a linear head behind wavelet scattering: margin over its Lipschitz constant.

Scores are linear in the features, and the features are Lipschitz in the input. The constant is computed for the
deployed filters, strides and padding, one stage at a time, from the stage's own matrix, and the rounding of float32 is
included. Theorem and proof: docs/guarantees/scattering.md.
"""

from __future__ import annotations

from collections.abc import Callable
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

MAX_PIXELS = 1024
"""Largest number of pixels: a stage's matrix has a row for each of them."""
_SLACK = 1 + 1e-9
"""Factor on squared norms that covers the rounding of sums and eigenvalues in float64: thousands of times 2⁻⁵³."""
_UNDERFLOW = 2.0**-50
"""More than underflow in float32 can change in a stage."""
_MODULUS = 8
"""Units in the last place within which the modulus of a complex number is computed."""
_COMPARED = 2
"""Inputs of each hundred whose scores are computed a second time, in float64 by the stages' matrices."""
_WEIGHTS = ((1.0, 1.0), (1.25, 1.0), (1.5, 1.0), (2.0, 1.0), (1.0, 1.25), (1.5, 1.25), (2.0, 1.5))
"""Weights of the fine and coarse wavelets relative to the means. Every pair gives a bound; the smallest counts."""


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
    return largest_eigenvalue(gram) * _SLACK


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
        self.fine = Stage.of(lambda maps: front.filtered(maps, front.fine), whole, front.fine[0].numel())
        self.coarse = Stage.of(lambda maps: front.filtered(maps, front.coarse), whole, front.coarse[0].numel())
        self.leaf = Stage.of(front.means, half, front.low_coarse.numel())
        self.front, self.colour_norm = front, float(torch.linalg.matrix_norm(front.colours, 2)) * _SLACK
        self.roots = {
            pair: squared_norm((1.0, self.low), *zip(pair, (self.fine, self.coarse), strict=True)) for pair in _WEIGHTS
        }
        self.nodes = {weight: squared_norm((1.0, self.low), (weight, self.coarse)) for weight, _ in _WEIGHTS}
        # Each stage passes some maps on unchanged, so its norm is at least 1.
        squares = (self.roots[1.0, 1.0], self.nodes[1.0], squared_norm((1.0, self.leaf)))
        norms = [sqrt(max(1.0, square)) for square in squares]
        self.maps = self.colour_norm * prod(norms)
        self.rounding = self._rounding(channels, norms)

    def of(self, functionals: Tensor) -> Tensor:
        """Return the Lipschitz constant of each row of weights of the features, in float64.

        By Cauchy-Schwarz from the leaves to the root, as in docs/guarantees/scattering.md: with b the norms of the
        weights of a node's children and c > 0, ‖v‖·‖φd‖ + Σ bᵢ·‖ψᵢd‖ <= √(‖v‖² + Σ bᵢ²/c) · √(‖φd‖² + c Σ‖ψᵢd‖²).
        """
        front, angles = self.front, self.front.angles
        maps = front.lifted(functionals.cpu().double())
        by_path = maps.view(len(maps), -1, front.paths, *maps.shape[2:])
        first, fine, coarse, second = (
            part.flatten(0, 1) for part in torch.split(by_path, [1, angles, angles, angles**2], dim=2)
        )

        def squared(part: Tensor) -> Tensor:
            return part.square().flatten(1).sum(1).view(len(maps), -1).sum(1)

        def transposed_means(part: Tensor) -> Tensor:
            """Return weights of the means as weights of the maps that they average."""
            padding = (front.low_coarse.shape[-1] - 2) // 2
            channels = part.reshape(-1, 1, *part.shape[2:])
            weights = F.conv_transpose2d(channels, front.low_coarse, stride=2, padding=padding)
            return weights.view(*part.shape[:2], *weights.shape[2:])

        outer, inner = squared(transposed_means(coarse)), squared(transposed_means(second))
        children = torch.stack([norm * (squared(fine) + inner / weight) for weight, norm in self.nodes.items()]).amin(0)
        root = [
            norm * (squared(first) + children / weight + outer / other) for (weight, other), norm in self.roots.items()
        ]
        return self.colour_norm * (torch.stack(root).amin(0) * _SLACK).sqrt()

    def maps_of(self, images: Tensor) -> Tensor:
        """Return the maps before gains in float64, by the stages' matrices: what the filters should compute."""
        front, angles = self.front, self.front.angles

        def moduli(values: Tensor, stage: Stage) -> Tensor:
            complex_parts = values @ stage.rows
            return complex_parts.view(*complex_parts.shape[:-1], 2, angles, -1).square().sum(-3).sqrt()

        channels = torch.einsum("dc,nchw->ndhw", front.colours, images).flatten(2)
        fine, coarse = moduli(channels, self.fine), moduli(channels, self.coarse)
        second = moduli(fine, self.coarse).flatten(2, 3)
        first = (channels @ self.low.rows).unsqueeze(2)
        low = (first, fine @ self.low.rows, coarse @ self.leaf.rows, second @ self.leaf.rows)
        return torch.cat(low, 2).reshape(len(images), *front.map_shape)

    def _rounding(self, channels: int, norms: list[float]) -> float:
        """Return e with ‖M̂(x) - M(x)‖₂ <= e(‖x‖₂ + 1): each stage multiplies the error by its norm and adds its own."""
        error, size = gamma(FLOAT32_UNIT, channels + 2) * sqrt(channels) * self.colour_norm, self.colour_norm
        stages = ((self.low, self.fine, self.coarse), (self.low, self.coarse), (self.leaf,))
        for norm, parts in zip(norms, stages, strict=True):
            stage_error = sqrt(sum((gamma(FLOAT32_UNIT, part.fan_in + 2) * part.absolute_norm) ** 2 for part in parts))
            stage_error += gamma(FLOAT32_UNIT, _MODULUS) * (norm + stage_error)
            error = norm * error + stage_error * (size + error) + _UNDERFLOW
            size *= norm
        return error * _SLACK


def margin_kind(norm: Norm) -> CertificateKind:
    """Return what a radius by margins means in this norm, and its assumptions."""
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


class _MarginLipschitz:
    """Lipschitz constants of the margins of one linear head, and the rounding errors of its scores."""

    def __init__(self, scattering: ScatteringLipschitz, head: nn.Linear) -> None:
        self.scattering, front = scattering, scattering.front
        self.weight, self.bias = head.weight.detach().double().cpu(), head.bias.detach().double().cpu()
        self.absolute_weight = self.weight.abs()
        differences = [self.weight - row for row in self.weight]
        # constants[y, k] is of the margin of y over k.
        self.constants = torch.stack([scattering.of(rows) for rows in differences])
        # Norms of the head's rows as weights of the maps: of W_k - W_y, of W_k and of |W_k|.
        self.difference_norms = torch.stack([front.lifted(rows).flatten(1).norm(dim=1) for rows in differences])
        self.weight_norms = front.lifted(self.weight).flatten(1).norm(dim=1)
        self.absolute_norms = front.lifted(self.absolute_weight).flatten(1).norm(dim=1)
        # The sum over features, and for each of them a gain, the sum with its mirrored map and a product.
        self.share = gamma(FLOAT32_UNIT, head.in_features + 8)

    def score_errors(self, magnitudes: Tensor, lengths: Tensor) -> Tensor:
        """Return bounds on the rounding error of each deployed score, given |features| and ‖x‖₂ + 1."""
        error = self.scattering.rounding * lengths[:, None]
        # The magnitudes are deployed values too, so they may be off by the same error.
        sums = magnitudes @ self.absolute_weight.T + 2 * self.absolute_norms * error + self.bias.abs()
        errors: Tensor = (self.weight_norms * error + self.share * sums) * _SLACK
        return errors

    def radii(self, scores: Tensor, labels: Tensor, magnitudes: Tensor, lengths: Tensor) -> Tensor:
        """Return the certified radius of each input: the least of (margin - errors) / constant over other classes."""
        label, errors = labels[:, None], self.score_errors(magnitudes, lengths)
        margin, margin_error = scores.gather(1, label) - scores, errors.gather(1, label) + errors
        # At distance r, ‖x‖ is larger by r and the features by `maps`·r at most: that part of the error at the other
        # point grows with r and goes to the denominator. The factor 2 is for the errors at both points.
        rounding = self.scattering.rounding
        absolute_norms = self.absolute_norms[label] + self.absolute_norms
        error_per_distance = self.difference_norms[labels] * rounding + self.share * absolute_norms * (
            self.scattering.maps + 2 * rounding
        )
        by_class = (margin - 2 * margin_error) / (self.constants[labels] + error_per_distance) / _SLACK
        radius = by_class.scatter(1, label, torch.inf).amin(1)
        # Shrunk so that distances may be measured, and points of a ball rounded, in float32.
        values = prod(self.scattering.front.input_shape)
        shrunk: Tensor = radius * (1 - gamma(FLOAT32_UNIT, values + 8)) - 2.0**-22 * sqrt(values)
        return shrunk.nan_to_num(nan=0.0).clamp(min=0)


class MarginCertifier:
    """Proves that no input within an l2 radius changes the class, for scattering followed by one linear layer.

    **Guarantee.** Every float32 input of [-1, 1] within the returned radius of the given one gets the same label from
    the deployed float32 pass, on any device that keeps to the assumptions of `margin_kind`.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.front, self.head = self._parts()
        self.scattering = ScatteringLipschitz(self.front)

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
        dtypes = {value.dtype for value in (*front.buffers(), *head.parameters()) if value.is_floating_point()}
        if dtypes != {torch.float32}:
            raise ModelError("the network is not in float32.", remedy="Call .float().")
        return front, head

    @torch.no_grad()
    def certificates(self, inputs: Tensor, norm: Norm, rows_at_once: int = 100) -> BoundCertificates:
        """Return the deployed labels, and the largest radius that is proved for each input; 0 where none is."""
        shape = self.front.input_shape
        if inputs.shape[1:] != shape or inputs.dtype != torch.float32 or not bool((inputs.abs() <= 1).all()):
            raise DataError(
                f"inputs are not images of shape {shape} in float32 over [-1, 1].",
                remedy="Scale them as stobatch.data does.",
            )
        front, head = self._parts()
        require_plain_float32((front, head), head.weight.device)
        margins = _MarginLipschitz(self.scattering, head)
        results = [self._part(part, margins) for part in torch.split(inputs, rows_at_once)]
        labels, radii = (torch.cat(parts) if parts else torch.zeros(0) for parts in zip(*results, strict=True))
        inside = 1.0 if norm is not Norm.LINF else 1 / sqrt(prod(self.front.input_shape))
        return BoundCertificates(labels.numpy().astype(np.int64), inside * radii.numpy(), margin_kind(norm))

    def _part(self, inputs: Tensor, margins: _MarginLipschitz) -> tuple[Tensor, Tensor]:
        on_device = inputs.to(self.head.weight.device)
        scores = self.network(on_device.clone()).double().cpu()
        magnitudes = self.front.folded(self.front.maps(on_device).abs()).flatten(1).double().cpu()
        lengths = inputs.cpu().double().flatten(1).norm(dim=1) + 1
        some = slice(_COMPARED)
        self._require_same(inputs[some], scores[some], margins, magnitudes[some], lengths[some])
        labels = scores.argmax(1)
        return labels, margins.radii(scores, labels, magnitudes, lengths)

    def _require_same(
        self, inputs: Tensor, scores: Tensor, margins: _MarginLipschitz, magnitudes: Tensor, lengths: Tensor
    ) -> None:
        """Raise unless the deployed scores are those of the matrices whose norms are used, up to rounding."""
        maps = self.scattering.maps_of(inputs.cpu().double())
        expected = self.scattering.front.folded(maps).flatten(1) @ margins.weight.T + margins.bias
        if not bool(((scores - expected).abs() <= margins.score_errors(magnitudes, lengths)).all()):
            raise ModelError(
                "the network's scores are not those that its layers give in float32.",
                why="It computes another function than what is certified, or in other arithmetic.",
                remedy="Remove whatever changes its passes: patched functions, reduced precision, another back-end.",
            )
