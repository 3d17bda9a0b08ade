"""The accounting of several trainers, and what it rests on: disjoint holdings, planned rates, and turns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Any

import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stobatch.config import DataConfig, ModelConfig, RunConfig, TrainersConfig, TrainingConfig
from stobatch.data import DatasetInfo, Examples
from stobatch.data.partition import holdings, pick_trainers, take_turns
from stobatch.dp.plan import DpSgdPlan, TrainersPlan
from stobatch.models import Network, from_layers, initialise
from stobatch.seeds import Seeds
from stobatch.sound.method import Sound
from stobatch.sound.settings import SoundConfig
from stobatch.sound.step import DpSgdTrainable
from stobatch.training.engines.base import DeviceRank

SHAPE, CLASSES, RECORDS = (1, 4, 4), 3, 120
CLIP = 0.01


# Who owns what, and who reads it.


def cuts(total: int, parts: int) -> st.SearchStrategy[list[range]]:
    """The positions in so many shards, none of them empty."""
    inner = st.lists(st.integers(1, total - 1), min_size=parts - 1, max_size=parts - 1, unique=True)
    return inner.map(lambda ends: [range(a, b) for a, b in pairwise([0, *sorted(ends), total])])


@given(st.data(), st.integers(1, 12), st.integers(1, 12))
def test_every_record_belongs_to_one_trainer(data: st.DataObject, parts: int, trainers: int) -> None:
    shards = data.draw(cuts(RECORDS, parts))
    if 1 < parts < trainers:
        return
    owned = [row for shards_of_one in holdings(shards, trainers) for shard in shards_of_one for row in shard]
    assert sorted(owned) == list(range(RECORDS))


@dataclass(frozen=True)
class Sharded(Examples):
    """In memory, and yet in shards."""

    ranges: tuple[range, ...] = ()

    @property
    def shards(self) -> tuple[range, ...]:
        return self.ranges


def network() -> Network:
    body = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(8, 4))
    made = from_layers(nn.Conv2d(1, 2, 3, stride=2, padding=1), body, nn.Linear(4, CLASSES), SHAPE)
    initialise(made, torch.Generator().manual_seed(0))
    return made


def trainable(shards: list[range], trainers: int, expected: int) -> DpSgdTrainable:
    """All trainers work in every step, so that plans differ in nothing that takes time to account for."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(RECORDS, *SHAPE, generator=generator) * 2 - 1
    labels = torch.randint(CLASSES, (RECORDS,), generator=generator)
    config = RunConfig(
        method=SoundConfig(
            epsilon=3.0,
            delta=1e-3,
            batch_size=expected,
            clip_norm=CLIP,
            natural_weight=1.0,
            certified_weight=0.0,
        ),
        data=DataConfig(name="tensors"),
        model=ModelConfig(architecture="custom", last_hidden_size=4),
        training=TrainingConfig(steps=4, optimiser="sgd"),
        trainers=TrainersConfig(num=trainers, per_step=trainers),
    )
    info = DatasetInfo("tensors", SHAPE, CLASSES, RECORDS, 1, tuple("abc"))
    train = Sharded(inputs, labels, CLASSES, tuple(shards))
    made = Sound().prepare(config, Sound().plan(config, info, network()), network(), train, Seeds.reproducible(2))
    made.chunk = 7
    return made


def rows_read(made: DpSgdTrainable, step: int, devices: int) -> list[int]:
    """By all trainers and all of their devices."""
    found, fetch = list[int](), made.reader.fetch

    def noted(rows: torch.Tensor) -> Any:
        found.extend(rows.tolist())
        return fetch(rows)

    made.reader.fetch = noted  # type: ignore[method-assign]
    for task in made.tasks(step):
        for device in range(devices):
            for _ in made.parts(task, step, DeviceRank(device, devices)):
                pass
    made.reader.fetch = fetch  # type: ignore[method-assign]
    return found


