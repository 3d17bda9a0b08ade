"""Linear layers for attacks, rewritten as the convolutions that CPUs run fastest; equal to the layers up to rounding.

oneDNN, which runs PyTorch's convolutions on a CPU, wants channels innermost in memory, 16 or more of them to write, and
no stride over few channels. None of it changes what is computed: each weight only moves to another place of a larger
kernel, whose other places are zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.models.affine import AffineEncoder, ConvEncoder

_VECTOR = 16
"""Floats in a vector of AVX-512: fewer channels to write leave a part of it unused."""
_GROUPS = 16
"""With one thread PyTorch hands a 1x1 convolution to oneDNN from this many images on."""
_SMALLEST_LAYER = 2**15
"""Weights of a dense layer from which on its product takes longer than the calls around it."""


def has_wide_vectors() -> bool:
    """Return whether this processor has AVX-512, where a convolution is worth more zeros in its kernel."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


class LinearMap(Protocol):
    """A linear map of rows, up to a constant, and its transpose."""

    def product(self, rows: Tensor) -> Tensor: ...

    def transpose(self, rows: Tensor) -> Tensor: ...


def with_transpose(rows: Tensor, layer: LinearMap) -> Tensor:
    """Return the layer's product, whose input gradient is computed by its transpose."""
    result: Tensor = _WithTranspose.apply(rows, layer)  # type: ignore[no-untyped-call]
    return result


class _WithTranspose(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, layer: LinearMap) -> Tensor:
        context.layer = layer
        return layer.product(rows)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        transposed: Tensor = context.layer.transpose(gradient)
        return transposed, None


@dataclass(frozen=True)
class ColumnConvolution:
    """A strided convolution of pictures with one channel, as one whose channels are neighbouring columns.

    Columns s·v to s·v + s - 1 of a picture are next to each other in memory: as s channels of a picture with a width
    divided by s they are in the order that oneDNN wants, without a copy. A stride of s columns becomes one of 1.
    """

    kernel: Tensor
    """maps x stride x kernel rows x groups of columns."""
    stride: int
    padding: tuple[int, int]

    @classmethod
    def of(cls, encoder: AffineEncoder) -> ColumnConvolution | None:
        """Return the same map as an encoder's; None where the columns do not divide, or there is nothing to gain."""
        if type(encoder) is not ConvEncoder or encoder.weight.dtype != torch.float32:
            return None
        stride, padding, size = encoder.stride, encoder.padding, encoder.weight.shape[-1]
        channels, _, width = encoder.input_shape
        if channels != 1 or stride == 1 or width % stride:
            return None
        # The map at q reads columns stride · q - padding + j for 0 <= j < size, which are those of the groups
        # q + first to q + first + groups - 1.
        first = -padding // stride
        groups = (size - 1 - padding) // stride - first + 1
        if encoder.hidden_shape[2] - width // stride + first + groups - 1 != -first:
            # The right would need another padding than the left.
            return None
        column = torch.arange(stride)[:, None] + stride * (first + torch.arange(groups)) + padding
        dealt = _deal(encoder.weight.data[:, 0], column)
        kernel = dealt.permute(0, 2, 1, 3).contiguous(memory_format=torch.channels_last)
        return cls(kernel, stride, (padding, -first))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the hidden maps, n x maps x rows x columns, channels last."""
        count, _, height, width = inputs.shape
        columns = inputs.reshape(count, height, width // self.stride, self.stride).permute(0, 3, 1, 2)
        return F.conv2d(columns, self.kernel, stride=(self.stride, 1), padding=self.padding)


@dataclass(frozen=True)
class BlockTranspose:
    """The transpose of a convolution of pictures with one channel, as a plain convolution to blocks of 4 x 4 pixels.

    A block's 16 pixels are the channels that the convolution writes: one vector. A matrix product and a fold need
    fewer multiplications, 25 for each hidden value where this one makes 64 with 5 x 5 kernels and a stride of 2, but
    write 25 numbers for each position and add them up pixel by pixel.
    """

    kernel: Tensor
    """16 pixels x maps x positions x positions."""
    stride: int
    padding: int

    @classmethod
    def of(cls, encoder: AffineEncoder) -> BlockTranspose | None:
        """Return the same map as an encoder's `decode`; None where blocks do not divide, or there is nothing to gain.

        Pixel side·b + a takes part in the hidden value q with the weight i = side·b + a + padding - stride·q, if
        0 <= i < size. Let q = (side / stride)·b + t: then i = a + padding - stride·t is the same for every block b.
        """
        if type(encoder) is not ConvEncoder or encoder.weight.dtype != torch.float32 or not has_wide_vectors():
            return None
        stride, padding, size = encoder.stride, encoder.padding, encoder.weight.shape[-1]
        channels, height, width = encoder.input_shape
        side = int(_VECTOR**0.5)
        if channels != 1 or height != width or width % side or side % stride:
            return None
        first, last = -((size - 1 - padding) // stride), (side - 1 + padding) // stride
        blocks, step = width // side, side // stride
        if first > 0 or step * (blocks - 1) + last - (encoder.hidden_shape[2] - 1) != -first:
            return None
        place = torch.arange(side)[:, None] + padding - stride * torch.arange(first, last + 1)
        # maps x row in the block x position x column in the block x position
        dealt = _deal(_deal(encoder.weight.data[:, 0].transpose(1, 2), place).permute(0, 2, 3, 1), place)
        kernel = dealt.permute(1, 3, 0, 2, 4).reshape(side**2, encoder.num_maps, len(place[0]), len(place[0]))
        return cls(kernel.contiguous(memory_format=torch.channels_last), step, -first)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return pictures, n x 1 x rows x columns."""
        blocks = F.conv2d(hidden, self.kernel, stride=self.stride, padding=self.padding)
        count, pixels, rows, columns = blocks.shape
        side = int(pixels**0.5)
        by_rows = blocks.permute(0, 2, 3, 1).reshape(count, rows, columns, side, side).transpose(2, 3)
        return by_rows.reshape(count, 1, rows * side, columns * side)


