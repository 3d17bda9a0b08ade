"""Kernels for GPUs, in Triton, which comes with PyTorch for CUDA. Imported where a GPU computes, and nowhere else."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

_TILE, _POSITIONS = 128, 64
"""Channels on both sides of a tile, and positions of one product."""
_WAVES = 6
"""Programs for each processor of the card: the last ones to end leave little of it idle."""


@triton.jit  # type: ignore[untyped-decorator]
def _products(  # type: ignore[no-untyped-def]
    inputs,
    gradients,
    found,
    positions,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    MAPS: tl.constexpr,
    SIDE: tl.constexpr,
    PADDING: tl.constexpr,
    SHARES: tl.constexpr,
    TILE: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Sum a share of the positions, for one place of the kernel and a tile of maps by channels."""
    number, share = tl.program_id(0), tl.program_id(1)
    tiles: tl.constexpr = CHANNELS // TILE
    each: tl.constexpr = (MAPS // TILE) * tiles
    place, tile = number // each, number % each
    down, right = place // SIDE - PADDING, place % SIDE - PADDING
    maps = (tile // tiles) * TILE + tl.arange(0, TILE)
    channels = (tile % tiles) * TILE + tl.arange(0, TILE)
    length = tl.cdiv(tl.cdiv(positions, SHARES), POSITIONS) * POSITIONS
    first = share * length
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(first, tl.minimum(first + length, positions), POSITIONS):
        at = (start + tl.arange(0, POSITIONS)).to(tl.int64)
        there = at < positions
        image, within = at // (OUT_HEIGHT * OUT_WIDTH), at % (OUT_HEIGHT * OUT_WIDTH)
        row, column = within // OUT_WIDTH + down, within % OUT_WIDTH + right
        inside = there & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
        pixel = (image * HEIGHT + row) * WIDTH + column
        by_outputs = tl.load(gradients + at[:, None] * MAPS + maps[None, :], mask=there[:, None], other=0.0)
        values = tl.load(inputs + pixel[:, None] * CHANNELS + channels[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(tl.trans(by_outputs), values, total)
    row_of = (share * SIDE * SIDE + place) * MAPS + maps
    tl.store(found + row_of[:, None] * CHANNELS + channels[None, :], total)


def sum_of_products(inputs: Tensor, gradients: Tensor, side: int, padding: int) -> Tensor:
    """Return the gradient by weights of a convolution with stride 1, in float32."""
    rows, channels, height, width = inputs.shape
    maps, out_height, out_width = gradients.shape[1:]
    inputs, gradients = (values.contiguous(memory_format=torch.channels_last) for values in (inputs, gradients))
    tiles = side**2 * (maps // _TILE) * (channels // _TILE)
    shares = max(1, _WAVES * torch.cuda.get_device_properties(inputs.device).multi_processor_count // tiles)
    found = inputs.new_empty(shares, side, side, maps, channels, dtype=torch.float32)
    positions = rows * out_height * out_width
    shape = (height, width, out_height, out_width, channels, maps, side, padding, shares)
    with torch.cuda.device(inputs.device):
        _products[tiles, shares](
            inputs, gradients, found, positions, *shape, _TILE, _POSITIONS, num_warps=4, num_stages=3
        )
    return found.sum(0).permute(2, 3, 0, 1).contiguous()
