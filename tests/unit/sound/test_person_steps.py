"""A step that samples persons: each adds one clipped vector, whatever it owns; two mistakes about that are caught."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sound_steps import BATCH, CLASSES, Gradients, flat, prepared, sampling, settings, step_of
from sound_steps import pictures as without_persons
from support.noise_checks import normal_of
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import stobatch
from stobatch.baselines.controls import RecordClipping, SplitPersons
from stobatch.baselines.dpsgd import DpSgdConfig
from stobatch.data import Dataset, poisson_sample
from stobatch.data.persons import few_of_each
from stobatch.dp.canaries import Canaries, GradientCanaries
from stobatch.errors import SettingError
from stobatch.methods import method_of
from stobatch.models import build
from stobatch.seeds import Seeds
from stobatch.sound.step import DpSgdTrainable
from stobatch.training.engines import InProcessEngine
from stobatch.training.engines.base import DeviceRank
from stobatch.training.exact_sum import ExactSum

PERSONS, MOST = 20, 3
OWNED = [1 + person % 5 for person in range(PERSONS)]
"""Records of each: from 1 to 5."""


def pictures() -> Dataset:
    """Records of a person lie apart, and those of all persons are mixed."""
    generator = torch.Generator().manual_seed(0)
    owners = torch.arange(PERSONS).repeat_interleave(torch.tensor(OWNED))
    owners = owners[torch.randperm(len(owners), generator=generator)]
    inputs = torch.rand(len(owners) + 6, 1, 6, 6, generator=generator) * 2 - 1
    labels = torch.randint(CLASSES, (len(owners) + 6,), generator=generator)
    return stobatch.from_tensors(
        *(inputs[:-6], labels[:-6], inputs[-6:], labels[-6:]), num_classes=CLASSES, groups=owners
    )


def config(**changes: Any) -> stobatch.RunConfig:
    return settings(**{"method.records_per_person": MOST, "method.certified_weight": 0.0, **changes})


def owned_by(trainable: DpSgdTrainable, person: int) -> list[int]:
    groups = trainable.examples.in_memory().groups
    assert groups is not None
    return (groups == person).nonzero().flatten().tolist()


def oracle(trainable: DpSgdTrainable, step: int) -> Gradients:
    """(Σ over drawn persons of the clipped mean gradient of at most K records + noise)/(C B), person by person."""
    plan, seeds, parameters = trainable.plan, trainable.seeds, dict(trainable.network.named_parameters())
    sample = poisson_sample(PERSONS, plan.sampling_rate, seeds.stream("step", step, "sample"))
    owned = [owned_by(trainable, person) for person in sample.tolist()]
    rows = [row for each in owned for row in each]
    counts = torch.tensor([len(each) for each in owned], dtype=torch.int64)
    drawn = {rows[place] for place in few_of_each(counts, MOST, seeds.stream("step", step, "records")).tolist()}
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for each in owned:
        own = [row for row in each if row in drawn]
        assert len(own) == min(MOST, len(each))
        inputs, labels = trainable.reader.fetch(torch.tensor(own))
        loss = 0.5 * F.cross_entropy(trainable.network(inputs), labels)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        length = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        for name, gradient in zip(parameters, gradients, strict=True):
            total[name] += min(1.0, plan.clip_norm / length) * gradient
    noise = normal_of(seeds.stream("step", step, "noise"), sum(p.numel() for p in parameters.values()))
    own_noise = noise.split([p.numel() for p in parameters.values()])
    return {
        name: (value + part.view(value.shape) * plan.noise_stddev).to(value) / (plan.clip_norm * BATCH)
        for (name, value), part in zip(total.items(), own_noise, strict=True)
    }


@pytest.mark.parametrize("step", [0, 2, 5])
@pytest.mark.parametrize("chunk", [512, 7, 3])
@pytest.mark.parametrize("clip_norm", [0.01, 0.5])
def test_a_step_is_the_sum_over_persons_of_one_clipped_vector(step: int, chunk: int, clip_norm: float) -> None:
    trainable = prepared(config(**{"method.clip_norm": clip_norm}), pictures())
    trainable.chunk = chunk
    assert trainable.plan.sampling_rate == BATCH / PERSONS
    assert torch.allclose(flat(step_of(trainable, step)), flat(oracle(trainable, step)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_devices_share_persons_and_give_the_same_sum(devices: int) -> None:
    trainable = prepared(config(), pictures())
    trainable.chunk = 4
    (task,) = trainable.tasks(1)
    total = ExactSum(trainable.targets(1), trainable.grid(1))
    for device in range(devices):
        for part in trainable.parts(task, 1, DeviceRank(device, devices)):
            total.add(part)
    assert torch.equal(flat(total.mean(1)), flat(step_of(trainable, 1)))


def test_a_person_has_one_trainer() -> None:
    trainable = prepared(config(**{"trainers.num": 3, "trainers.per_step": 3}), pictures())
    assert [len(owned[0]) for owned in trainable.holdings] == [6, 7, 7]
    assert trainable.plan.guarantee.unit == "person of any one trainer"
    assert flat(dict(trainable.release(0, InProcessEngine()).gradients)).isfinite().all()


class _Persons:
    """One step with chosen persons; noise of the step is taken off."""

    def __init__(self, trainable: DpSgdTrainable, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainable, self.patch = trainable, monkeypatch
        self.nothing = self.released()

    def released(self, *persons: int) -> Tensor:
        sampling(self.patch, *persons)
        return flat(step_of(self.trainable, 3))

    def contribution(self, *persons: int) -> Tensor:
        return self.released(*persons) - self.nothing


def largest(trainable: DpSgdTrainable, monkeypatch: pytest.MonkeyPatch, units: dict[int, tuple[int, ...]]) -> float:
    """Return how far a whole person moves a step, in units of what the noise is chosen for."""
    steps = _Persons(trainable, monkeypatch)
    return max(float(steps.contribution(*own).norm()) for own in units.values()) * BATCH


ALONE = {person: (person,) for person in range(PERSONS)}


@pytest.mark.parametrize("method", ["sound", "dpsgd", "dp_adversarial", "dp_smoothing"])
def test_a_person_moves_a_step_by_one_clipped_contribution(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = config(**{"method.clip_norm": 0.01})
    if method != "sound":
        shared = {name: getattr(given.method, name) for name in DpSgdConfig.model_fields}
        given = given.replace(method=stobatch.config.MethodConfig.from_dict({"name": method, **shared}))
    trainable = prepared_for(given)
    assert 0.99 <= largest(trainable, monkeypatch, ALONE) <= 1.001


def prepared_for(given: stobatch.RunConfig, kind: type[DpSgdTrainable] | None = None) -> DpSgdTrainable:
    data = pictures()
    network = build(given.model, data.info.input_shape, CLASSES, torch.Generator().manual_seed(2))
    plan, seeds = stobatch.plan(given, dataset=data), Seeds.reproducible(4)
    if kind is None:
        found = method_of(given).prepare(given, plan, network, data.train, seeds)
        assert isinstance(found, DpSgdTrainable)
        return found
    sizes = {"memory_mb": 512, "trainers": given.trainers, "pieces": 4}
    return kind(given.method, plan, network, data.train, seeds, **sizes)


def test_records_clipped_one_by_one_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = prepared_for(config(**{"method.clip_norm": 0.01}), RecordClipping)
    assert largest(broken, monkeypatch, ALONE) > 1.5


def test_a_person_split_in_two_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """All units that the training has made of a person's records are drawn: more than one of them."""
    broken = prepared_for(config(**{"method.clip_norm": 0.01}), SplitPersons)
    assert broken.persons is not None
    groups = broken.examples.in_memory().groups
    assert groups is not None
    units: dict[int, list[int]] = {}
    for unit in range(len(broken.persons)):
        rows, _ = broken.persons.rows(torch.tensor([unit]))
        units.setdefault(int(groups[rows[0]]), []).append(unit)
    assert sorted(map(len, units.values())) == sorted(min(2, owned) for owned in OWNED)
    assert largest(broken, monkeypatch, {person: tuple(own) for person, own in units.items()}) > 1.5


