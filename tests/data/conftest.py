from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stobatch.data import cifar10, tiny_imagenet
from stobatch.errors import DataError

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
