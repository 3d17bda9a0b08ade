"""The learning rate is a function of the step alone: closed forms, the path of parameters, and resumed runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support import checkpoints

import stobatch
from stobatch.config import DataConfig, MachineConfig, ModelConfig, RunConfig, TrainingConfig
from stobatch.data import Dataset, DatasetInfo
from stobatch.errors import ModelError, SettingError
from stobatch.loading import make_network
from stobatch.methods import method_of
from stobatch.optimisers import OPTIMISERS
from stobatch.registry import METHODS
from stobatch.seeds import Seeds
from stobatch.sound.settings import SoundConfig
from stobatch.sound.step import DpSgdTrainable
from stobatch.training import Trainable
from stobatch.training.descent import Descent, rate_share
from stobatch.training.engines import Gradients
from stobatch.training.loop import train_one

SCHEDULES = ("constant", "linear", "cosine")
STEPS, RATE, MOMENTUM = 8, 0.5, 0.5
CURVED = {"training.schedule": "cosine", "training.warm_up": 0.3}


def expected_share(schedule: str, warm_up: float, progress: float) -> float:
    """Through the corners (0, 0), (warm_up, 1) and the schedule's end, by interpolation; a cosine is a squared one."""
    if progress < warm_up:
        return float(np.interp(progress, [0.0, warm_up], [0.0, 1.0]))
    end = {"constant": 1.0, "linear": 0.0, "cosine": 0.0}[schedule]
    if schedule == "cosine":
        return float(np.cos(np.pi / 2 * np.interp(progress, [warm_up, 1.0], [0.0, 1.0])) ** 2)
    return float(np.interp(progress, [warm_up, 1.0], [1.0, end]))


@given(st.sampled_from(SCHEDULES), st.integers(1, 100_000), st.floats(0, 0.999), st.floats(0, 1, exclude_max=True))
def test_the_rate_of_a_step_is_the_closed_form(schedule: str, steps: int, warm_up: float, place: float) -> None:
    training, step = TrainingConfig(steps=steps, schedule=schedule, warm_up=warm_up), int(place * steps)
    share = rate_share(training, step)
    assert share == pytest.approx(expected_share(schedule, warm_up, (step + 0.5) / steps), abs=1e-9)
    assert 0 < share <= 1, "a step that moves nothing would cost privacy for nothing"


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
def test_a_falling_rate_is_half_of_the_rate_on_average(schedule: str, steps: int) -> None:
    training = TrainingConfig(steps=steps, schedule=schedule)
    assert np.mean([rate_share(training, step) for step in range(steps)]) == pytest.approx(0.5, abs=1e-12)


def test_the_rate_grows_during_the_warm_up_and_never_afterwards() -> None:
    for schedule in SCHEDULES:
        shares = [rate_share(TrainingConfig(steps=100, schedule=schedule, warm_up=0.25), step) for step in range(100)]
        assert shares[:26] == sorted(shares[:26])
        assert shares[25:] == sorted(shares[25:], reverse=True)


def test_without_a_schedule_the_rate_keeps_its_bits() -> None:
    assert {rate_share(TrainingConfig(steps=977), step) for step in range(977)} == {1.0}


def test_settings_from_before_schedules_keep_their_hash() -> None:
    assert not {"schedule", "warm_up"} & TrainingConfig().to_dict().keys()
    changed = TrainingConfig(schedule="linear", warm_up=0.1)
    assert TrainingConfig.from_dict(changed.to_dict()) == changed
    hashes = {settings(**{key: value}).training_hash for key, value in CURVED.items()}
    assert len(hashes | {settings().training_hash}) == 3


@pytest.mark.parametrize("rule", OPTIMISERS)
def test_every_rule_of_a_training_has_the_rate_of_its_step(rule: str) -> None:
    """Rules may have rates of their own: each is scaled, and none by what an earlier step made of it."""
    values = {name: torch.nn.Parameter(torch.ones(2)) for name in "ab"}
    rules = [OPTIMISERS[rule]([value], lr=lr) for value, lr in zip(values.values(), (0.1, 0.4), strict=True)]  # type: ignore[call-arg]
    descent = Descent(TrainingConfig(steps=4, schedule="linear"), values, rules)
    for step in (0, 3, 3, 1):
        descent.step(step, {name: torch.ones(2) for name in values})
        assert [each.param_groups[0]["lr"] for each in rules] == [0.1 * (7 - 2 * step) / 8, 0.4 * (7 - 2 * step) / 8]
    assert all(value.grad is None for value in values.values())
    with pytest.raises(ModelError, match="what was released of b is not a number"):
        descent.step(0, {"a": torch.ones(2), "b": torch.tensor([1.0, torch.nan])})


# Of whole trainings.


def pictures() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.rand(40, 1, 6, 6, generator=generator) * 2 - 1, torch.arange(40) % 3
    return stobatch.from_tensors(inputs[:30], labels[:30], inputs[30:], labels[30:], num_classes=3)


def settings(**changes: Any) -> RunConfig:
    method = SoundConfig(epsilon=3.0, delta=1e-3, batch_size=10, momentum=MOMENTUM, average_decay=0.0)
    return RunConfig(
        method=method,
        data=DataConfig(name="tensors"),
        model=ModelConfig(architecture="squash 2 0 0.4, conv 3 3/2, relu, linear"),
        training=TrainingConfig(steps=STEPS, learning_rate=RATE, optimiser="sgd", monitor_every=4),
        machine=MachineConfig(threads=1, checkpoint_every=3),
        seed=4,
    ).override_all(changes)