@pytest.mark.parametrize(("kind", "pull"), [(DpSgdTrainable, 1.0), (RecordClipping, MOST), (SplitPersons, 2.0)])
def test_a_canary_is_a_person(kind: type[DpSgdTrainable], pull: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradient canaries pull by C, all K records together; the broken ones by more."""
    trainable = prepared_for(config(), kind)
    trainable.add_canaries(Canaries(torch.tensor([False, True]), GradientCanaries(torch.tensor([3, 5]))))
    own, planted = len(trainable.holdings[0][0]), len(trainable.canaries_in)
    sampling(monkeypatch)
    nothing = flat(step_of(trainable, 2))
    sampling(monkeypatch, *range(own, own + planted))
    moved = (flat(step_of(trainable, 2)) - nothing) * BATCH
    assert torch.allclose(moved[5], torch.tensor(pull, dtype=torch.float64), rtol=1e-4)
    assert float(moved.norm()) == pytest.approx(pull, rel=1e-4)


def test_an_input_canary_is_a_person_of_k_records() -> None:
    trainable = prepared_for(config())
    before = len(trainable.examples)
    planted = Canaries(torch.tensor([True, False, True]), None, torch.ones(3, 1, 6, 6), torch.tensor([0, 1, 2]))
    trainable.add_canaries(planted)
    assert len(trainable.examples) == before + 2 * MOST
    assert trainable.persons is not None
    assert len(trainable.persons) == PERSONS + 2
    rows, counts = trainable.persons.rows(torch.tensor([PERSONS + 1]))
    assert counts.tolist() == [MOST]
    assert trainable.reader.fetch(rows)[1].tolist() == [2] * MOST
    assert trainable.plan.sampling_rate == BATCH / PERSONS


def test_a_person_must_fit_the_memory() -> None:
    with pytest.raises(SettingError, match="1024 rows are one contribution"):
        prepared(config(**{"method.records_per_person": 1024}), pictures())


@pytest.mark.parametrize("name", ["control_split_persons", "control_record_clipping"])
def test_controls_about_persons_need_some(name: str) -> None:
    given = config()
    method = stobatch.config.MethodConfig.from_dict({**given.method.to_dict(), "name": name})
    assert stobatch.plan(given.replace(method=method), dataset=pictures()).guarantee.unit == "person"
    with pytest.raises(SettingError, match="needs data whose records have persons"):
        stobatch.plan(given.replace(method=method), dataset=without_persons())


def test_a_training_that_was_cut_off_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With persons, views of their records, and Adam; a checkpoint is made every three steps."""
    views = {"method.augmentations": ["crop", "flip"], "method.augmented_views": 2, "training.optimiser": "adam"}
    given, data = config(**views), pictures()
    whole = stobatch.train(given, tmp_path / "whole", dataset=data, quiet=True)
    real = DpSgdTrainable.release

    def cut_off(trainable: DpSgdTrainable, step: int, *rest: Any) -> Any:
        if step == 5:
            raise RuntimeError("cut off")
        return real(trainable, step, *rest)

    monkeypatch.setattr(DpSgdTrainable, "release", cut_off)
    with pytest.raises(RuntimeError, match="cut off"):
        stobatch.train(given, tmp_path / "cut", dataset=data, quiet=True)
    monkeypatch.undo()
    again = stobatch.train(given, tmp_path / "cut", dataset=data, resume=True, quiet=True)
    assert again.weights_sha256 == whole.weights_sha256
    assert again.accounted_steps == given.training.steps
