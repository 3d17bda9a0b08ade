"""Whose record is whose. Persons are numbers here: what they are called is neither kept nor printed."""

from __future__ import annotations

import csv
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stobatch.errors import DataError
from stobatch.seeds import Stream

MOST_OF_ONE = 0.5
"""The share of the records that one person may own: beyond it the data are that person's alone."""


def person_codes(given: Any, num_records: int) -> Tensor:
    """Return a number for each record, the same for all records of one person: 0, 1, ... in order of first appearance.

    Persons may be told apart by numbers or by texts, in a tensor, an array or a list.

    >>> person_codes(["ann", "bo", "ann", "cy"], 4)
    tensor([0, 1, 0, 2])
    """
    values: Iterable[Hashable] = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
    names = list(values)
    if len(names) != num_records or getattr(given, "ndim", 1) != 1:
        raise DataError(
            f"{len(names)} persons are named for {num_records} training records.",
            why="Every training record belongs to one person.",
            remedy="Give groups with one entry for each training record, in their order.",
        )
    unnamed = [place for place, one in enumerate(names) if one in (None, "") or (isinstance(one, float) and isnan(one))]
    if unnamed:
        raise DataError(
            f"training record {unnamed[0]} names no person.",
            why="All records without a name would be taken for one person's.",
            remedy="Give each of them a person, a new one if it belongs to no other.",
        )
    codes: dict[Hashable, int] = {}
    return torch.tensor([codes.setdefault(one, len(codes)) for one in names], dtype=torch.int64)


def as_dense(codes: Tensor) -> Tensor:
    """Return the same persons numbered without gaps, in their order."""
    return torch.from_numpy(np.unique(codes.numpy(), return_inverse=True)[1].astype(np.int64))


def check_codes(codes: Tensor, num_records: int) -> None:
    """Raise unless there is a number for each record, and every number below the largest is used."""
    form = codes.dtype == torch.int64 and codes.shape == (num_records,)
    if not form or not torch.equal(codes, as_dense(codes)):
        raise DataError(
            "the numbers of persons do not fit the records.",
            why="They are int64, one for each record, and 0, 1, ... without gaps.",
            remedy="Make them with stobatch.data.person_codes.",
        )


@dataclass(frozen=True)
class _Index:
    """The records of each person of a shard: those of person i are rows[starts[i]:starts[i + 1]]."""

    starts: Tensor
    rows: Tensor

    @classmethod
    def of(cls, codes: Tensor, num_persons: int) -> _Index:
        counts = torch.bincount(codes, minlength=num_persons)
        return cls(torch.cat([counts.new_zeros(1), counts.cumsum(0)]), torch.argsort(codes, stable=True))


