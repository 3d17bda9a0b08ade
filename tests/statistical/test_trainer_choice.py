"""Algorithm 4 picks its trainers, and Algorithms 1 and 4 their attack radii, uniformly.

How often a trainer is picked in T steps is binomial(T, 𝒩/trainers), exactly; over all trainers together, and for the
chi-square statistic of the radii (2000 expected in each of 10 bins), the alarm is false with probability 1e-9.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2
from torch import nn

from stobatch.data import Examples
from stobatch.models import from_layers
from stobatch.published import training as stobatch_method
from stobatch.published.noise import PrivateNoise
from stobatch.published.settings import PublishedConfig, StochasticSchedule
from stobatch.published.training import PublishedTrainable
from stobatch.seeds import Seeds
from stobatch.training.engines import TrainerTask

FALSE_ALARM, STEPS, BATCHES = 1e-9, 3000, 24
TRAINERS = BATCHES // 2


def uneven(pick: Callable[[int], list[TrainerTask]], per_step: int) -> bool:
    counts = Counter(task.trainer for step in range(STEPS) for task in pick(step))
    chance, tail = per_step / TRAINERS, FALSE_ALARM / TRAINERS / 2
    low, high = binom.ppf(tail, STEPS, chance), binom.isf(tail, STEPS, chance)
    return any(not low <= counts[trainer] <= high for trainer in range(TRAINERS))


@pytest.mark.parametrize("per_step", [1, 5])
def test_every_trainer_is_picked_equally_often(per_step: int) -> None:
    assert not uneven(StochasticSchedule(BATCHES, Seeds.reproducible(0), per_step).tasks, per_step)


def test_a_choice_that_forgets_the_step_is_caught() -> None:
    schedule = StochasticSchedule(BATCHES, Seeds.reproducible(0), 5)
    assert uneven(lambda step: schedule.tasks(0), 5)


def test_a_choice_with_a_slight_favourite_is_caught() -> None:
    """One step in ten goes to trainer 0."""
    schedule = StochasticSchedule(BATCHES, Seeds.reproducible(0), 1)
    assert uneven(lambda step: [TrainerTask(0, 0, 1)] if step % 10 == 0 else schedule.tasks(step), 1)


def test_consecutive_choices_are_independent() -> None:
    """The same trainer follows itself with probability 1/12."""
    schedule = StochasticSchedule(BATCHES, Seeds.reproducible(1), 1)
    picked = [schedule.tasks(step)[0].trainer for step in range(STEPS)]
    repeats, chance = sum(a == b for a, b in pairwise(picked)), 1 / TRAINERS
    low, high = binom.ppf(FALSE_ALARM / 2, STEPS - 1, chance), binom.isf(FALSE_ALARM / 2, STEPS - 1, chance)
    assert low <= repeats <= high


def chi_square_rejects(values: np.ndarray) -> bool:
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    expected = len(values) / 10
    return bool(((counts - expected) ** 2 / expected).sum() > chi2.isf(FALSE_ALARM, 9))


@pytest.fixture
def attack_radius(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], float]:
    """The radius μ_t that a trainer draws in a step."""
    network = from_layers(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(1, 2), (1, 1, 1))
    noise = PrivateNoise(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1), torch.zeros(1))
    examples = Examples(torch.zeros(6, 1, 1, 1), torch.zeros(6, dtype=torch.int64), 2)
    training = PublishedTrainable(PublishedConfig(batch_size=3), network, examples, noise, Seeds.reproducible(0))
    sizes: list[float] = []
    monkeypatch.setattr(stobatch_method, "craft", lambda scores, ball, *rest, **options: sizes.append(ball.radius.size))

    def draw(step: int) -> float:
        training.craft(training.noisy(torch.arange(1))[0], training.seeds.generator("step", step, "trainer", 0))
        return sizes[-1]

    return draw


def test_attack_radii_are_uniform_above_0_and_up_to_1(attack_radius: Callable[[int], float]) -> None:
    """Of as many steps as show the twin below; the false-alarm rate is the same for any number."""
    radii = np.array([attack_radius(step) for step in range(5000)])
    assert ((radii > 0) & (radii <= 1)).all()
    assert not chi_square_rejects(radii)


def test_attack_radii_that_leave_out_small_ones_are_caught(attack_radius: Callable[[int], float]) -> None:
    radii = np.array([attack_radius(step) for step in range(5000)])
    assert chi_square_rejects(radii[radii > 0.05])
