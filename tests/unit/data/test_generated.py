"""Generated images: in range, the same from the same generator, and with the structure that they are made for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stobatch.data.generated import dead_leaves, untrained_generators

MAKERS = (dead_leaves, untrained_generators)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 13, 20)])
def test_images_are_in_range_and_repeat(make: Callable[..., Tensor], shape: tuple[int, int, int]) -> None:
    images, again, other = (make(70, shape, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert images.shape == (70, *shape)
    assert float(images.abs().max()) <= 1
    assert torch.equal(images, again)
    assert not torch.equal(images, other)
    assert len({image.numpy().tobytes() for image in images}) == 70


def test_dead_leaves_are_flat_but_for_edges() -> None:
    images = dead_leaves(50, (1, 32, 32), torch.Generator().manual_seed(0))
    steps = (images[..., 1:] - images[..., :-1]).abs()
    assert float((steps == 0).float().mean()) > 0.6
    assert float(steps.max()) > 1


def test_generators_make_textures_and_no_noise() -> None:
    images = untrained_generators(128, (3, 32, 32), torch.Generator().manual_seed(0))
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))

    def likeness(values: Tensor) -> float:
        """Of neighbours along a row."""
        return float((values[..., 1:] * values[..., :-1]).mean() / values.square().mean())

    assert likeness(images) > 0.3 > likeness(noise)
