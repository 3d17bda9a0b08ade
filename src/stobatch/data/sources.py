"""The data sets by name: describe one without reading its images, load it, and hold records of it out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from stobatch.config import DataConfig
from stobatch.data.dataset import Dataset, DatasetInfo, Examples, Stream, TrainingExamples
from stobatch.errors import DataError
from stobatch.registry import DATA_SETS
from stobatch.seeds import Seeds


def without_held_out(info: DatasetInfo, config: DataConfig) -> DatasetInfo:
    """Return the description of what is left to train on."""
    if not config.held_out:
        return info
    if info.copies != 1:
        raise DataError(
            f"data.held_out={config.held_out} is not for augmented copies.",
            why="A record with copies on both sides would be in the training and in the score.",
            remedy="Hold out nothing, or set data.augment=false and method.augmentations.",
        )
    whole, word = info.num_train, "training records"
    if info.num_persons is not None:
        whole, word = info.num_persons, "persons"
    if config.held_out >= whole:
        raise DataError(
            f"data.held_out={config.held_out} leaves nothing of {whole} {word}.", remedy="Hold out a tenth of them."
        )
    if info.num_persons is not None:
        # The number of records of those who are left stays secret: it depends on who is held out.
        return replace(info, num_persons=whole - config.held_out)
    return replace(info, num_train=whole - config.held_out)


def hold_out(dataset: Dataset, config: DataConfig, seeds: Seeds) -> tuple[Dataset, Examples | None]:
    """Return a data set without the records that these seeds hold out, and those records."""
    if not config.held_out:
        return dataset, None
    info = without_held_out(dataset.info, config)
    train = dataset.train
    if not isinstance(train, Examples):
        raise DataError(
            f"data.held_out={config.held_out} is not for shards.",
            why="Records are held out one by one, and shards are read whole.",
            remedy="Hand over data that fit into memory.",
        )
    units = len(train) if train.persons is None else len(train.persons)
    order = seeds.philox("data", "held out").permutation(units)
    held, kept = (torch.from_numpy(np.sort(part)) for part in np.split(order, [config.held_out]))
    if train.groups is not None:
        held, kept = (torch.isin(train.groups, part).nonzero().flatten() for part in (held, kept))
    return Dataset(info, train.take(kept), dataset.test), train.take(held)


@dataclass(frozen=True)
class Source:
    """How one data set is described and read. `read` gets a generator exactly when it has to augment.

    `stream` reads it in chunks; only a set that may be larger than memory needs one.
    """

    describe: Callable[[DataConfig, Path], DatasetInfo]
    read: Callable[[DatasetInfo, Path, torch.Generator | None], tuple[TrainingExamples, Examples]]
    can_augment: bool
    fetch: Callable[[Path], None] = lambda root: None
    stream: Callable[[DatasetInfo, Path], Stream] | None = None
    public: bool = False
    """Whether anyone can download it; if not, pictures of it are for their owner alone."""
    test_copies: int | None = None
    """Test records that are training records, where they were counted; of a public set, whose split is given."""


def _refuse_by_name(*_: object) -> NoReturn:
    raise DataError(
        "data set 'tensors' has no files.",
        why="It is handed over in Python.",
        remedy="Build it with stobatch.data.from_tensors(...) and pass the result on.",
    )


HANDED_OVER = Source(_refuse_by_name, _refuse_by_name, can_augment=True, fetch=_refuse_by_name)


def is_public(name: str) -> bool:
    """Return whether anyone can download these data: digests and pictures of test images tell nothing new."""
    return name in DATA_SETS and bool(DATA_SETS[name].public)


def data_root(root: Path | None = None) -> Path:
    """Return where data sets lie: the argument, else STOBATCH_DATA, else ./data."""
    return Path(root or os.environ.get("STOBATCH_DATA") or "data").expanduser()


def describe(config: DataConfig, root: Path | None = None) -> DatasetInfo:
    """Return what `load` will return, without reading an image: the privacy plan is made before the data is.

    >>> info = describe(DataConfig(name="cifar10", num_classes=2, test_limit=100))
    >>> info.input_shape, info.num_train, info.num_test, info.class_names
    ((3, 28, 28), 10000, 100, ('airplane', 'automobile'))
    """
    return without_held_out(_describe_all(config, root), config)


def _describe_all(config: DataConfig, root: Path | None) -> DatasetInfo:
    """Return the description with what is held out."""
    info = _source(config).describe(config, data_root(root))
    return replace(
        info,
        num_train=min(info.num_train, config.train_limit or info.num_train),
        num_test=min(info.num_test, config.test_limit or info.num_test),
    )


def load(config: DataConfig, *, root: Path | None = None, seeds: Seeds | None = None) -> Dataset:
    """Read a data set, keep its first classes, augment it once, cut it to its limits, and hold records out.

    A limit counts training records after augmentation. `seeds` makes augmentation and choice reproducible; without it
    the randomness is secret, as everywhere.
    """
    _source(config).fetch(data_root(root))
    info, secret = _describe_all(config, root), seeds or Seeds.secret()
    generator = secret.generator("data", "augment") if config.augment else None
    train, test = _source(config).read(info, data_root(root), generator)
    return hold_out(Dataset(info, train, test), config, secret)[0]


def stream(config: DataConfig, *, root: Path | None = None, seeds: Seeds | None = None) -> Stream:
    """Return what `load` returns, in chunks: never held as a whole where the set may be larger than memory."""
    source = _source(config)
    if source.stream is None:
        return Stream.of(load(config, root=root, seeds=seeds))
    return source.stream(describe(config, root), data_root(root))


def _source(config: DataConfig) -> Source:
    source: Source = DATA_SETS.require(config.name)
    if config.manifest is not None and config.name != "image_folder":
        raise DataError(
            f"data.manifest is not for {config.name}.",
            why="It says whose the pictures of an image folder are.",
            remedy="Set data.name=image_folder, or hand over persons in Python: from_tensors(..., groups=...).",
        )
    if config.classes is not None and config.name != "image_folder":
        raise DataError(
            f"data.classes is not for {config.name}.",
            why="It names the class folders of pictures.",
            remedy="Set data.name=image_folder, or name classes in Python: from_tensors(..., class_names=...).",
        )
    if config.augment and not source.can_augment:
        raise DataError(
            f"there is no augmentation for {config.name}.",
            why="Appendix P augments CIFAR-10 and Tiny ImageNet only.",
            remedy="Set data.augment=false.",
        )
    return source
