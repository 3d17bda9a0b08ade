from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stobatch.data import Dataset, cifar10, from_tensors, tiny_imagenet, write_shards
from stobatch.errors import DataError
from stobatch.seeds import Seeds

Fails = Callable[..., str]


@pytest.fixture
def fails() -> Fails:
    """Call something that must raise a DataError; give back its message, which has one line and a remedy."""

    def call(function: Callable[..., object], *args: object, **kwargs: object) -> str:
        with pytest.raises(DataError) as caught:
            function(*args, **kwargs)
        message = str(caught.value)
        assert "\n" not in message
        assert caught.value.remedy
        assert message.endswith(caught.value.remedy)
        return message

    return call


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test leaves this machine: the addresses point at a file that is not there."""
    nowhere = (tmp_path / "no-such-server" / "archive.tar.gz").as_uri()
    monkeypatch.setattr(cifar10, "URL", nowhere)
    monkeypatch.setattr(tiny_imagenet, "URL", nowhere)


@pytest.fixture(scope="session")
def floats() -> Dataset:
    """Sixty training examples that bytes cannot express."""
    inputs = torch.rand(60, 2, 3, 5, generator=torch.Generator().manual_seed(1)).mul(2).sub(1)
    labels = torch.arange(60) % 3
    return from_tensors(inputs, labels, inputs[:7], labels[:7], num_classes=3, name="floats")


@pytest.fixture(scope="session")
def seeds() -> Seeds:
    return Seeds.reproducible(5)


@pytest.fixture
def folder(tmp_path: Path, floats: Dataset, seeds: Seeds) -> Path:
    """They in four shards."""
    write_shards(floats, tmp_path / "shards", 4, seeds)
    return tmp_path / "shards"
