"""Images that no camera took: dead leaves, and what untrained generators make of noise. They show no person.

Networks that learn to tell such images apart find edges, corners and colours, which is what the first layers of any
network for pictures find.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

_LEAVES, _SMALLEST, _LARGEST = 60, 0.04, 0.6
"""Leaves of an image, and their half-lengths over the image's side; their sizes follow the law of natural images."""
_AT_ONCE = 256
_IMAGES_PER_GENERATOR = 64
_SHRINK = 4
"""A generator starts from noise of this many times fewer pixels along each side."""


def dead_leaves(count: int, shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Return images [count, C, H, W] in [-1, 1] of ellipses and rectangles of one colour each, later ones on top.

    Half-lengths have a density that falls with the third power, so that an image looks alike at every scale.

    >>> images = dead_leaves(3, (3, 16, 16), torch.Generator().manual_seed(1))
    >>> tuple(images.shape), bool(images.abs().max() <= 1)
    ((3, 3, 16, 16), True)
    """
    starts = range(0, count, _AT_ONCE)
    return torch.cat([_dead_leaves(min(_AT_ONCE, count - start), shape, generator) for start in starts])


def _dead_leaves(count: int, shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    channels, height, width = shape
    y = torch.linspace(0, 1, height).view(1, -1, 1)
    x = torch.linspace(0, 1, width).view(1, 1, -1)
    images = torch.zeros((count, *shape))
    for _ in range(_LEAVES):
        # The inverse of the distribution function 1/a² - u (1/a² - 1/b²) of the half-length.
        u, flat, angle, left, top, round_ = torch.rand((6, count, 1, 1), generator=generator)
        half = (_SMALLEST**-2 - u * (_SMALLEST**-2 - _LARGEST**-2)).rsqrt()
        colour = 2 * torch.rand((count, channels, 1, 1), generator=generator) - 1
        cos, sin = (torch.pi * angle).cos(), (torch.pi * angle).sin()
        along = ((x - left) * cos + (y - top) * sin) / half
        across = ((y - top) * cos - (x - left) * sin) / (half * (0.3 + 0.7 * flat))
        ellipse = along.square() + across.square() < 1
        rectangle = torch.maximum(along.abs(), across.abs()) < 1
        leaf = torch.where(round_ < 0.5, ellipse, rectangle).unsqueeze(1)
        images = torch.where(leaf, colour, images)
    return images


def untrained_generators(count: int, shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Return images [count, C, H, W] in [-1, 1] that convolutions with random weights make of noise.

    Each generator makes 64 images.

    >>> images = untrained_generators(3, (1, 16, 16), torch.Generator().manual_seed(1))
    >>> tuple(images.shape), bool(images.abs().max() <= 1)
    ((3, 1, 16, 16), True)
    """
    starts = range(0, count, _IMAGES_PER_GENERATOR)
    return torch.cat(
        [_random_generator_images(min(_IMAGES_PER_GENERATOR, count - start), shape, generator) for start in starts]
    )


def _random_generator_images(count: int, shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    channels, height, width = shape
    maps, size = 32, (-(-height // _SHRINK), -(-width // _SHRINK))
    values = torch.randn((count, maps, *size), generator=generator)
    for scale in (1, _SHRINK // 2, _SHRINK):
        size = (-(-height * scale // _SHRINK), -(-width * scale // _SHRINK))
        values = F.interpolate(values, size=size, mode="bilinear", align_corners=False)
        values = values + 0.3 * torch.randn(values.shape, generator=generator)
        weights = torch.randn((maps, maps, 3, 3), generator=generator) / (9 * maps) ** 0.5
        values = F.instance_norm(F.leaky_relu(F.conv2d(values, weights, padding=1), 0.2))
    colours = torch.randn((channels, maps, 1, 1), generator=generator) / maps**0.5
    return F.instance_norm(F.conv2d(values, colours)).div(2).clamp(-1, 1)
