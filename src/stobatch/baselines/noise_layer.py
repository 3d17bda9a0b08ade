"""Fresh noise behind the first affine layer and nowhere else, as PixelDP and its successors have it.

The classifier behind the noise sees A(x) + noise. So a perturbation is hidden as well as the shift of the first layer
that it causes: what counts is how far a perturbation of unit size can move the layer, each hidden value measured in
units of its own noise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from math import prod, sqrt
from typing import final

import torch
from torch import Tensor

from stobatch.dp.noise import laplace
from stobatch.errors import ModelError, SettingError
from stobatch.models import AffineEncoder
from stobatch.models.affine import EXACT_SPECTRUM_UP_TO
from stobatch.models.spectrum import largest_eigenvalue
from stobatch.types import Norm
from stobatch.votes.margins import LAPLACE_AS_GAUSSIAN, Shift, hidden_shift
from stobatch.votes.noise import RadiusFactors, SmoothingNoise

_ROUNDING = 1 + 1e-9
_FLATTEST = 1e-150
"""In place of the sensitivity of a layer without weights, which hides perturbations of every size."""


@torch.no_grad()
def layer_sensitivity(encoder: AffineEncoder, units: Tensor) -> dict[Norm, float]:
    """Return ‖D⁻¹A‖ from each norm to l2 with D = diag(units): how far a perturbation of size 1 moves the first layer.

    With units of 1 it is the sensitivity of ordinary Gaussian noise; with √(K r_i), which is `spread` of σ = 1, that
    of heterogeneous noise; and with the noise's own standard deviations it counts deviations.

    **Guarantee.** Upper bounds over all maps and positions, computed in float64. From l1 exact: the largest column.
    From l2 exact up to 4096 input values: the largest eigenvalue of the Gram matrix G = AᵀD⁻²A; beyond, the row
    sums of |A|ᵀD⁻²|A| bound it. From l-infinity the least of three bounds on xᵀGx for |x_i| <= 1: d times the
    eigenvalue, Σ|G_ij|, and the sum of the squared row sums of |D⁻¹A|.

    >>> from stobatch.models import DenseEncoder
    >>> encoder = DenseEncoder((2,), 2)
    >>> _ = encoder.weight.data.copy_(torch.tensor([[3.0, 0.0], [4.0, 1.0]]))
    >>> {str(norm): round(size, 3) for norm, size in layer_sensitivity(encoder, torch.ones(2)).items()}
    {'l1': 5.0, 'l2': 5.064, 'linf': 5.831}
    """
    units = _require_positive("units", units, encoder.hidden_shape)
    weights = units.square().reciprocal().unsqueeze(0)
    absolute, squared = encoder.absolute().double().cpu(), encoder.copy().double().cpu()
    squared.weight.data.square_()
    num_inputs = prod(encoder.input_shape)
    rows = absolute(torch.ones(1, *encoder.input_shape, dtype=torch.float64))
    columns = float(squared.decode(weights).max())
    steepest, all_signs = float(absolute.decode(rows * weights).max()), float((rows.square() * weights).sum())
    if num_inputs <= EXACT_SPECTRUM_UP_TO:
        gram = encoder.gram(weights)
        steepest, all_signs = largest_eigenvalue(gram), min(all_signs, float(gram.abs().sum()))
    squares = {Norm.L1: columns, Norm.L2: steepest, Norm.LINF: min(all_signs, num_inputs * steepest)}
    return {norm: sqrt(max(square, 0.0)) * _ROUNDING for norm, square in squares.items()}


@dataclass(frozen=True, eq=False)
class LayerNoise(SmoothingNoise, ABC):
    """Noise behind the first affine layer: what the classifier sees is A(x) + noise.

    The layer is copied, so that later training cannot leave a certificate behind that is about other weights.
    """

    encoder: AffineEncoder

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoder", self.encoder.copy().requires_grad_(False))

    @property
    def num_inputs(self) -> int:
        return prod(self.encoder.input_shape)

    def noise_free(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(inputs)
        return hidden

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return self._noise((shape[0], *self.encoder.hidden_shape), generator).to(self.encoder.weight)

    def factors(self, norm: Norm, num_inputs: int) -> RadiusFactors:
        if num_inputs != self.num_inputs:
            raise ModelError(
                f"the first layer takes {self.num_inputs} values, the inputs have {num_inputs}.",
                remedy="Give inputs of the shape that the noise was made for.",
            )
        return self._factors_by_norm[norm]

    @abstractmethod
    def _noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return draws for the hidden layer, number of draws first."""

    @property
    @abstractmethod
    def _factors_by_norm(self) -> dict[Norm, RadiusFactors]:
        """Return the factors of every norm; cached, since the norms of a large layer take seconds."""


@final
@dataclass(frozen=True, eq=False)
class LayerGaussian(LayerNoise):
    """N(0, stddev²) on every hidden value, each with a standard deviation of its own, or one for all.

    **Guarantee.** A perturbation a is ‖D⁻¹Aa‖₂ deviations with D = diag(stddev), and no classifier behind the noise can
    tell more of it than of a shift of that size of N(0, 1). Where `layer_sensitivity` is
    exact, the worst direction attains it.
    """

    stddev: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "stddev", _require_positive("stddev", self.stddev, self.encoder.hidden_shape))

    def _noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator) * self.stddev

    @cached_property
    def _factors_by_norm(self) -> dict[Norm, RadiusFactors]:
        sizes = layer_sensitivity(self.encoder, self.stddev)
        return {norm: RadiusFactors(0.0, 1 / max(size, _FLATTEST)) for norm, size in sizes.items()}


@final
@dataclass(frozen=True, eq=False)
class LayerLaplace(LayerNoise):
    """Lap(scale) on every hidden value: ‖Aa‖₁/b losses, and at most √(π/2) ‖Aa‖₂/b deviations."""

    scale: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("scale", torch.tensor(self.scale), ())

    def _noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return laplace(shape, self.scale, generator)

    @cached_property
    def _factors_by_norm(self) -> dict[Norm, RadiusFactors]:
        shifts: dict[Norm, Shift] = {norm: hidden_shift(norm, self.encoder) for norm in Norm}
        return {
            norm: RadiusFactors(
                self.scale / max(shift.l1, _FLATTEST), LAPLACE_AS_GAUSSIAN * self.scale / max(shift.l2, _FLATTEST)
            )
            for norm, shift in shifts.items()
        }


def _require_positive(name: str, sizes: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a copy of the given shape in float64, on the CPU; one value stands for all."""
    if sizes.ndim and tuple(sizes.shape) != shape:
        raise SettingError(
            f"{name} has the shape {tuple(sizes.shape)}, the first layer gives values of shape {shape}.",
            remedy="Give one size of noise for every hidden value, or one for all.",
        )
    if not bool((sizes.isfinite() & (sizes > 0)).all()):
        raise SettingError(
            f"{name} has an entry that is not a positive number.",
            why="Where there is no noise a perturbation is seen as it is.",
            remedy="Use numbers above 0.",
        )
    return sizes.detach().double().cpu().expand(shape).clone()