@settings(max_examples=25)
@given(st.data(), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4))
def test_a_step_reads_a_record_once_whatever_the_shards_trainers_and_devices(
    data: st.DataObject, parts: int, trainers: int, devices: int
) -> None:
    """With a rate of 1 a step must read all records, and each by one device of its owner."""
    shards = data.draw(cuts(RECORDS, parts))
    if 1 < parts < trainers * devices:
        return
    assert sorted(rows_read(trainable(shards, trainers, RECORDS), 0, devices)) == list(range(RECORDS))
    some = trainable(shards, trainers, RECORDS // 2)
    for step in (0, 1):
        assert max(Counter(rows_read(some, step, devices)).values(), default=1) == 1


def change_by_removing(made: DpSgdTrainable, record: int) -> float:
    """How far the sum of a step's contributions moves, noise apart, when nobody has the record any more."""
    made.noise_stddev = 0.0

    def release() -> torch.Tensor:
        # The average over the trainers, times C B, is the sum of all contributions.
        parts = [made.gradients(task, 0) for task in made.tasks(0)]
        whole = [sum(part[name] for part in parts) / len(parts) for name in parts[0]]
        return torch.cat([torch.as_tensor(value).flatten() for value in whole]) * made.per_example_bound**-1 * CLIP

    before, kept = release(), made.holdings
    made.holdings = [tuple(part for own in owned for part in without(own, record)) for owned in kept]
    after = release()
    made.holdings = kept
    return float((before - after).norm())


def without(own: range, record: int) -> list[range]:
    return [range(own.start, record), range(record + 1, own.stop)] if record in own else [own]


def test_a_record_of_one_trainer_moves_a_step_by_the_clipping_norm() -> None:
    made = trainable([range(RECORDS)], 2, RECORDS)
    assert change_by_removing(made, 55) == pytest.approx(CLIP, rel=1e-3)


def test_a_record_of_two_trainers_moves_a_step_by_twice_the_clipping_norm() -> None:
    """The twin: its owners clip it twice and add it twice, and the noise is for once."""
    made = trainable([range(RECORDS)], 2, RECORDS)
    first, second = (owned[0] for owned in made.holdings)
    made.holdings = [(first,), (range(first.stop - 10, second.stop),)]
    assert sorted(Counter(rows_read(made, 0, 1)).values())[-10:] == [2] * 10
    assert change_by_removing(made, 55) == pytest.approx(2 * CLIP, rel=1e-3)


# Turns.


def plan_of(num_trainers: int, per_step: int, steps: int, *, shares: bool = False, **changes: Any) -> TrainersPlan:
    given_: dict[str, Any] = {
        "num_examples": 6000,
        "expected_batch_size": 60,
        "clip_norm": 1.0,
        "target_epsilon": 2.0,
        "delta": 1e-5,
        "tuned_on_private_data": False,
    }
    more = {"num_trainers": num_trainers, "per_step": per_step, "noise_shares": shares, "steps": steps}
    return TrainersPlan(**{**given_, **more, **changes})


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 40), st.integers(0, 2**32))
def test_nobody_takes_part_more_often_than_planned(trainers: int, per_step: int, steps: int, seed: int) -> None:
    per_step = min(per_step, trainers)
    seeds = Seeds.reproducible(seed)
    took_part = Counter(who for step in range(steps) for who in take_turns(step, trainers, per_step, seeds))
    assert max(took_part.values()) <= plan_of(trainers, per_step, steps).participations(steps)
    assert sum(took_part.values()) == steps * per_step
    for step in range(steps):
        assert len(set(take_turns(step, trainers, per_step, seeds))) == per_step