def _deal(values: Tensor, places: Tensor) -> Tensor:
    """Return values[..., places], and 0 where a place is outside."""
    outside = (places < 0) | (places >= values.shape[-1])
    return F.pad(values, (0, 1))[..., places.masked_fill(outside, values.shape[-1])]


class DenseConvolution(nn.Module):
    """A linear layer with wide vectors, forwards and back: rows in groups, each the pixels of a picture.

    PyTorch's matrix product is MKL's, which leaves half of a vector unused on processors of other makers; oneDNN does
    not. A row's bits do not depend on the rows beside it, but for fewer rows than groups, which are multiplied as
    they are: groups of one would read all weights for every row.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.data
        self.layer = layer
        self.forwards, self.back = weight[..., None, None], weight.t().contiguous()[..., None, None]

    @staticmethod
    def pays_for(layer: nn.Module) -> bool:
        if type(layer) is not nn.Linear or layer.weight.dtype != torch.float32:
            return False
        return prod(layer.weight.shape) >= _SMALLEST_LAYER and has_wide_vectors()

    def product(self, rows: Tensor) -> Tensor:
        bias = self.layer.bias
        return _product(rows, self.forwards, bias) if len(rows) >= _GROUPS else F.linear(rows, self.layer.weight, bias)

    def transpose(self, rows: Tensor) -> Tensor:
        return _product(rows, self.back, None) if len(rows) >= _GROUPS else rows @ self.layer.weight

    def forward(self, rows: Tensor) -> Tensor:
        return with_transpose(rows, self)


def _product(rows: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows @ kernel.T + bias, by a 1x1 convolution of `_GROUPS` pictures."""
    count = len(rows)
    if missing := -count % _GROUPS:
        rows = F.pad(rows, (0, 0, 0, missing))
    pictures = rows.reshape(_GROUPS, -1, 1, rows.shape[1]).permute(0, 3, 1, 2)
    return F.conv2d(pictures, kernel, bias).permute(0, 2, 3, 1).reshape(count + missing, -1)[:count]
