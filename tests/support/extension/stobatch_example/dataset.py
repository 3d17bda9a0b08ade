"""Grey pictures with a bright bar, across or upright; drawn when they are read, so that there is no file."""

from pathlib import Path

import torch

from stobatch.config import DataConfig
from stobatch.data import DatasetInfo, Examples, Source

SHAPE = (1, 8, 8)


def describe(config: DataConfig, root: Path) -> DatasetInfo:
    """What a plan needs to know, without reading an image."""
    return DatasetInfo("bars", SHAPE, 2, num_train=600, num_test=200, class_names=("across", "upright"))


def read(info: DatasetInfo, root: Path, generator: torch.Generator | None) -> tuple[Examples, Examples]:
    """As many training and test examples as `info` says, in [-1, 1]; `generator` is for augmentation alone."""
    return _draw(info.num_train, "train"), _draw(info.num_test, "test")


def _draw(count: int, part: str) -> Examples:
    random = torch.Generator().manual_seed(len(part))
    inputs = torch.rand((count, *SHAPE), generator=random) - 0.75
    labels, places = torch.randint(2, (count,), generator=random), torch.randint(8, (count,), generator=random)
    for image, label, place in zip(inputs, labels, places, strict=True):
        image[0].select(int(label), int(place)).add_(0.75)
    return Examples(inputs, labels, num_classes=2)


BARS = Source(describe, read, can_augment=False)