def test_trainers_picked_at_random_take_part_more_often_than_planned() -> None:
    """The twin, Algorithm 4 as printed: whoever is picked again before the others had a turn spends more."""
    steps, plan = 20, plan_of(10, 2, 20)
    most = []
    for seed in range(5):
        seeds = Seeds.reproducible(seed)
        picks = [pick_trainers(10, 2, seeds.generator("step", step, "pick")).tolist() for step in range(steps)]
        most.append(max(Counter(who for pick in picks for who in pick).values()))
    assert max(most) > plan.participations(steps) == 4


# What it costs.


def accounted(plan: TrainersPlan, sigma: float, participations: int) -> float:
    """By dp-accounting, asked directly."""
    accountant = pld_privacy_accountant.PLDAccountant(value_discretization_interval=1e-3)
    step = dp_event.PoissonSampledDpEvent(plan.sampling_rate, dp_event.GaussianDpEvent(sigma))
    accountant.compose(dp_event.SelfComposedDpEvent(step, participations))
    return float(accountant.get_epsilon(plan.delta))


PLANS = {
    "one of four": plan_of(4, 1, 30),
    "two of five": plan_of(5, 2, 31),
    "all of three, shares": plan_of(3, 3, 20, shares=True),
    "three of eight, shares": plan_of(8, 3, 25, shares=True),
}


@pytest.mark.parametrize("name", PLANS)
def test_epsilon_is_that_of_dp_accounting_for_one_trainers_steps(name: str) -> None:
    plan = PLANS[name]
    turns = plan.num_trainers // plan.per_step
    participations = -(-plan.steps // turns)
    rate = plan.expected_batch_size / plan.per_step / (plan.num_examples / plan.num_trainers)
    assert plan.sampling_rate == pytest.approx(rate)
    sigma = plan.noise_stddev / plan.clip_norm * (sqrt(plan.per_step) if plan.noise_shares else 1.0)
    assert plan.guarantee.epsilon == pytest.approx(accounted(plan, sigma, participations), rel=5e-3)
    assert plan.guarantee.epsilon <= plan.target_epsilon
    assert plan.guarantee.epsilon > accounted(plan, sigma, participations - 1)


def test_shares_of_everybody_cost_what_one_owner_of_all_the_data_pays() -> None:
    """With per_step = num the sum of shares is the central mechanism: the same rate, noise and ε."""
    shared = plan_of(3, 3, 20, shares=True)
    central = DpSgdPlan(**{name: value for name, value in vars(plan_of(1, 1, 20)).items() if name in CENTRAL})
    assert shared.sampling_rate == pytest.approx(central.sampling_rate)
    assert shared.noise_multiplier == pytest.approx(central.noise_multiplier)
    assert shared.guarantee.epsilon == pytest.approx(central.guarantee.epsilon, rel=1e-9)
    # The noise on the sum of all, by hand: three independent shares.
    assert sqrt(3 * shared.noise_stddev**2) == pytest.approx(central.noise_stddev)
    assert shared.denominator * 3 == central.denominator


CENTRAL = (
    *("num_examples", "expected_batch_size", "steps", "clip_norm", "target_epsilon", "delta"),
    *("tuned_on_private_data", "records_per_person"),
)


@pytest.mark.parametrize("name", PLANS)
def test_steps_that_a_crash_repeated_are_never_counted_too_low(name: str) -> None:
    """Whoever took part in all of them: the most turns anybody has in the plan, and one for each repeated step."""
    plan = PLANS[name]
    spent = plan.guarantee.epsilon
    assert plan.after(plan.steps) == plan.guarantee == plan.after(plan.steps - 1)
    for repeated in (1, 2, 7):
        after = plan.after(plan.steps + repeated)
        worst = plan.participations(plan.steps) + repeated
        assert after.epsilon > spent
        assert after.epsilon >= accounted(plan, plan.noise_multiplier, worst) * (1 - 5e-3)
        assert after.epsilon >= plan.mechanism(plan.steps + repeated).epsilon(plan.delta)
        assert f"{repeated} steps beyond the {plan.steps} planned" in after.assumptions[-1]
        spent = after.epsilon
