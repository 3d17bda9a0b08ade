"""The pair that an audit trains on: neighbours in the claim's own relation, and as far apart as one record can be."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stobatch.auditing.neighbours import Pair, pattern_like, require_relation, worst_case
from stobatch.data import Examples
from stobatch.errors import DataError, UnitError
from stobatch.types import Neighbours

REPLACE, ADD = Neighbours.REPLACE_ONE, Neighbours.ADD_REMOVE
RELATIONS = pytest.mark.parametrize("relation", [REPLACE, ADD])


def digits(count: int, classes: int, seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, 1, 5, 5, generator=generator) * 2 - 1
    return Examples(inputs, torch.randint(classes, (count,), generator=generator), classes)


def records(pair: Pair, world: int) -> Counter[tuple[object, ...]]:
    """A data set as what neighbours are defined on: its records with their multiplicity, in no order."""
    own = pair.pool.take(pair.members(world))
    rows = zip(own.inputs.flatten(1).tolist(), own.labels.tolist(), strict=True)
    return Counter((*pixels, label) for pixels, label in rows)


def apart(pair: Pair) -> tuple[int, int]:
    """Records that only the first data set has, and that only the second has."""
    first, second = records(pair, 0), records(pair, 1)
    return (first - second).total(), (second - first).total()


@RELATIONS
@given(count=st.integers(2, 30), classes=st.integers(3, 12), seed=st.integers(0, 2**31))
def test_the_two_data_sets_are_neighbours(relation: Neighbours, count: int, classes: int, seed: int) -> None:
    pair = worst_case(digits(count, classes, seed), relation)
    assert apart(pair) == ((1, 1) if relation is REPLACE else (0, 1))
    assert pair.relation is relation
    # Replace-one neighbours have one size; the plan is made for the smaller data set otherwise.
    assert pair.size == len(pair.without) == count
    assert len(pair.with_) == (count if relation is REPLACE else count + 1)
    for world in (0, 1):
        assert len(pair.members(world).unique()) == len(pair.members(world)), "a record is there twice"


def test_pairs_that_are_not_neighbours_are_caught() -> None:
    """Broken twins: two records replaced, or none."""
    pair = worst_case(digits(12, 5), REPLACE)
    two = torch.cat([torch.arange(10), torch.tensor([12, 12])])
    assert apart(pair) == (1, 1)
    assert apart(Pair(REPLACE, pair.pool, pair.without, two)) == (2, 2)
    assert apart(Pair(REPLACE, pair.pool, pair.without, pair.without.flip(0))) == (0, 0)


@RELATIONS
def test_the_canary_is_the_record_in_which_they_differ(relation: Neighbours) -> None:
    pair = worst_case(digits(20, 6), relation)
    inputs, labels = pair.canary
    assert inputs.shape == (1, 1, 5, 5)
    only_there = records(pair, 1) - records(pair, 0)
    assert list(only_there) == [(*inputs.flatten().tolist(), int(labels))]
    assert int(labels) == 1
    if relation is REPLACE:
        (only_here,) = records(pair, 0) - records(pair, 1)
        # The same picture with another label: nothing but the label tells the two apart.
        assert only_here == (*inputs.flatten().tolist(), pair.instead)
        assert pair.instead == 0
    else:
        assert pair.instead is None


@RELATIONS
@given(count=st.integers(2, 30), classes=st.integers(3, 12), seed=st.integers(0, 2**31))
def test_no_other_record_has_a_label_of_the_canary(relation: Neighbours, count: int, classes: int, seed: int) -> None:
    data = digits(count, classes, seed)
    pair = worst_case(data, relation)
    rest = count - 1 if relation is REPLACE else count
    assert torch.equal(pair.pool.inputs[:rest], data.inputs[:rest])
    assert set(pair.pool.labels[:rest].tolist()) <= set(range(2, classes))
    assert pair.pool.num_classes == classes


def test_the_pattern_is_black_and_white_and_the_same_for_everyone() -> None:
    one = pattern_like(torch.zeros(3, 1, 8, 8))
    assert one.shape == (1, 1, 8, 8)
    assert set(one.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(one, pattern_like(torch.ones(50, 1, 8, 8)))


@pytest.mark.parametrize(("count", "classes"), [(1, 10), (20, 2)])
@RELATIONS
def test_data_without_room_for_a_canary_are_refused(relation: Neighbours, count: int, classes: int) -> None:
    with pytest.raises(
        DataError, match=f"{count} records of {classes} classes make no worst-case neighbours"
    ) as caught:
        worst_case(digits(count, classes), relation)
    assert "three classes" in caught.value.remedy


@RELATIONS
def test_the_relation_is_the_claims_own(relation: Neighbours) -> None:
    other = ADD if relation is REPLACE else REPLACE
    assert require_relation(None, relation) is relation
    assert require_relation(str(relation), relation) is relation
    with pytest.raises(UnitError, match=f"the claim is about {relation} neighbours, you ask about {other}") as caught:
        require_relation(str(other), relation)
    assert str(relation) in caught.value.remedy
