"""Two neighbouring data sets that are as easy to tell apart as an auditor can make them.

Differential privacy is a promise about every pair of neighbours, so the auditor may choose the pair. The record in
which they differ is a pattern of black and white that no digit looks like, with a label that no other record has.
Where the promise is about persons they differ in a person, all of whose records are that pattern.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stobatch.data import Examples
from stobatch.errors import DataError, UnitError
from stobatch.types import Neighbours


@dataclass(frozen=True)
class Pair:
    """`pool` holds the records of both data sets; `without` and `with_` say which of them are in each."""

    relation: Neighbours
    pool: Examples
    without: Tensor
    with_: Tensor
    canary_records: int = 1

    @property
    def canary(self) -> tuple[Tensor, Tensor]:
        """Return the record, or the records of the person, that only the second data set has."""
        return self.pool.inputs[-self.canary_records :], self.pool.labels[-self.canary_records :]

    @property
    def first(self) -> Examples:
        """Return the first data set, which the plan is made for."""
        return self.pool.take(self.without)

    @property
    def instead(self) -> int | None:
        """Return the label that the same pattern has in the first data set; None if it is not there at all."""
        return int(self.pool.labels[-2]) if self.relation is Neighbours.REPLACE_ONE else None

    @property
    def size(self) -> int:
        """Return the number of records of the first data set, which the plan is made for."""
        return len(self.without)

    def members(self, world: int) -> Tensor:
        return self.with_ if world else self.without


def require_relation(asked: str | None, claimed: Neighbours) -> Neighbours:
    """Return the claim's own relation; asking about the other one is an error, because its ε is another number."""
    if asked is not None and Neighbours(asked) is not claimed:
        raise UnitError(
            f"the claim is about {claimed} neighbours, you ask about {asked}.",
            why="Replacing a record is removing one and adding one: the two ε differ by up to a factor of two.",
            remedy=f"Leave audit.neighbours unset, or set it to {claimed}.",
        )
    return claimed


def worst_case(records: Examples, relation: Neighbours, canary_records: int = 1) -> Pair:
    """Return all records for the first data set, and a canary whose label no other record has.

    Replace-one: the last record becomes the pattern, labelled 0 in the first data set and 1 in the second.
    Add-or-remove: the second data set has the pattern, labelled 1, on top; where records have persons, `canary_records`
    of them, as one more person.
    """
    replace = relation is Neighbours.REPLACE_ONE
    if records.num_classes < 3 or len(records) < 2:
        raise DataError(
            f"{len(records)} records of {records.num_classes} classes make no worst-case neighbours.",
            why="The canary's labels 0 and 1 must have no other record.",
            remedy="Use data with at least three classes and two records.",
        )
    pattern = pattern_like(records.inputs)
    rest = len(records) - 1 if replace else len(records)
    labels = torch.tensor([0, 1] if replace else [1] * canary_records)
    groups = None
    if records.groups is not None and not replace:
        groups = torch.cat([records.groups, (records.groups.max() + 1).expand(canary_records)])
    pool = Examples(
        torch.cat([records.inputs[:rest], pattern.expand(len(labels), *pattern.shape[1:])]),
        torch.cat([2 + records.labels[:rest] % (records.num_classes - 2), labels]),
        records.num_classes,
        groups=groups,
    )
    everyone = torch.arange(rest)
    if replace:
        first, second = (torch.cat([everyone, torch.tensor([place])]) for place in (rest, rest + 1))
        return Pair(relation, pool, first, second)
    return Pair(relation, pool, everyone, torch.arange(len(pool)), canary_records)


def pattern_like(inputs: Tensor) -> Tensor:
    """Return black and white pixels, drawn with a fixed seed: [1, ...]."""
    return torch.rand(1, *inputs.shape[1:], generator=torch.Generator().manual_seed(7)).round() * 2 - 1
