"""Deterministic certificates of a linear head behind wavelet scattering: by Lipschitz constants and by tangents.

Scores are linear in the features, and the features are Lipschitz in the input (`bounds.scattering`); near one input
they change by less (`bounds.tangents`). For l2 and l-infinity; the rounding of float32 is included. Theorem and proof:
docs/guarantees/scattering.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod, sqrt

import numpy as np
import torch
from torch import Tensor, nn

from stobatch.bounds.arithmetic import require_plain_float32
from stobatch.bounds.certifier import BoundCertificates
from stobatch.bounds.linear import FLOAT32_UNIT, gamma
from stobatch.bounds.scattering import SLACK, Responses, ScatteringLipschitz
from stobatch.bounds.tangents import ScatteringTangents, l2_stretch
from stobatch.errors import DataError, ModelError
from stobatch.models.scattering import Scattering, is_linear_behind
from stobatch.types import PAPER_RANGE, Norm, Radius, Status
from stobatch.verifier import CertificateKind, require_stack, require_unaltered

_CURVATURE, _FACTORED_CURVATURE = 0.15, 0.25
"""Of tangents of a margin, in units of the margin's Lipschitz constant over that of its slopes and the radius that is
to be proved; and where matrices are factored. More curvature loses less at the input itself, and more at a distance."""
_NEAREST = 1e-3
"""Radius below which a smaller one asks for no more curvature."""
_IN_FLOAT64 = 1 + 1e-6
"""Factor on the rounding errors of float32 that covers those of float64 too, which are 2⁻²⁹ of them."""


def margin_kind(norm: Norm) -> CertificateKind:
    """Return what a radius by margins means in this norm, and its assumptions."""
    source = "margin over the slope of the scattering, docs/guarantees/scattering.md"
    if norm is Norm.L1:
        source += "; the l1 ball lies inside an l2 ball"
    assumptions = (
        "the deployed pass is a call of the saved network, without hooks, in float32: sums of products in any order, "
        "fused or not; no TF32, half precision, quantisation, Winograd or FFT; moduli within 8 units in the last place",
        "every output depends on its own input alone",
    )
    return CertificateKind(
        *("margins", Status.PROVED, source, Radius(1.0, norm, PAPER_RANGE), 0.0, assumptions), function="single_pass"
    )


class _MarginLipschitz:
    """Lipschitz constants and tangents of the margins of one linear head, and the rounding errors of its scores."""

    def __init__(self, scattering: ScatteringLipschitz, tangents: ScatteringTangents, head: nn.Linear) -> None:
        self.scattering, self.tangents, front = scattering, tangents, scattering.front
        self.shape = front.input_shape
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
        # Deployed features are off by the same error; twice, for magnitudes that were rounded too.
        sums = magnitudes @ self.absolute_weight.T + 2 * self.absolute_norms * error + self.bias.abs()
        errors: Tensor = (self.weight_norms * error + self.share * sums) * _IN_FLOAT64
        return errors

    def radii(
        self,
        scores: Tensor,
        labels: Tensor,
        errors: Tensor,
        responses: Responses,
        norm: Norm,
        asked: Sequence[float] | None,
    ) -> Tensor:
        """Return the certified radius of each input, given its scores in float64 and the errors of deployed ones."""
        label, every, stretch = labels[:, None], torch.arange(len(labels)), l2_stretch(norm, self.shape)
        lead = scores.gather(1, label) - scores - errors.gather(1, label) - errors
        # At l2 distance r, ‖x‖ is larger by r and the features by `maps`·r at most: that part of the error at the other
        # point grows with r.
        rounding = self.scattering.rounding
        absolute_norms = self.absolute_norms[label] + self.absolute_norms
        error_per_distance = stretch * (
            self.difference_norms[labels] * rounding
            + self.share * absolute_norms * (self.scattering.maps + 2 * rounding)
        )
        constants = stretch * self.constants[labels]
        by_class = (lead / (constants + error_per_distance)).scatter(1, label, torch.inf)
        # The nearest class limits the radius. Look closer at it, and go on until the nearest has been looked at, or is
        # farther than what is asked about.
        enough = torch.inf if asked is None else 1.01 * max(asked)
        looked_at = torch.zeros_like(by_class, dtype=torch.bool)
        while True:
            nearest = by_class.argmin(1)
            near = ~looked_at[every, nearest] & (by_class[every, nearest] < enough)
            rows = (near & (lead[every, nearest] > 0)).nonzero().flatten()
            if not len(rows):
                break
            other = nearest[rows]
            by_class[rows, other] = self._by_tangents(
                self.weight[labels[rows]] - self.weight[other],
                responses.take(rows),
                lead[rows, other],
                error_per_distance[rows, other],
                constants[rows, other],
                norm,
                asked,
            )
            looked_at[rows, other] = True
        radius = by_class.amin(1) / SLACK
        # Shrunk so that distances may be measured, and points of a ball rounded, in float32.
        values = prod(self.shape)
        shrunk: Tensor = radius * (1 - gamma(FLOAT32_UNIT, values + 8)) - 2.0**-22 * sqrt(values)
        return shrunk.nan_to_num(nan=0.0).clamp(min=0)

    def _by_tangents(
        self,
        functionals: Tensor,
        responses: Responses,
        lead: Tensor,
        slope: Tensor,
        constants: Tensor,
        norm: Norm,
        asked: Sequence[float] | None,
    ) -> Tensor:
        """Return the distance up to which each margin stays positive, by whatever proves most."""
        stretch = l2_stretch(norm, self.shape)
        found = lead / (constants + slope)
        near = found.clamp(min=_NEAREST)
        unit = constants / (stretch**2 * self.tangents.level)
        line = self.tangents.of(functionals, responses, _CURVATURE * unit / near).parabola(norm)
        found = torch.maximum(found, line.add(lead, slope).root())
        # Completing the square proves no more than a tangent that loses and bends nothing would.
        farthest = lead / (line.slope + slope)
        if asked is None:
            tries = [((found * farthest).sqrt(), _CURVATURE, False)]
        else:
            efforts = ((_CURVATURE, False), (_FACTORED_CURVATURE, True))
            tries = [(torch.full_like(found, radius), *effort) for radius, effort in product(sorted(asked), efforts)]
        worst = torch.zeros(len(found), self.shape[0], prod(self.shape[1:]), dtype=torch.float64)
        for near, curvature, by_factors in tries:
            rows = ((near > found) & (near <= farthest)).nonzero().flatten()
            if len(rows):
                tangents = self.tangents.of(
                    functionals[rows], responses.take(rows), curvature * unit[rows] / near[rows], touching=worst[rows]
                )
                square = (tangents.factored if by_factors else tangents.completed)(near[rows], norm)
                found[rows] = torch.maximum(found[rows], square.parabola.add(lead[rows], slope[rows]).root())
                worst[rows] = square.worst
        return found


class MarginCertifier:
    """Proves that no input within a radius changes the class, for scattering followed by one linear layer.

    **Guarantee.** Every float32 input of [-1, 1] within the returned radius of the given one gets the same label from
    the deployed float32 pass, on any device that keeps to the assumptions of `margin_kind`.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.front, self.head = self._parts()
        self.scattering = ScatteringLipschitz(self.front)
        self.tangents = ScatteringTangents(self.scattering)

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
    def certificates(
        self, inputs: Tensor, norm: Norm, asked: Sequence[float] | None = None, rows_at_once: int = 100
    ) -> BoundCertificates:
        """Return the deployed labels, and a radius that is proved for each input; 0 where none is.

        It is as large as can be proved fast; given radii that are asked about, these are worth the most effort.
        """
        shape = self.front.input_shape
        if inputs.shape[1:] != shape or inputs.dtype != torch.float32 or not bool((inputs.abs() <= 1).all()):
            raise DataError(
                f"inputs are not images of shape {shape} in float32 over [-1, 1].",
                remedy="Scale them as stobatch.data does.",
            )
        front, head = self._parts()
        require_plain_float32((front, head), head.weight.device)
        margins = _MarginLipschitz(self.scattering, self.tangents, head)
        results = [self._part(part, margins, norm, asked) for part in torch.split(inputs, rows_at_once)]
        labels, radii = (torch.cat(parts) if parts else torch.zeros(0) for parts in zip(*results, strict=True))
        return BoundCertificates(labels.numpy().astype(np.int64), radii.numpy(), margin_kind(norm))

    def _part(
        self, inputs: Tensor, margins: _MarginLipschitz, norm: Norm, asked: Sequence[float] | None
    ) -> tuple[Tensor, Tensor]:
        deployed = self.network(inputs.to(self.head.weight.device, copy=True)).double().cpu()
        responses, front = self.scattering.responses(inputs), self.scattering.front
        maps = front.levelled(self.scattering.maps_of(responses))
        scores = front.folded(maps).flatten(1) @ margins.weight.T + margins.bias
        lengths = inputs.cpu().double().flatten(1).norm(dim=1) + 1
        errors = margins.score_errors(front.folded(maps.abs()).flatten(1), lengths)
        if not bool(((deployed - scores).abs() <= errors).all()):
            raise ModelError(
                "the network's scores are not those that its layers give in float32.",
                why="It computes another function than what is certified, or in other arithmetic.",
                remedy="Remove whatever changes its passes: patched functions, reduced precision, another back-end.",
            )
        labels = deployed.argmax(1)
        return labels, margins.radii(scores, labels, errors, responses, norm, asked)
