"""Training records that are kept aside: a run draws its own, from its seeds, and does not train on them.

Which records are held out depends on their positions and on secret numbers alone. So a record is trained on or held
out, never both, and whether another record is there changes neither. Where records have persons, all of this is said
of persons: everything that a person has is held out, or nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from stobatch.config import DataConfig
from stobatch.data.dataset import Dataset, DatasetInfo, Examples
from stobatch.errors import DataError
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
        # How many records those have who are left is for nobody to know: it depends on who is held out.
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
