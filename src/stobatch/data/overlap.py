"""Records that occur twice.

A test record that is a training record says nothing about new ones. A person with two training records is protected
less than a guarantee per record says. Weights that were trained on a private record are no public start.

A copy is a record whose inputs are those of a training record, to the bit; labels and near copies are not looked at.
How many there are is a function of the private training data without noise, so it is told to the owner alone: by a
refusal, before anything is written, or in `private/`. What is published says only what was looked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from stobatch.config import DataConfig
from stobatch.data.dataset import Dataset, Examples, TrainingExamples, chunks
from stobatch.data.shards import ShardedExamples, read_test
from stobatch.data.sources import is_public
from stobatch.errors import DataError
from stobatch.registry import DATA_SETS

_DIGEST_SIZE = 16
HARMLESS = 1000
"""One copy in this many test records may be chance, and moves an accuracy by a tenth of a point at most."""


def count_copies(dataset: Dataset) -> int:
    """Return how many test records are training records; shards that were counted when written are not read again."""
    train, test = dataset.train, dataset.test
    if isinstance(train, ShardedExamples) and train.manifest.test_copies is not None:
        manifest, counted = train.manifest, train.manifest.test_copies
        if len(test) <= manifest.test.count and test.inputs.equal(read_test(manifest, len(test)).inputs):
            return counted
    return len(find_copies(train, test))


def require_apart(dataset: Dataset, config: DataConfig) -> int:
    """Raise where more test records are training records than chance explains; return how many there are.

    With `data.allow_overlap` nothing is refused, and `statement` says that accuracies may be those of copies.
    """
    copies, records = count_copies(dataset), len(dataset.test)
    if copies * HARMLESS > records and not config.allow_overlap:
        raise DataError(
            f"{copies} of {records} test records are training records, to the bit.",
            why="An accuracy on them says nothing about new records.",
            remedy="Remove them from the training records, or set data.allow_overlap=true: every report then says so.",
        )
    return copies


def is_own(config: DataConfig) -> bool:
    """Return whether the split into training and test records is the user's, not that of a public data set."""
    return not is_public(config.name)


def statement(config: DataConfig, *, own: bool) -> str:
    """Say what is known about copies among the test records, from public settings alone."""
    if not own:
        counted = DATA_SETS[config.name].test_copies
        number = "they were not counted here" if counted is None else f"{counted} test records are training records"
        return f"the split is the one that {config.name} comes with; exact copies across it: {number}"
    if config.allow_overlap:
        return (
            "test records may be training records (data.allow_overlap): accuracies may be those of records that were "
            "trained on"
        )
    return (
        f"at most one in {HARMLESS:,} test records is a training record: exact copies were looked for where the data "
        "are, near copies were not"
    )


def find_copies(train: TrainingExamples, test: Examples) -> list[int]:
    """Return the positions of test records whose inputs are those of a training record, to the bit.

    **Guarantee.** Every copy is found. That another record is taken for one would be a collision of BLAKE2b. Training
    records are read in chunks, so they may be larger than memory.
    """
    digests = _digest_each(test.inputs)
    wanted, met = set(digests), set[bytes]()
    for inputs, _ in chunks(train):
        met |= wanted.intersection(_digest_each(inputs))
    return [place for place, digest in enumerate(digests) if digest in met]


def find_repeated_records(
    train: TrainingExamples, *, advance: Callable[[int], object] = lambda records: None
) -> list[list[int]]:
    """Return the positions of each training record (inputs and label) that occurs more than once.

    **Guarantee.** As for `find_copies`; memory holds a digest for each record.
    """
    first: dict[bytes, int] = {}
    groups: dict[int, list[int]] = {}
    start = 0
    for inputs, labels in chunks(train):
        for place, (digest, label) in enumerate(zip(_digest_each(inputs), labels.tolist(), strict=True), start):
            earliest = first.setdefault(digest + label.to_bytes(4, "little"), place)
            if earliest != place:
                groups.setdefault(earliest, [earliest]).append(place)
        start += len(labels)
        advance(len(labels))
    return list(groups.values())


def digest_records(inputs: Tensor) -> Tensor:
    """Return the digests of different records as bytes [M, 16], in an order that says nothing about that of records."""
    digests = sorted(set(_digest_each(inputs)))
    return torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).view(-1, _DIGEST_SIZE)


def count_seen(train: TrainingExamples, digests: Tensor) -> int:
    """Return how many training records are among those with these digests.

    **Guarantee.** As for `find_copies`: every copy is counted.
    """
    seen = {row.tobytes() for row in digests.numpy()}
    return sum(digest in seen for inputs, _ in chunks(train) for digest in _digest_each(inputs))


def _digest_each(inputs: Tensor) -> list[bytes]:
    """Return a digest for each record; -0.0 is no other value than 0.0, and adding 0 makes it that."""
    rows = (inputs.detach().cpu() + 0.0).flatten(1).contiguous().numpy()
    return [hashlib.blake2b(row.data, digest_size=_DIGEST_SIZE).digest() for row in rows]
