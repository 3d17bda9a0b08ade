"""Whose record is whose: numbers without names, all records of a person found, at most K of them drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

import stobatch
from stobatch.data import Dataset, Examples, person_codes
from stobatch.data.persons import Persons, few_of_each
from stobatch.errors import DataError, SettingError
from stobatch.seeds import Seeds

FALSE_ALARM = 1e-9


def some(groups: Any, count: int = 6, **more: Any) -> Dataset:
    inputs, labels = torch.zeros(count, 1, 4, 4), torch.arange(count) % 2
    return stobatch.from_tensors(inputs, labels, inputs[:2] + 0.5, labels[:2], num_classes=2, groups=groups, **more)


@pytest.mark.parametrize(
    "given",
    [
        ["b", "a", "b", "c", "a", "b"],
        [7, -2, 7, 9, -2, 7],
        np.array([7, -2, 7, 9, -2, 7]),
        torch.tensor([3, 1, 3, 8, 1, 3]),
    ],
)
def test_persons_are_numbers_in_order_of_appearance(given: Any) -> None:
    data = some(given)
    assert isinstance(data.train, Examples)
    assert data.train.groups is not None
    assert data.train.groups.tolist() == [0, 1, 0, 2, 1, 0]
    assert data.info.num_persons == 3
    assert data.train.persons is not None
    assert data.train.persons.largest == 3
    rows, counts = data.train.persons.rows(torch.tensor([0, 2]))
    assert rows.tolist() == [0, 2, 5, 3]
    assert counts.tolist() == [3, 1]


def test_names_are_kept_nowhere() -> None:
    data = some(["Ada Lovelace"] * 2 + ["Ben"] * 2 + ["Cy"] * 2)
    for shown in (repr(data), str(data.info.to_dict()), repr(data.train.persons)):
        assert not any(name in shown for name in ("Ada", "Ben", "Cy"))


def test_without_persons_a_data_set_is_what_it_was() -> None:
    data = some(None)
    assert data.train.persons is None
    assert "num_persons" not in data.info.to_dict()
    with_them = some([0, 1, 2, 3, 4, 5])
    assert data.train.fingerprint() != with_them.train.fingerprint()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1, 2, 3], "3 persons are named for 6"),
        (torch.zeros(6, 2), "6 persons"),
        (["a", "", "b", "b", "a", "c"], "training record 1 names no person"),
        (["a", None, "b", "b", "a", "c"], "training record 1 names no person"),
        ([1.0, 2.0, float("nan"), 1.0, 1.0, 2.0], "training record 2 names no person"),
    ],
)
def test_persons_that_do_not_fit_are_refused(given: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        some(given)


def test_taking_some_records_keeps_whose_they_are() -> None:
    train = some(["b", "a", "b", "c", "a", "b"]).train.in_memory()
    few = train.take(torch.tensor([3, 4, 5]))
    assert few.groups is not None
    assert few.groups.tolist() == [2, 1, 0]
    fewer = train.take(torch.tensor([1, 3, 4]))
    assert fewer.groups is not None
    assert fewer.groups.tolist() == [0, 1, 0]
    with pytest.raises(DataError, match="numbers of persons"):
        Examples(train.inputs, train.labels, 2, groups=torch.tensor([0, 0, 2, 2, 3, 3]))


def test_persons_in_shards_are_numbered_one_shard_after_the_other() -> None:
    codes = [torch.tensor([1, 0, 1]), torch.tensor([0, 1, 2, 0])]
    persons = Persons.in_shards([range(3), range(3, 7)], [2, 3], codes.__getitem__, 2)
    assert persons.shards == (range(2), range(2, 5))
    assert [persons.rows(torch.tensor([person]))[0].tolist() for person in range(5)] == [[1], [0, 2], [3, 6], [4], [5]]
    assert persons.rows(torch.tensor([], dtype=torch.int64))[0].tolist() == []


def test_at_most_k_records_of_each_are_drawn_and_all_equally_often() -> None:
    """Each of 5 records stands in 2 of 5 draws of 2; a false alarm has probability below 1e-9."""
    counts, draws = torch.tensor([1, 5, 2]), 2000
    found = torch.zeros(8, dtype=torch.int64)
    for number in range(draws):
        places = few_of_each(counts, 2, Seeds.reproducible(5).stream("records", number))
        assert len(places) == 5
        assert torch.equal(places, places.sort().values)
        found[places] += 1
    assert found[[0, 6, 7]].tolist() == [draws] * 3
    low, high = binom.ppf(FALSE_ALARM / 10, draws, 0.4), binom.isf(FALSE_ALARM / 10, draws, 0.4)
    assert low <= int(found[1:6].min()) <= int(found[1:6].max()) <= high
    # The broken twin: always the first ones.
    assert not low <= draws <= high


def private(**changes: Any) -> stobatch.RunConfig:
    config = stobatch.RunConfig.from_dict(
        {
            "method": {"name": "dpsgd", "epsilon": 3.0, "delta": 1e-3, "batch_size": 2},
            "data": {"name": "tensors"},
            "model": {"architecture": "linear"},
            "training": {"steps": 2, "optimiser": "sgd", "learning_rate": 0.1},
        }
    )
    return config.override_all(changes)


def test_a_person_who_owns_most_of_the_data_is_refused_and_nothing_is_written(tmp_path: Any) -> None:
    data = some([0] * 31 + list(range(1, 30)), 60)
    with pytest.raises(DataError, match="one of 30 persons owns 31 of 60") as caught:
        stobatch.train(private(**{"data.allow_overlap": True}), tmp_path / "run", dataset=data, quiet=True)
    assert "unknown" in caught.value.remedy
    assert not (tmp_path / "run").exists()
    halves = some([0] * 30 + list(range(1, 31)), 60)
    stobatch.train(private(**{"data.allow_overlap": True}), tmp_path / "run", dataset=halves, quiet=True)


@pytest.mark.parametrize("name", ["published", "adlm"])
def test_a_claim_about_records_is_not_made_for_persons(name: str) -> None:
    method = {"name": name, "batch_size": 3}
    config = stobatch.RunConfig.from_dict({"method": method, "data": {"name": "tensors"}, "training": {"steps": 2}})
    inputs, labels = torch.rand(60, 1, 28, 28), torch.arange(60) % 10
    data = stobatch.from_tensors(inputs * 2 - 1, labels, inputs, labels, num_classes=10, groups=list(range(30)) * 2)
    more = {"method.delta": 1e-3, "method.epsilon": 30.0, "method.relevance_batch_size": 30, "training.steps": 100}
    config = config.override_all(more if name == "adlm" else {})
    with pytest.raises(SettingError, match="has no guarantee for persons"):
        stobatch.plan(config, dataset=data)


def test_the_number_of_persons_enters_the_plan_and_that_of_records_does_not() -> None:
    few, many = (some([person for person in range(20) for _ in range(each)], 20 * each) for each in (2, 6))
    plans = [stobatch.plan(private(), dataset=data) for data in (few, many)]
    assert [plan.guarantee.unit for plan in plans] == ["person", "person"]
    assert plans[0].guarantee.epsilon == plans[1].guarantee.epsilon
    assert "per person" in str(plans[0].guarantee)
    alone = stobatch.plan(private(), dataset=some(None, 20))
    assert alone.guarantee.epsilon == plans[0].guarantee.epsilon
    assert alone.guarantee.unit == "training example"
    with pytest.raises(SettingError, match="does not fit 20 persons"):
        stobatch.plan(private(**{"method.batch_size": 21}), dataset=few)
    with pytest.raises(SettingError, match="1 / num_persons"):
        stobatch.plan(private(**{"method.delta": 0.05}), dataset=many)


def test_codes_are_made_again_from_themselves() -> None:
    assert person_codes(torch.tensor([2, 0, 2]), 3).tolist() == [0, 1, 0]
