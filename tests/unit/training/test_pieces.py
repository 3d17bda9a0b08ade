"""Work in pieces, shared by devices: the pieces are the same for any number of them, and so are the bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stobatch.attacks import Ball, craft, ensemble_slices, paper_ensemble
from stobatch.baselines import vanilla
from stobatch.baselines.vanilla import VanillaConfig, VanillaTrainable
from stobatch.config import DataConfig, ModelConfig, RunConfig, TrainersConfig, TrainingConfig
from stobatch.data import DatasetInfo, Examples
from stobatch.dp.canaries import Canaries, GradientCanaries
from stobatch.models import Network, from_layers, initialise
from stobatch.published import training as stobatch
from stobatch.published.noise import PrivateNoise
from stobatch.published.settings import PublishedConfig
from stobatch.published.training import PublishedTrainable
from stobatch.seeds import Seeds
from stobatch.sound import step as dpsgd_trainable
from stobatch.sound.method import Sound
from stobatch.sound.settings import SoundConfig
from stobatch.sound.step import DpSgdTrainable
from stobatch.training import Trainable
from stobatch.training.engines import Gradients, InProcessEngine, TrainerTask
from stobatch.training.engines.base import SINGLE_DEVICE, DeviceRank, split_rows
from stobatch.training.exact_sum import ExactSum
from stobatch.types import PAPER_RANGE, Norm, Radius

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPE, CLASSES = (1, 6, 6), 3
ENSEMBLE = ("ifgsm", "mim", "madry")


# Cutting.


@given(st.integers(0, 5000), st.integers(1, 1000), st.integers(1, 8), st.sampled_from([CPU, GPU]), st.integers(1, 64))
def test_pieces_cover_all_rows_once_and_are_equally_large(
    size: int, most: int, devices: int, device: torch.device, multiple: int
) -> None:
    pieces = split_rows(size, most, device, DeviceRank(devices - 1, devices), multiple)
    assert [row for piece in pieces for row in range(size)[piece]] == list(range(size))
    lengths = {piece.stop - piece.start for piece in pieces}
    assert max(lengths, default=0) <= most
    assert max(lengths, default=0) - min(lengths, default=0) <= 1
    assert 0 not in lengths, "nobody can work on nothing"


@given(st.integers(0, 5000), st.integers(1, 1000), st.integers(1, 8), st.integers(1, 64))
def test_on_a_cpu_pieces_do_not_depend_on_the_devices(size: int, most: int, devices: int, multiple: int) -> None:
    alone = split_rows(size, most, CPU, SINGLE_DEVICE, multiple)
    for device in range(devices):
        assert split_rows(size, most, CPU, DeviceRank(device, devices), multiple) == alone


@given(st.integers(256, 5000), st.integers(1, 1000), st.integers(1, 64))
def test_on_a_cpu_large_work_divides_evenly_by_the_number_asked_for(size: int, most: int, multiple: int) -> None:
    count = len(split_rows(size, most, CPU, SINGLE_DEVICE, multiple))
    assert count % multiple == 0 or count == size
    assert split_rows(size, most, CPU, SINGLE_DEVICE) == split_rows(size, most, CPU, SINGLE_DEVICE, 4)


@given(st.integers(0, 63), st.integers(1, 300))
def test_on_a_cpu_small_work_is_cut_no_further_than_memory_asks(size: int, most: int) -> None:
    assert len(split_rows(size, most, CPU, SINGLE_DEVICE)) == -(-size // most)


@given(st.integers(0, 5000), st.integers(1, 1000), st.integers(1, 8))
def test_every_gpu_has_its_part_at_once(size: int, most: int, devices: int) -> None:
    pieces = split_rows(size, most, GPU, DeviceRank(0, devices))
    assert len(pieces) == max(-(-size // most), min(devices, size))


@given(st.integers(1, 9), st.integers(0, 100))
def test_every_piece_is_taken_by_one_device_and_one_is_the_first(devices: int, piece: int) -> None:
    shares = [DeviceRank(device, devices) for device in range(devices)]
    assert sum(share.takes(piece) for share in shares) == 1
    assert [share.first for share in shares] == [True] + [False] * (devices - 1)


# Crafting.


def network(seed: int = 0) -> Network:
    body = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(36, 6))
    made = from_layers(nn.Conv2d(1, 4, 3, stride=2, padding=1), body, nn.Linear(6, CLASSES), SHAPE)
    initialise(made, torch.Generator().manual_seed(seed))
    return made


def examples(count: int) -> Examples:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(count, *SHAPE, generator=generator) * 2 - 1
    return Examples(inputs, torch.randint(CLASSES, (count,), generator=generator), CLASSES)


def crafted(inputs: Tensor, piece: slice | None, size: int, *, seed: int = 3) -> Tensor:
    """Of a piece, with the generator of the whole batch; or of the whole.

    In float64: kernels for other numbers of rows round otherwise, which in float32 could turn the sign of a gradient.
    """
    inputs = inputs.double()
    ball = Ball.around(inputs if piece is None else inputs[piece], Radius(0.3, Norm.LINF, PAPER_RANGE))
    generator, attacks = torch.Generator().manual_seed(seed), paper_ensemble(ENSEMBLE, 4)
    return craft(network().double(), ball, attacks, generator, piece=piece, batch_size=size if piece else None)


def agree(one: Tensor, other: Tensor) -> bool:
    """Up to float64's rounding; a step or a draw of its own would move a point by far more."""
    return torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("most", [1, 5, 7, 10, 29, 60])
