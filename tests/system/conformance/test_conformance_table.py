"""Nobody adds a method outside the suite."""

from __future__ import annotations

import os

import pytest
from small import EXEMPT, SMALL

from stobatch import RunConfig
from stobatch.registry import METHODS


@pytest.mark.skipif("STOBATCH_CONFORMANCE" in os.environ, reason="of another package there is one entry")
def test_every_registered_method_has_an_entry_or_a_reason() -> None:
    missing = METHODS.keys() - SMALL.keys() - EXEMPT.keys()
    assert not missing, f"add to tests/system/conformance/small.py: {', '.join(sorted(missing))}"


def test_there_is_nothing_else_in_the_table() -> None:
    assert SMALL.keys() | EXEMPT.keys() <= METHODS.keys()
    assert not SMALL.keys() & EXEMPT.keys()
    assert all(EXEMPT.values())


@pytest.mark.parametrize("name", SMALL)
def test_an_entry_is_small_and_reproducible(name: str) -> None:
    config = SMALL[name]
    assert config.method.title == name
    assert config.seed is not None
    assert 4 <= config.training.steps <= 12
    assert config.data.train_limit is not None
    assert config.data.train_limit <= 300
    assert config.machine.checkpoint_every < config.training.steps / 2, "a training is stopped between two checkpoints"
    assert RunConfig.from_dict(config.to_dict()) == config
