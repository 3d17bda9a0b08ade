"""Any number of devices gives the bits of one, of every method, without starting a process."""

from __future__ import annotations

import pytest
from bench import batch_key, prepared
from odd_engines import Devices, Noting, copied, same

from stobatch import RunConfig
from stobatch.methods import Method
from stobatch.training.engines import Gradients

_ENOUGH = 90
"""Examples of a step: so many are cut into pieces, fewer than 64 are not."""


@pytest.fixture
def larger(config: RunConfig) -> RunConfig:
    return config.override(batch_key(config), _ENOUGH)


def released(method: Method, config: RunConfig, engine: Devices | Noting, step: int) -> Gradients:
    prepared(method, config).release(step, engine)
    return engine.releases[0]


@pytest.mark.parametrize("step", [0, 7])
def test_devices_sum_to_the_bits_of_one(method: Method, larger: RunConfig, step: int) -> None:
    alone = released(method, larger, Noting(), step)
    assert any(bool(value.any()) for value in alone.values())
    for count in (1, 2, 3):
        engine = Devices(count)
        assert same(released(method, larger, engine, step), alone), f"{count} devices"
        assert all(engine.parts_of), f"one of {count} devices has nothing to do"


def test_repeating_a_step_gives_its_bits_again(method: Method, config: RunConfig) -> None:
    """Nothing is used up: a step is a function of the network's state, the seeds and its number."""
    trainable, engine = prepared(method, config), Noting()
    before = copied(trainable.network.state_dict())
    for step in (3, 5, 3):
        trainable.network.load_state_dict(before)
        trainable.release(step, engine)
    assert same(engine.releases[2], engine.releases[0])
    assert not same(engine.releases[1], engine.releases[0])


@pytest.mark.parametrize("step", [0, 7])
def test_a_device_that_is_left_out_is_missed(method: Method, larger: RunConfig, step: int) -> None:
    """The broken twin: without the last device's parts the sum is another one."""
    alone = released(method, larger, Noting(), step)
    assert not same(released(method, larger, Devices(3, absent=2), step), alone)