class Written:
    """Descends on the same releases by hand."""

    def __init__(self, rates: list[float]) -> None:
        self.rates, self.moving = rates, dict[str, torch.Tensor]()

    def __call__(self, step: int, trainable: Trainable, released: Gradients) -> None:
        if not step:
            self.theta = {name: p.detach().clone() for name, p in trainable.network.named_parameters()}
        for name, gradient in released.items():
            self.moving[name] = MOMENTUM * self.moving[name] + gradient if step else gradient.clone()
            self.theta[name] = self.theta[name] - self.rates[step] * self.moving[name]


def train_beside(rates: list[float], config: RunConfig) -> float:
    """Return how far a training ends from one that is written out with these rates."""
    data, seeds, written = pictures(), Seeds.reproducible(4), Written(rates)
    network = make_network(config, data.info, seeds, None)
    plan = stobatch.plan(config, dataset=data)
    train_one(method_of(config).prepare(config, plan, network, data.train, seeds), config, written)
    return max(float((p.detach() - written.theta[name]).abs().max()) for name, p in network.named_parameters())


def test_parameters_move_at_the_rate_of_each_step() -> None:
    shares = [expected_share("cosine", 0.3, (step + 0.5) / STEPS) for step in range(STEPS)]
    assert train_beside([RATE * share for share in shares], settings(**CURVED)) < 1e-5
    assert train_beside([RATE] * STEPS, settings()) < 1e-5
    # Broken twins: the rate of the step before, and none of its own.
    assert train_beside([RATE * share for share in (0.0, *shares[:-1])], settings(**CURVED)) > 1e-2
    assert train_beside([RATE] * STEPS, settings(**CURVED)) > 1e-2


class Crash(BaseException):
    """Ends a training as a dying process does."""


def train_with_a_crash(out: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real, open_ = DpSgdTrainable.parts, [True]

    def parts(self: DpSgdTrainable, task: Any, at: int, share: Any) -> Iterator[Any]:
        if at == 5 and open_:
            open_.clear()
            raise Crash
        yield from real(self, task, at, share)

    with monkeypatch.context() as patched:
        patched.setattr(DpSgdTrainable, "parts", parts)
        with pytest.raises(Crash):
            stobatch.train(config, out, dataset=pictures(), quiet=True)
        stobatch.train(config, out, dataset=pictures(), resume=True, quiet=True)


def same_bits(one: Path, other: Path) -> bool:
    pairs = [
        (load_file(one / "model.safetensors"), load_file(other / "model.safetensors")),
        (checkpoints.tensors(one), checkpoints.tensors(other)),
    ]
    assert all(ours.keys() == theirs.keys() for ours, theirs in pairs)
    return all(torch.equal(ours[name], theirs[name]) for ours, theirs in pairs for name in ours)


@pytest.mark.parametrize("canaries", [0, 6])
def test_a_resumed_training_has_the_bits_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, canaries: int
) -> None:
    torch.set_num_threads(1)
    config = settings(**CURVED, **{"canaries.num": canaries})
    stobatch.train(config, tmp_path / "whole", dataset=pictures(), quiet=True)
    train_with_a_crash(tmp_path / "resumed", config, monkeypatch)
    assert same_bits(tmp_path / "whole", tmp_path / "resumed")
    assert stobatch.load(tmp_path / "resumed").accounted_steps == STEPS


def test_a_schedule_that_keeps_its_own_count_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin counts the steps that this process has made: after a restart it begins again."""
    torch.set_num_threads(1)
    real, counts = Descent.move, dict[int, int]()

    def move(self: Descent, step: int) -> None:
        counts[id(self)] = counts.get(id(self), -1) + 1
        real(self, counts[id(self)])

    monkeypatch.setattr(Descent, "move", move)
    kept = list[Descent]()
    begin = Descent.__init__

    def remember(self: Descent, *given: Any) -> None:
        begin(self, *given)
        kept.append(self)

    monkeypatch.setattr(Descent, "__init__", remember)
    config = settings(**CURVED)
    stobatch.train(config, tmp_path / "whole", dataset=pictures(), quiet=True)
    train_with_a_crash(tmp_path / "resumed", config, monkeypatch)
    assert len(kept) == 3
    assert not same_bits(tmp_path / "whole", tmp_path / "resumed")


def test_privacy_does_not_depend_on_the_rate() -> None:
    plain, curved = (stobatch.plan(settings(**changes), dataset=pictures()) for changes in ({}, CURVED))
    assert plain == curved


@pytest.mark.parametrize("changes", [{"training.schedule": "linear"}, {"training.warm_up": 0.1}])
def test_a_method_with_a_rate_of_its_own_refuses_a_schedule(changes: dict[str, Any]) -> None:
    config = RunConfig(method=METHODS["adlm"].config_class(batch_size=64)).override_all(changes)
    info = DatasetInfo("made up", (1, 28, 28), 10, 60_000, 1, tuple("0123456789"))
    with pytest.raises(SettingError, match="not for method 'adlm'"):
        method_of(config).plan(config, info, None)


@pytest.mark.parametrize(("name", "rule"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam)])
def test_rules_are_those_of_pytorch_to_the_bit(name: str, rule: type[torch.optim.Optimizer]) -> None:
    """Also through a state that was saved and taken back."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(7, generator=generator)
    ours, theirs = (torch.nn.Parameter(first.clone()) for _ in range(2))
    one, other = OPTIMISERS[name]([ours], lr=0.1), rule([theirs], lr=0.1)
    for _ in range(3):
        gradient = torch.randn(7, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        one.step()
        other.step()
        one.zero_grad(set_to_none=True)
        saved = one.state_dict()
        one = OPTIMISERS[name]([ours], lr=0.1)
        one.load_state_dict(saved)
        assert ours.grad is None
        assert torch.equal(ours, theirs)