def test_pieces_that_are_crafted_apart_are_those_of_the_whole(most: int) -> None:
    """With three attacks together, one of which starts at random; a piece may lie in several of them."""
    inputs = examples(60).inputs
    whole = crafted(inputs, None, 60)
    pieces = split_rows(60, most, CPU, SINGLE_DEVICE)
    apart = [crafted(inputs, piece, 60) for piece in reversed(pieces)]
    assert agree(torch.cat(apart[::-1]), whole)
    assert not agree(whole, inputs.double())


def test_pieces_that_draw_for_themselves_are_caught() -> None:
    """The broken twin: a piece that is taken for a batch has attacks and random starts of its own."""
    inputs = examples(60).inputs
    whole = crafted(inputs, None, 60)
    parts = [slice(0, 30), slice(30, 60)]
    as_batches = torch.cat([crafted(inputs[part], None, 30) for part in parts])
    assert not agree(as_batches, whole)
    # Random starts of the third attack alone would be enough to tell.
    last = ensemble_slices(60, 3)[2]
    attacks = paper_ensemble(("madry",), 4)
    ball = Ball.around(inputs[last].double(), Radius(0.3, Norm.LINF, PAPER_RANGE))
    halves = [
        craft(network().double(), ball.part(part), attacks, torch.Generator().manual_seed(3))
        for part in (slice(0, 10), slice(10, 20))
    ]
    together = craft(network().double(), ball, attacks, torch.Generator().manual_seed(3))
    assert agree(halves[0], together[:10])
    assert not agree(halves[1], together[10:])


# A trainer's gradient.


def published() -> PublishedTrainable:
    noise = PrivateNoise.draw(
        Seeds.reproducible(2),
        input_shape=SHAPE,
        input_scale=0.1,
        hidden_shape=(4, 3, 3),
        hidden_scale=0.2,
        label_shape=(6,),
        label_scale=0.1,
    )
    config = PublishedConfig(batch_size=60, train_attack_steps=2, attack_ensemble=ENSEMBLE)
    made = PublishedTrainable(config, network(), examples(240), noise, Seeds.reproducible(4))
    made.chunk = 7
    return made


def baseline() -> VanillaTrainable:
    config = VanillaConfig(batch_size=60, train_attack_steps=2, attack_ensemble=ENSEMBLE)
    made = VanillaTrainable(config, network(), examples(240), Seeds.reproducible(4), memory_mb=512)
    made.chunk = 7
    return made


@dataclass(frozen=True)
class Sharded(Examples):
    """In memory, and yet in shards of unequal lengths."""

    @property
    def shards(self) -> tuple[range, ...]:
        ends = (0, 30, 100, 110, len(self))
        return tuple(range(start, end) for start, end in pairwise(ends))


def private(train: Examples | None = None, **trainers: int) -> DpSgdTrainable:
    method = SoundConfig(
        epsilon=3.0,
        delta=1e-4,
        batch_size=60,
        clip_norm=0.3,
        certified_weight=0.0,
        adversarial_weight=0.5,
        attack_steps=2,
        views_weight=0.5,
        smoothing_stddev=0.3,
        warm_up=0.0,
    )
    config = RunConfig(
        method=method,
        data=DataConfig(name="tensors"),
        model=ModelConfig(architecture="custom", last_hidden_size=6),
        training=TrainingConfig(steps=8, optimiser="sgd"),
        trainers=TrainersConfig(**trainers),
    )
    info = DatasetInfo("tensors", SHAPE, CLASSES, 240, 1, tuple("abc"))
    plan = Sound().plan(config, info, network())
    made = Sound().prepare(config, plan, network(), train or examples(240), Seeds.reproducible(4))
    made.chunk = 7
    return made


def with_canaries() -> DpSgdTrainable:
    made = private()
    made.add_canaries(Canaries(torch.ones(20, dtype=torch.bool), GradientCanaries(torch.arange(20))))
    return made


def in_shards() -> DpSgdTrainable:
    given = examples(240)
    return private(Sharded(given.inputs, given.labels, CLASSES))


