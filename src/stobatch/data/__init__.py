"""Data sets as checked tensors in [-1, 1], described before they are read, and cut into fixed disjoint batches."""

from stobatch.data.dataset import Dataset, DatasetInfo, Examples, from_tensors
from stobatch.data.partition import fixed_disjoint_batches, pick_trainers, poisson_sample, trainer_batches
from stobatch.data.sources import data_root, describe, load

__all__ = [
    "Dataset",
    "DatasetInfo",
    "Examples",
    "data_root",
    "describe",
    "fixed_disjoint_batches",
    "from_tensors",
    "load",
    "pick_trainers",
    "poisson_sample",
    "trainer_batches",
]
