"""The first affine layer h = θ1ᵀx, the one part of the network whose algebra everything else relies on.

It is where privacy noise and robustness noise enter, its transpose is the decoder of the auto-encoder, and its norms
bound what an attacker or a neighbouring data set can change. It has no bias, as in the paper.

Every use of θ1 in `forward` and `decode` is recorded for the tape of DP-SGD, if one is open.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod, sqrt
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.grad import conv2d_weight

from stobatch.dp.layer_gradients import ConvGradients, LinearGradients, WeightForm, Window, record_use, register_layer
from stobatch.errors import ModelError
from stobatch.models.spectrum import largest_eigenvalue

EXACT_SPECTRUM_UP_TO = 4096
"""Inputs with more values than this get the Schur bound instead of the exact spectral norm."""


@dataclass(frozen=True)
class OperatorNorms:
    """Upper bounds on norms of the matrix A with h = Ax, over all maps and positions."""

    l1_to_l1: float
    linf_to_linf: float
    l2_to_l2: float
    l1_to_l2: float
    linf_to_l1: float


@torch.no_grad()
def limit_columns(weight: Tensor, bound: float) -> None:
    """Rescale, in place, every kernel (entry of the first axis) whose 1-norm exceeds the bound."""
    size = weight.flatten(1).abs().sum(1)
    # A few units in the last place below the bound, so that rounding in the sum cannot exceed it.
    factor = torch.where(size > bound, bound / size * (1 - 4 * torch.finfo(size.dtype).eps), torch.ones_like(size))
    weight.mul_(factor.reshape(-1, *[1] * (weight.ndim - 1)))


class AffineEncoder(nn.Module, ABC):
    """a(x, θ1): an affine map without bias, seen as `num_maps` columns of `inputs_per_neuron` weights."""

    weight: nn.Parameter
    input_shape: tuple[int, ...]
    hidden_shape: tuple[int, ...]

    @abstractmethod
    def forward(self, inputs: Tensor) -> Tensor:
        """h = θ1ᵀx."""

    @abstractmethod
    def decode(self, hidden: Tensor) -> Tensor:
        """x̃ = θ1h, the transpose of `forward`."""

    @abstractmethod
    def gram(self, weights: Tensor | None = None) -> Tensor:
        """AᵀWA in float64, for weights W of the hidden values (all 1 if None)."""

    @abstractmethod
    def weight_gradient(self, inputs: Tensor, hidden: Tensor) -> Tensor:
        """Return the gradient of Σᵢ ⟨θ1ᵀxᵢ, hᵢ⟩ with respect to θ1, with x and h held fixed."""

    def copy(self) -> Self:
        return copy.deepcopy(self)

    def absolute(self) -> Self:
        """Return a copy with every weight replaced by its size; its row and column sums are operator norms."""
        twin = self.copy()
        twin.weight.data.abs_()
        return twin

    @property
    def inputs_per_neuron(self) -> int:
        return self.weight[0].numel()

    @property
    def num_maps(self) -> int:
        return self.weight.shape[0]

    @property
    def neurons_per_map(self) -> int:
        return prod(self.hidden_shape) // self.num_maps

    def columns(self) -> Tensor:
        """θ1 as the paper writes it: inputs_per_neuron x num_maps."""
        return self.weight.flatten(1).t()

    def max_column_norm(self) -> float:
        """‖θ1‖₁,₁ in the paper's notation: the largest 1-norm of a column, that is, of one map's kernel."""
        return float(self.columns().detach().abs().sum(0).max())

    def max_row_norm(self) -> float:
        """‖θ1‖∞ in the paper's notation: the largest 1-norm of a row."""
        return float(self.columns().detach().abs().sum(1).max())

    def limit_columns(self, bound: float) -> None:
        """Rescale every column whose 1-norm exceeds the bound.

        **Guarantee.** Afterwards ‖θ1‖₁,₁ <= bound, so the plan's γ holds at every step; and with bound <= 1 every
        θ1ᵀx is in [-1, 1] for x in [-1, 1]^d, which is the assumption of Lemma 2, without clipping anything.
        """
        limit_columns(self.weight, bound)

    @torch.no_grad()
    def operator_norms(self) -> OperatorNorms:
        """Norms of the whole linear operator, every map and position counted; computed in float64."""
        absolute = self.absolute().double().cpu()
        ones_in = torch.ones(1, *self.input_shape, dtype=torch.float64)
        ones_out = torch.ones(1, *self.hidden_shape, dtype=torch.float64)
        column_sums, row_sums = absolute.decode(ones_out), absolute(ones_in)
        num_inputs, num_hidden = prod(self.input_shape), prod(self.hidden_shape)
        l1, linf = float(column_sums.max()), float(row_sums.max())
        schur = sqrt(l1 * linf)
        gram = self.gram() if num_inputs <= EXACT_SPECTRUM_UP_TO else None
        rounding = 1 + 1e-9
        l2 = min(schur, sqrt(largest_eigenvalue(gram))) * rounding if gram is not None else schur
        l1_to_l2 = sqrt(float(gram.diagonal().max())) * rounding if gram is not None else l2
        linf_to_l1 = min(float(row_sums.sum()), num_hidden * linf, num_inputs * l1, sqrt(num_inputs * num_hidden) * l2)
        return OperatorNorms(l1, linf, l2, l1_to_l2, linf_to_l1)


