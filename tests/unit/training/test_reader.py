"""Positions of a step lie where its examples are, so that no step waits for a copy of them."""

from __future__ import annotations

from pathlib import Path

import torch

from stobatch.data import ShardedExamples, from_tensors, write_shards
from stobatch.seeds import Seeds
from stobatch.training.trainable import Reader

ELSEWHERE = torch.device("meta")
ROWS = torch.tensor([4, 0])


def test_positions_lie_beside_examples_in_memory_and_stay_here_for_those_on_disk(tmp_path: Path) -> None:
    inputs, labels = torch.rand(6, 1, 2, 2) * 2 - 1, torch.arange(6) % 2
    data = from_tensors(inputs, labels, inputs[:2], labels[:2])
    on_disk = ShardedExamples(write_shards(data, tmp_path / "shards", 2, Seeds.reproducible(0)))
    assert Reader(data.train, ELSEWHERE, torch.float32).beside(ROWS).device == ELSEWHERE
    assert Reader(on_disk, ELSEWHERE, torch.float32).beside(ROWS).device == ROWS.device


def test_positions_that_lie_beside_them_fetch_the_same() -> None:
    inputs, labels = torch.rand(6, 1, 2, 2) * 2 - 1, torch.arange(6) % 2
    reader = Reader(from_tensors(inputs, labels, inputs, labels).train, torch.device("cpu"), torch.float32)
    fetched, classes = reader.fetch(reader.beside(ROWS))
    assert torch.equal(fetched, inputs[ROWS])
    assert torch.equal(classes, labels[ROWS])
