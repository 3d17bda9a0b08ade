"""Random crop, flip, contrast and brightness for batches of images [N, C, H, W] in [-1, 1].

Augmentation is applied once, before the batches are cut. The paper's batches are fixed across all steps, and that is
what its parallel composition rests on; a fresh augmentation in every epoch would feed new records derived from the
same people into the mechanism, each of which would have to be paid for.

**Paper.** Appendix P names the transformations and no strengths; the defaults are those of TensorFlow's CIFAR-10
tutorial, the usual source of this combination.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stobatch.types import PAPER_RANGE

CONTRAST = (0.2, 1.8)
BRIGHTNESS = 63 / 127.5
"""63 grey levels of 255, in units of [-1, 1]."""


def centre_crop(images: Tensor, size: int) -> Tensor:
    """Return the middle `size` x `size` pixels of each image."""
    top, left = ((length - size) // 2 for length in images.shape[2:])
    return images[:, :, top : top + size, left : left + size]


def random_crop(images: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return a `size` x `size` window of each image, at a place of its own."""
    count, channels, height, width = images.shape
    tops = torch.randint(height - size + 1, (count, 1, 1, 1), generator=generator)
    lefts = torch.randint(width - size + 1, (count, 1, 1, 1), generator=generator)
    rows = tops + torch.arange(size).view(1, 1, -1, 1)
    columns = lefts + torch.arange(size).view(1, 1, 1, -1)
    return images[torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1), rows, columns]


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return each image, or with probability one half its mirror image."""
    mirrored = torch.rand((len(images), 1, 1, 1), generator=generator) < 0.5
    return torch.where(mirrored, images.flip(3), images)


def random_contrast(
    images: Tensor, generator: torch.Generator, *, low: float = CONTRAST[0], high: float = CONTRAST[1]
) -> Tensor:
    """Return each channel stretched about its own mean by one factor per image, then cut off at the range."""
    factor = low + (high - low) * torch.rand((len(images), 1, 1, 1), generator=generator)
    mean = images.mean((2, 3), keepdim=True)
    return ((images - mean) * factor + mean).clamp_(PAPER_RANGE.low, PAPER_RANGE.high)


def random_brightness(images: Tensor, generator: torch.Generator, *, most: float = BRIGHTNESS) -> Tensor:
    """Return each image shifted by one amount in [-most, most], then cut off at the range."""
    shift = most * (2 * torch.rand((len(images), 1, 1, 1), generator=generator) - 1)
    return (images + shift).clamp_(PAPER_RANGE.low, PAPER_RANGE.high)


def three_copies(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return each image, its mirror image, and the image at a random brightness; record i stems from original i // 3.

    **Paper.** Appendix P makes 45,000 training samples of 15,000 images with flip and brightness and does not say how.
    """
    copies = torch.empty((3 * len(images), *images.shape[1:]), dtype=images.dtype)
    copies[0::3] = images
    copies[1::3] = images.flip(3)
    copies[2::3] = random_brightness(images, generator)
    return copies
