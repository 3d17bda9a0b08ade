"""Algorithm 4: N/(2m) trainers with two fixed batches each, 𝒩 picked per step, gradients averaged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stobatch.errors import SettingError
from stobatch.published.settings import StochasticSchedule
from stobatch.published.training import PublishedTrainable
from stobatch.seeds import Seeds
from stobatch.training.engines import InProcessEngine

MakeTraining = Callable[..., PublishedTrainable]


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 30), st.data(), st.integers(0, 2**31))
def test_trainers_own_two_batches_for_good_and_share_none(num_batches: int, data: st.DataObject, seed: int) -> None:
    per_step = data.draw(st.integers(1, num_batches // 2))
    schedule = StochasticSchedule(num_batches, Seeds.reproducible(seed), per_step)
    owned: dict[int, tuple[int, int]] = {}
    for step in range(20):
        tasks = schedule.tasks(step)
        assert len({task.trainer for task in tasks}) == len(tasks) == per_step
        for task in tasks:
            pair = (task.benign_batch, task.adversarial_batch)
            assert 0 <= task.trainer < num_batches // 2
            assert owned.setdefault(task.trainer, pair) == pair
    batches = [batch for pair in owned.values() for batch in pair]
    assert len(set(batches)) == len(batches)
    assert schedule.tasks(3) == StochasticSchedule(num_batches, Seeds.reproducible(seed), per_step).tasks(3)


def test_roles_never_swap_so_no_tuple_is_both_benign_and_adversarial() -> None:
    """Unlike Algorithm 1."""
    schedule = StochasticSchedule(10, Seeds.reproducible(0), 5)
    tasks = [task for step in range(10) for task in schedule.tasks(step)]
    assert not {task.benign_batch for task in tasks} & {task.adversarial_batch for task in tasks}


def test_more_trainers_than_there_are_pairs_are_refused() -> None:
    with pytest.raises(SettingError):
        StochasticSchedule(5, Seeds.reproducible(0), 3)


def test_the_server_averages_the_gradients_of_the_picked_trainers(make_training: MakeTraining) -> None:
    training = make_training(trainers_per_step=2)
    tasks = training.tasks(0)
    assert len(tasks) == 2
    averaged = training.release(0, InProcessEngine()).gradients
    single = [training.gradients(task, 0) for task in tasks]
    for name, gradient in averaged.items():
        manual = (single[0][name] + single[1][name]) / 2
        assert torch.allclose(gradient, manual, rtol=0, atol=1e-10)
        assert not torch.allclose(gradient, single[0][name], rtol=0, atol=1e-10)


def test_trainers_of_one_step_draw_their_own_attack_radius(make_training: MakeTraining) -> None:
    training = make_training(trainers_per_step=2)
    source = training.noisy(training.batches[0])[0]
    generators = [training.seeds.generator("step", 0, "trainer", trainer) for trainer in (0, 1)]
    sizes = [float((training.craft(source, generator) - source).abs().max()) for generator in generators]
    assert sizes[0] != sizes[1]


def test_a_server_that_knows_the_noise_sees_the_raw_batch(make_training: MakeTraining) -> None:
    """χ1 is shared by all trainers: subtracting it leaves what the others trained on."""
    training = make_training()
    raw = training.noisy(torch.arange(len(training.reader.examples)))[0] - training.noise.input_noise.double()
    assert float(raw.abs().max()) <= 1 + 1e-6
