"""Data sets as checked tensors in [-1, 1], described before they are read, and cut into fixed disjoint batches."""

from stobatch.data.dataset import (
    Dataset,
    DatasetInfo,
    Examples,
    Stream,
    TrainingExamples,
    from_tensors,
    require_dataset,
)
from stobatch.data.overlap import find_repeated_records
from stobatch.data.partition import fixed_disjoint_batches, pick_trainers, poisson_sample, trainer_batches
from stobatch.data.persons import Persons, person_codes
from stobatch.data.shard_writing import write_shards
from stobatch.data.shards import Manifest, ShardedExamples
from stobatch.data.sources import Source, data_root, describe, hold_out, load, stream, without_held_out
