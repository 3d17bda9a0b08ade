"""Shards on disk give what memory gives, to the bit, and open what is asked for."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stobatch.config import DataConfig
from stobatch.data import (
    Dataset,
    Manifest,
    ShardedExamples,
    describe,
    find_repeated_records,
    from_tensors,
    load,
    write_shards,
)
from stobatch.data.shard_writing import deal
from stobatch.seeds import Seeds

SEEDS = Seeds.reproducible(5)


def source_order(count: int, num_shards: int) -> torch.Tensor:
    """Which record of the source lies at each position: an oracle that sorts by shard."""
    shards = deal(count, 1, num_shards, SEEDS)
    return torch.tensor(sorted(range(count), key=lambda index: (shards[index], index)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, floats: Dataset) -> ShardedExamples:
    return ShardedExamples(write_shards(floats, tmp_path_factory.mktemp("whole") / "shards", 5, SEEDS))


def opened(folder: Path) -> ShardedExamples:
    return ShardedExamples(Manifest.read(folder))


def test_mnist_is_stored_as_bytes_and_comes_back_to_the_bit(tmp_path: Path) -> None:
    data = load(DataConfig())
    manifest = write_shards(data, tmp_path / "mnist", 7, SEEDS)
    assert manifest.encoding == "uint8"
    again = load(DataConfig(name="shards"), root=tmp_path / "mnist")
    assert again.info == data.info
    order = source_order(60_000, 7)
    inputs, labels = again.train.fetch(torch.arange(60_000))
    expected = data.train.in_memory().take(order)
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs.view(torch.int32), expected.inputs.view(torch.int32))
    assert torch.equal(labels, expected.labels)
    assert torch.equal(again.test.inputs.view(torch.int32), data.test.inputs.view(torch.int32))
    assert torch.equal(again.test.labels, data.test.labels)
    assert again.train.in_memory().fingerprint() == expected.fingerprint()


def test_floats_come_back_to_the_bit(folder: Path, floats: Dataset) -> None:
    order = source_order(60, 4)
    assert Manifest.read(folder).encoding == "float32"
    back = opened(folder).in_memory()
    assert torch.equal(back.inputs.view(torch.int32), floats.train.in_memory().inputs[order].view(torch.int32))
    assert torch.equal(back.labels, floats.train.in_memory().labels[order])


def test_shards_cover_the_positions_and_know_their_fingerprint(folder: Path, tmp_path: Path, floats: Dataset) -> None:
    examples = opened(folder)
    assert [position for rows in examples.shards for position in rows] == list(range(60))
    assert {len(rows) for rows in examples.shards} == {15}
    assert len(examples) == 60
    assert examples.input_shape == (2, 3, 5)
    other = ShardedExamples(write_shards(floats, tmp_path / "other", 4, Seeds.reproducible(6)))
    assert examples.fingerprint() == opened(folder).fingerprint() != other.fingerprint()


@given(rows=st.lists(st.integers(0, 59), max_size=90))
def test_rows_in_any_order_are_those_of_memory(whole: ShardedExamples, rows: list[int]) -> None:
    wanted = torch.tensor(rows, dtype=torch.int64)
    for found, expected in zip(whole.fetch(wanted), whole.in_memory().fetch(wanted), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [torch.tensor([60]), torch.tensor([-1]), torch.ones(60, dtype=torch.bool)])
def test_positions_that_do_not_exist_are_no_rows(whole: ShardedExamples, rows: torch.Tensor) -> None:
    with pytest.raises(IndexError):
        whole.fetch(rows)


_HEARING: list[list[str]] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _HEARING and str(arguments[0]).endswith(".npy"):
        _HEARING[-1].append(Path(str(arguments[0])).name)


sys.addaudithook(_hear)


@pytest.fixture
def opened_files() -> Iterator[list[str]]:
    """Every file of data that the interpreter opens."""
    _HEARING.append([])
    yield _HEARING[-1]
    _HEARING.pop()


def test_only_the_shards_asked_for_are_opened_or_needed(folder: Path, opened_files: list[str]) -> None:
    for number in (0, 1, 3):
        for file in folder.glob(f"train-{number:05d}.*"):
            file.unlink()
    examples = opened(folder)
    assert describe(DataConfig(name="shards"), folder).num_train == 60
    assert not opened_files
    examples.require([2])
    examples.fetch(torch.tensor([44, 30, 31]))
    assert set(opened_files) == {"train-00002.inputs.npy", "train-00002.labels.npy"}


def test_limits_and_classes_that_cannot_be_kept_are_refused(folder: Path, fails) -> None:
    config = DataConfig(name="shards", test_limit=4)
    assert len(load(config, root=folder).test) == 4
    assert describe(DataConfig(name="shards", train_limit=60, num_classes=3), folder).num_train == 60
    assert "--set data.train_limit=10" in fails(describe, DataConfig(name="shards", train_limit=10), folder)
    assert "--set data.num_classes=2" in fails(describe, DataConfig(name="shards", num_classes=2), folder)
    assert "data.augment=false" in fails(describe, DataConfig(name="shards", augment=True), folder)


def test_only_the_owner_can_read(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


def test_repeated_records_are_found(tmp_path: Path, floats: Dataset) -> None:
    train = floats.train.in_memory()
    inputs, labels = train.inputs.clone(), train.labels.clone()
    inputs[[7, 21]], labels[[7, 21]] = inputs[[40]], labels[[40]]
    inputs[30], labels[30] = inputs[31], (labels[31] + 1) % 3  # another label: another record
    inputs[50, 0, 0, 0] = 0.0
    inputs[51], labels[51] = inputs[50], labels[50]
    inputs[51, 0, 0, 0] = -0.0
    twins = from_tensors(inputs, labels, floats.test.inputs, floats.test.labels, num_classes=3)
    manifest = write_shards(twins, tmp_path / "twins", 4, SEEDS)
    order = source_order(60, 4).tolist()
    groups = find_repeated_records(ShardedExamples(manifest))
    found = {frozenset(order[position] for position in group) for group in groups}
    assert found == {frozenset({7, 21, 40}), frozenset({50, 51})}


def test_no_record_is_found_where_none_is_repeated(whole: ShardedExamples) -> None:
    assert not find_repeated_records(whole)