@dataclass(frozen=True)
class Persons:
    """The persons of some training examples: consecutive numbers, shard by shard, and the records of each.

    **Guarantee.** Every person's records lie in one shard, so that reading the shard gives all of them.
    """

    shards: tuple[range, ...]
    """Persons of each shard of the examples."""
    records: tuple[range, ...]
    """Positions of each shard."""
    codes_of: Callable[[int], Tensor] = field(repr=False)
    """Read the persons of a shard's records, numbered from 0 in the shard."""
    largest: int
    """Records of the person who has the most."""
    _indices: dict[int, _Index] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def in_shards(
        cls,
        records: Sequence[range],
        counts: Sequence[int],
        codes_of: Callable[[int], Tensor],
        largest: int,
    ) -> Persons:
        """Return the persons of shards with these numbers of persons."""
        ends = accumulate(counts, initial=0)
        return cls(tuple(range(*pair) for pair in pairwise(ends)), tuple(records), codes_of, largest)

    @classmethod
    def in_memory(cls, codes: Tensor) -> Persons:
        """Return the persons of records in memory, by their dense numbers."""
        counts = torch.bincount(codes)
        return cls.in_shards(
            [range(len(codes))], [len(counts)], lambda _: codes, int(counts.max()) if len(codes) else 0
        )

    def __len__(self) -> int:
        return self.shards[-1].stop

    def codes(self) -> Tensor:
        """Return the person of every record."""
        return torch.cat([self.codes_of(number) + own.start for number, own in enumerate(self.shards)])

    def rows(self, persons: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of all records of some persons of one shard, person by person, and how many each has."""
        if not len(persons):
            return persons.new_zeros(0), persons.new_zeros(0)
        number = next(number for number, own in enumerate(self.shards) if int(persons[0]) in own)
        own = self.shards[number]
        if number not in self._indices:
            self._indices[number] = _Index.of(self.codes_of(number), len(own))
        index, local = self._indices[number], persons - own.start
        counts = index.starts[local + 1] - index.starts[local]
        within = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        places = index.starts[local].repeat_interleave(counts) + within
        return index.rows[places] + self.records[number].start, counts

    def require_many(self, num_records: int) -> None:
        """Raise where one person owns most of the records."""
        if self.largest > MOST_OF_ONE * num_records:
            raise DataError(
                f"one of {len(self)} persons owns {self.largest} of {num_records} training records.",
                why="A model of these data is a model of that person, whom the guarantee forbids it to show.",
                remedy="Look whether a word for 'unknown' stands in the column of persons: each unknown one needs a "
                "name of its own. Else keep fewer records of that person.",
            )


def few_of_each(counts: Tensor, most: int, stream: Stream) -> Tensor:
    """Return places in a row of all persons' records, at most `most` of each person, chosen uniformly.

    `counts` says how many records each person has in the row. A person's choice depends on secret draws and on the
    number of that person's own records alone.

    >>> from stobatch.seeds import Seeds
    >>> len(few_of_each(torch.tensor([5, 1, 3]), 2, Seeds.reproducible(0).stream("records")))
    5
    """
    total = int(counts.sum())
    if not total or int(counts.max()) <= most:
        return torch.arange(total)
    keys = np.concatenate(list(stream.blocks(total)))
    owners = np.repeat(np.arange(len(counts)), counts.numpy())
    order = np.lexsort((keys, owners))
    rank = np.arange(total) - np.repeat((counts.cumsum(0) - counts).numpy(), counts.numpy())
    return torch.from_numpy(np.sort(order[rank < most]))


COLUMNS = ("image", "label", "person")
_FORM = "image,label,person in its first line, then as train/cat/1.png,cat,p17"


@dataclass(frozen=True)
class PictureOwner:
    """What one line of the table says of a picture."""

    label: str
    person: str


def read_owners(table: Path) -> dict[str, PictureOwner]:
    """Return what the table says of each picture, by its path under the data root, with forward slashes."""
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"cannot read {table}: {reason}.", remedy=f"Give a CSV file in UTF-8 with {_FORM}.") from None
    head = [name.strip() for name in rows[0]] if rows else []
    if sorted(set(COLUMNS) & set(head)) != sorted(COLUMNS) or len(set(head)) < len(head):
        raise DataError(f"{table} has not the columns {', '.join(COLUMNS)}.", remedy=f"Write {_FORM}.")
    places = [head.index(name) for name in COLUMNS]
    owners: dict[str, PictureOwner] = {}
    for number, row in enumerate(rows[1:], 2):
        if not any(cell.strip() for cell in row):
            continue
        values = [row[place].strip() if place < len(row) else "" for place in places]
        image, label, person = values
        if not all(values):
            empty = COLUMNS[values.index("")]
            raise DataError(
                f"line {number} of {table} has no {empty}.",
                why="Pictures without a name would be taken for one person's." if empty == "person" else "",
                remedy="Fill it in; a picture of no other person gets a person of its own.",
            )
        key = image.replace("\\", "/").removeprefix("./")
        if key in owners:
            raise DataError(f"line {number} of {table} names {key} again.", remedy="Keep one line for each picture.")
        owners[key] = PictureOwner(label, person)
    return owners


def codes_of_pictures(root: Path, table: Path, files: Iterable[tuple[Path, int]], names: tuple[str, ...]) -> Tensor:
    """Return the number of each training picture's person; every one has to be in the table, with its class."""
    owners, persons = read_owners(table), []
    for path, label in files:
        key = path.relative_to(root).as_posix()
        owner = owners.get(key)
        if owner is None:
            raise DataError(
                f"{table} has no line for {key}.",
                why="A picture without a person would be protected for itself alone.",
                remedy=f"Add it, as {key},{names[label]},PERSON; `stobatch data check` lists all that are missing.",
            )
        if owner.label != names[label]:
            raise DataError(
                f"{table} says {owner.label} of {key}, which lies in {names[label]}.",
                remedy="Move the picture, or mend the line.",
            )
        persons.append(owner.person)
    return person_codes(persons, len(persons))
