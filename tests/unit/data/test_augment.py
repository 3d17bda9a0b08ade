from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stobatch.data.augmentation import (
    centre_crop,
    random_brightness,
    random_contrast,
    random_crop,
    random_flip,
    three_copies,
)

Augmentation = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
ALL: list[tuple[Augmentation, int]] = [
    (lambda x, g: random_crop(x, 5, g), 1),
    (random_flip, 1),
    (random_contrast, 1),
    (random_brightness, 1),
    (three_copies, 3),
]


def batch(seed: int, count: int = 6) -> torch.Tensor:
    """Images that fill the whole range, both ends included."""
    values = 2.4 * torch.rand(count, 3, 8, 7, generator=torch.Generator().manual_seed(seed)) - 1.2
    return values.clamp(-1, 1)


@pytest.mark.parametrize(("augment", "copies"), ALL)
@given(seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_range_count_and_determinism(augment: Augmentation, copies: int, seed: int) -> None:
    images = batch(seed)
    before = images.clone()
    result = augment(images, torch.Generator().manual_seed(seed))
    assert len(result) == copies * len(images)
    assert result.dtype == torch.float32
    assert result.isfinite().all()
    assert result.abs().max() <= 1
    assert torch.equal(result, augment(images, torch.Generator().manual_seed(seed)))
    assert torch.equal(images, before)


@pytest.mark.parametrize(("augment", "copies"), ALL)
def test_another_seed_gives_another_result(augment: Augmentation, copies: int) -> None:
    first, second = (augment(batch(0, 40), torch.Generator().manual_seed(seed)) for seed in (1, 2))
    assert not torch.equal(first, second)


def test_every_crop_is_a_window_of_its_own_image(generator: torch.Generator) -> None:
    images = batch(3, 30)
    places = set()
    for image, crop in zip(images, random_crop(images, 5, generator), strict=True):
        windows = [(t, l) for t in range(4) for l in range(3) if torch.equal(image[:, t : t + 5, l : l + 5], crop)]  # noqa: E741
        assert len(windows) == 1
        places.update(windows)
    assert len(places) > 6


def test_every_flip_is_the_image_or_its_mirror(generator: torch.Generator) -> None:
    images = batch(4, 64)
    flipped = [
        torch.equal(result, image.flip(2))
        for image, result in zip(images, random_flip(images, generator), strict=True)
        if not torch.equal(result, image)
    ]
    assert all(flipped)
    assert 0 < len(flipped) < 64


def test_centre_crop_takes_the_middle() -> None:
    images = torch.arange(32.0).repeat(1, 1, 32, 1)
    assert centre_crop(images, 28)[0, 0, 0].tolist() == list(range(2, 30))


def test_strength_one_and_zero_change_nothing(generator: torch.Generator) -> None:
    images = batch(5)
    assert torch.allclose(random_contrast(images, generator, low=1, high=1), images, atol=1e-6)
    assert torch.equal(random_brightness(images, generator, most=0), images)