@dataclass(frozen=True)
class _Phases:
    """A strided convolution as a plain one over the phases of its input.

    Every s-th pixel of an image is a channel of its own (`pixel_unshuffle`), and the kernel is dealt out accordingly.
    On CPUs the stock kernels for few channels and a stride are several times slower in both directions, and an attack
    spends half of its time there.
    """

    stride: int
    side: int
    places: tuple[int, ...]
    """Where each weight of a kernel goes in the phase kernel of `stride`² channels and `side`² places."""
    padding: tuple[int, int]

    @classmethod
    def of(cls, size: tuple[int, int], kernel: int, stride: int, padding: int) -> _Phases | None:
        """None where the image does not divide into phases, or has just one."""
        if stride == 1 or any(length % stride for length in size) or size[0] != size[1]:
            return None
        offsets = [divmod(offset - padding, stride) for offset in range(kernel)]
        first = offsets[0][0]
        side = offsets[-1][0] - first + 1
        outputs = (size[0] + 2 * padding - kernel) // stride + 1
        places = tuple(
            ((row_phase * stride + column_phase) * side + row - first) * side + column - first
            for row, row_phase in offsets
            for column, column_phase in offsets
        )
        return cls(stride, side, places, (-first, outputs - size[0] // stride + first + side - 1))

    def convolve(self, inputs: Tensor, weight: Tensor) -> Tensor:
        maps, channels = weight.shape[:2]
        phases, side = self.stride**2, self.side
        dealt = weight.new_zeros(maps, channels, phases * side**2)
        places = torch.tensor(self.places, device=weight.device)
        dealt = dealt.index_copy(2, places, weight.flatten(2)).reshape(maps, channels * phases, side, side)
        before, after = self.padding
        images = F.pixel_unshuffle(inputs, self.stride)
        if before != after:
            images, before = F.pad(images, (before, after, before, after)), 0
        return F.conv2d(images, dealt.contiguous(memory_format=torch.channels_last), padding=before)


def _transpose(hidden: Tensor, weight: Tensor, size: torch.Size, stride: int, padding: int) -> Tensor:
    if hidden.is_cpu:
        patches = weight.flatten(1).t() @ hidden.flatten(2)
        return F.fold(patches, (size[0], size[1]), weight.shape[-1], padding=padding, stride=stride)
    missing = [(side + 2 * padding - weight.shape[-1]) % stride for side in size]
    return F.conv_transpose2d(hidden, weight, stride=stride, padding=padding, output_padding=missing)


class ConvEncoder(AffineEncoder):
    """A convolution; every map reads a patch of the input, as in Appendix P."""

    def __init__(
        self, input_shape: tuple[int, int, int], num_maps: int, kernel: int, *, stride: int, padding: int
    ) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.stride, self.padding, self.input_shape = stride, padding, input_shape
        self.phases = _Phases.of((height, width), kernel, stride, padding)
        out = [(side + 2 * padding - kernel) // stride + 1 for side in (height, width)]
        if min(out) < 1:
            raise ModelError(
                f"a {kernel}x{kernel} kernel does not fit images of {height}x{width}.", remedy="Use a smaller kernel."
            )
        self.hidden_shape = (num_maps, *out)
        self.weight = nn.Parameter(torch.empty(num_maps, channels, kernel, kernel))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.phases is not None and inputs.is_cpu:
            hidden = self.phases.convolve(inputs, self.weight)
        else:
            hidden = F.conv2d(inputs, self.weight, stride=self.stride, padding=self.padding)
        record_use(self, inputs, hidden, WeightForm.WEIGHT)
        return hidden

    def decode(self, hidden: Tensor) -> Tensor:
        decoded = _transpose(hidden, self.weight, torch.Size(self.input_shape[1:]), self.stride, self.padding)
        record_use(self, hidden, decoded, WeightForm.TRANSPOSE)
        return decoded

    def weight_gradient(self, inputs: Tensor, hidden: Tensor) -> Tensor:
        gradient: Tensor = conv2d_weight(  # type: ignore[no-untyped-call]
            inputs, list(self.weight.shape), hidden, stride=self.stride, padding=self.padding
        )
        return gradient

    @torch.no_grad()
    def gram(self, weights: Tensor | None = None) -> Tensor:
        """Add up the Gram matrices of the kernels over all positions, each at the input values of its patch."""
        kernels, size = self.weight.detach().cpu().double().flatten(1), prod(self.input_shape)
        numbers = torch.arange(1.0, size + 1, dtype=torch.float64).reshape(1, *self.input_shape)
        # Row and column 0 collect what falls on the padding.
        patches = F.unfold(numbers, self.weight.shape[-1], padding=self.padding, stride=self.stride)[0].t().long()
        if weights is None:
            products = (kernels.t() @ kernels).expand(len(patches), -1, -1)
        else:
            each = weights.reshape(self.num_maps, -1).t().unsqueeze(2)
            products = kernels.t() @ (each * kernels)
        found = torch.zeros(size + 1, size + 1, dtype=torch.float64)
        found.index_put_((patches.unsqueeze(2), patches.unsqueeze(1)), products, accumulate=True)
        return found[1:, 1:].contiguous()


class DenseEncoder(AffineEncoder):
    """A fully connected layer, θ1 a d x β matrix: the setting in which the paper states its lemmas."""

    def __init__(self, input_shape: tuple[int, ...], num_neurons: int) -> None:
        super().__init__()
        self.input_shape, self.hidden_shape = input_shape, (num_neurons,)
        self.weight = nn.Parameter(torch.empty(num_neurons, prod(input_shape)))
        nn.init.xavier_uniform_(self.weight)

    @property
    def neurons_per_map(self) -> int:
        return self.weight.shape[0]

    @property
    def num_maps(self) -> int:
        return 1

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.flatten(1)
        hidden = rows @ self.weight.t()
        record_use(self, rows, hidden, WeightForm.WEIGHT)
        return hidden

    def decode(self, hidden: Tensor) -> Tensor:
        decoded = hidden @ self.weight
        record_use(self, hidden, decoded, WeightForm.TRANSPOSE)
        return decoded.reshape(-1, *self.input_shape)

    @torch.no_grad()
    def gram(self, weights: Tensor | None = None) -> Tensor:
        kernels = self.weight.detach().cpu().double()
        return kernels.t() @ (kernels if weights is None else weights.reshape(-1, 1) * kernels)

    def weight_gradient(self, inputs: Tensor, hidden: Tensor) -> Tensor:
        return hidden.t() @ inputs.flatten(1)


class _ConvEncoderGradients(ConvGradients):
    """Those of a convolution whose windows are square."""

    @staticmethod
    def window_of(layer: nn.Module) -> Window:
        assert isinstance(layer, ConvEncoder)
        return Window((layer.stride, layer.stride), (layer.padding, layer.padding))


register_layer(ConvEncoder, _ConvEncoderGradients)
register_layer(DenseEncoder, LinearGradients)
