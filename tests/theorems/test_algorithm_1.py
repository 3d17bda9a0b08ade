"""Algorithm 1: fixed disjoint batches, batch i benign and i + 1 adversarial, one trainer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stobatch.data import Examples
from stobatch.errors import SettingError
from stobatch.published.losses import reconstruction_gradient
from stobatch.published.settings import IterativeSchedule
from stobatch.published.training import PublishedTrainable
from stobatch.seeds import Seeds
from stobatch.training.engines import InProcessEngine, TrainerTask

MakeTraining = Callable[..., PublishedTrainable]


@given(st.integers(2, 40), st.integers(0, 10**6))
def test_step_t_takes_batch_i_and_crafts_from_the_next(num_batches: int, step: int) -> None:
    (task,) = IterativeSchedule(num_batches, Seeds.reproducible(0)).tasks(step)
    assert task.benign_batch == step % num_batches
    assert task.adversarial_batch == (step + 1) % num_batches
    assert task.benign_batch != task.adversarial_batch


@given(st.integers(2, 40), st.integers(0, 1000))
def test_every_batch_is_adversarial_in_the_step_before_it_is_benign(num_batches: int, step: int) -> None:
    schedule = IterativeSchedule(num_batches, Seeds.reproducible(0))
    assert schedule.tasks(step)[0].adversarial_batch == schedule.tasks(step + 1)[0].benign_batch


@pytest.mark.parametrize("num_batches", [0, 1])
def test_fewer_than_two_batches_are_refused(num_batches: int) -> None:
    with pytest.raises(SettingError):
        IterativeSchedule(num_batches, Seeds.reproducible(0))


def test_batches_are_disjoint_and_stay_the_same(make_training: MakeTraining) -> None:
    training = make_training(schedule="iterative")
    before = training.batches.clone()
    assert sorted(before.flatten().tolist()) == list(range(24))
    for step in range(5):
        training.gradients(training.tasks(step)[0], step)
        training.after_update()
    assert torch.equal(training.batches, before)
    assert torch.equal(make_training(schedule="iterative").batches, before)


def test_a_step_reads_the_two_batches_of_its_task_only(
    make_training: MakeTraining, make_examples: Callable[..., Examples]
) -> None:
    training, changed = make_training(), make_training()
    unread = training.batches[2:].flatten()
    changed.reader.kept[0][unread] = 0.123
    changed.reader.kept[1][unread] = 0
    task = TrainerTask(0, 0, 1)
    expected = training.gradients(task, 0)
    assert all(torch.equal(expected[name], gradient) for name, gradient in changed.gradients(task, 0).items())


def test_the_encoder_descends_on_benign_and_adversarial_examples_together(make_training: MakeTraining) -> None:
    training = make_training()
    found = training.gradients(TrainerTask(0, 0, 1), 7)["encoder.weight"]
    source = training.noisy(training.batches[1])[0]
    crafted = training.craft(source, training.seeds.generator("step", 7, "trainer", 0))
    noisy = torch.cat([training.noisy(training.batches[0])[0], crafted])
    with torch.no_grad():
        expected = reconstruction_gradient(training.network.encoder, noisy, training.network.noisy_hidden(noisy))
    assert torch.allclose(found, expected, rtol=0, atol=1e-9)


def test_adversarial_examples_stay_within_a_radius_of_at_most_1_around_noisy_inputs(
    make_training: MakeTraining,
) -> None:
    training = make_training()
    source, sizes = training.noisy(training.batches[1])[0], []
    for step in range(30):
        crafted = training.craft(source, training.seeds.generator("step", step, "trainer", 0))
        raw = crafted - training.network.input_noise
        assert float(raw.abs().max()) <= 1 + 1e-9
        sizes.append(float((crafted - source).abs().max()))
    assert 0 < min(sizes) < max(sizes) <= 1 + 1e-9


def test_labels_have_no_part_in_crafting_and_none_in_the_encoder(make_training: MakeTraining) -> None:
    training, relabelled = make_training(), make_training()
    relabelled.reader.kept[1].copy_((relabelled.reader.kept[1] + 1) % 3)
    task = TrainerTask(0, 0, 1)
    first, second = training.gradients(task, 0), relabelled.gradients(task, 0)
    assert torch.equal(first["encoder.weight"], second["encoder.weight"])
    assert not torch.equal(first["head.output.weight"], second["head.output.weight"])


def test_it_is_algorithm_4_with_one_trainer(make_training: MakeTraining) -> None:
    training = make_training(schedule="iterative")
    tasks = training.tasks(3)
    assert [task.trainer for task in tasks] == [0]
    alone = training.gradients(tasks[0], 3)
    averaged = training.release(3, InProcessEngine()).gradients
    assert all(torch.equal(averaged[name], gradient) for name, gradient in alone.items())