def of_trainers() -> DpSgdTrainable:
    return private(num=3, per_step=2)


TRAINABLES: dict[str, Callable[[], Trainable]] = {
    "published": published,
    "vanilla": baseline,
    "sound": private,
    "sound with canaries": with_canaries,
    "sound in shards": in_shards,
    "sound of trainers": of_trainers,
}


def shared(trainable: Trainable, task: TrainerTask, step: int, devices: int) -> Gradients:
    """Each device by itself, and the sums of all of them added, the last first."""
    sums = []
    for device in range(devices):
        own = ExactSum(trainable.parameters, trainable.grid(step))
        for part in trainable.parts(task, step, DeviceRank(device, devices)):
            own.add(part)
        sums.append(own)
    total = sums.pop()
    for other in reversed(sums):
        total.buffer += other.buffer
    return total.mean(1)


def same(one: Gradients, other: Gradients) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", TRAINABLES)
def test_devices_sum_to_the_bits_of_one(name: str) -> None:
    """In float32, in which every other batch through the network would round otherwise."""
    trainable = TRAINABLES[name]()
    assert {parameter.dtype for parameter in trainable.parameters.values()} == {torch.float32}
    for step in (0, 5):
        for task in trainable.tasks(step):
            alone = trainable.gradients(task, step)
            assert all(bool(value.any()) for value in alone.values())
            for devices in range(1, 6):
                assert same(shared(trainable, task, step, devices), alone), devices


@pytest.mark.parametrize("name", TRAINABLES)
def test_every_device_has_something_to_do_and_none_does_anothers_work(name: str) -> None:
    """The examples that pass through the network are as many for three devices as for one, and each has some."""
    trainable = TRAINABLES[name]()
    (task, *_), passed = trainable.tasks(0), list[int]()
    assert isinstance(trainable.network, Network)
    trainable.network.head.body.register_forward_hook(lambda module, inputs, output: passed.append(len(output)))
    trainable.gradients(task, 0)
    alone, counts = sum(passed), []
    for device in range(3):
        passed.clear()
        for _ in trainable.parts(task, 0, DeviceRank(device, 3)):
            pass
        counts.append(sum(passed))
    assert sum(counts) == alone
    assert min(counts) > 0


@pytest.mark.parametrize("name", ["published", "vanilla", "sound"])
def test_pieces_that_follow_the_number_of_devices_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: every device takes one piece, as large as its share; rounding tells."""
    trainable = TRAINABLES[name]()
    (task,) = trainable.tasks(0)
    alone = trainable.gradients(task, 0)

    def by_devices(size: int, most: int, device: torch.device, share: DeviceRank, pieces: int) -> list[slice]:
        return split_rows(size, -(-size // share.devices), device, SINGLE_DEVICE, 1)

    for module in (dpsgd_trainable, stobatch, vanilla):
        monkeypatch.setattr(module, "split_rows", by_devices)
    trainable.chunk = 1000
    assert not same(shared(trainable, task, 0, 2), shared(trainable, task, 0, 3))
    assert not same(shared(trainable, task, 0, 2), alone)


class Everyone(DeviceRank):
    """Takes its own pieces, and does besides what is done once for the trainer."""

    @property
    def first(self) -> bool:
        return True


@pytest.mark.parametrize("name", ["published", "sound", "sound with canaries"])
def test_devices_that_all_add_the_noise_are_caught(name: str) -> None:
    """The broken twin: χ3 of the published method, and the Gaussian noise of the sound one, counted twice."""
    trainable = TRAINABLES[name]()
    (task,) = trainable.tasks(0)
    alone, total = trainable.gradients(task, 0), ExactSum(trainable.parameters, trainable.grid(0))
    for device in range(2):
        for part in trainable.parts(task, 0, Everyone(device, 2)):
            total.add(part)
    assert not same(total.mean(1), alone)


def test_the_average_over_trainers_is_that_of_their_sums() -> None:
    """Bit for bit, whichever trainer comes first."""
    trainable = of_trainers()
    tasks = trainable.tasks(0)
    assert len(tasks) == 2

    def parts(task: TrainerTask, share: DeviceRank) -> Iterator[Gradients]:
        return trainable.parts(task, 0, share)

    averaged, reversed_ = (
        InProcessEngine().average(order, parts, trainable.parameters, grid=trainable.grid(0)).gradients
        for order in (tasks, tasks[::-1])
    )
    assert same(averaged, reversed_)
    assert same(averaged, trainable.release(0, InProcessEngine()).gradients)
    both: Any = [trainable.gradients(task, 0) for task in tasks]
    for name, value in averaged.items():
        assert torch.allclose(value, (both[0][name] + both[1][name]) / 2, rtol=1e-5, atol=1e-7)
