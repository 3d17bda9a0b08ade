"""Every method of the DP-SGD family with parts that are not trained, with adapters, and from a prior."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import access
import pytest
import torch
from bench import batch_key, data_of, prepared
from odd_engines import Devices, Noting, same
from small import SMALL

import stobatch
from stobatch import RunConfig, Status
from stobatch.errors import ModelError, SettingError
from stobatch.files import read_tensors
from stobatch.loading import fresh_network
from stobatch.methods import Method, method_of
from stobatch.results import Outcome, PriorCard, PriorSource
from stobatch.results.prior import write_prior
from stobatch.seeds import Seeds
from stobatch.sound.method import DpSgdFamily
from stobatch.sound.step import DpSgdTrainable

PARTS: dict[str, dict[str, Any]] = {"head": {"model.train_only": "head"}, "adapters": {"model.adapter_rank": 1}}
OURS = [
    ("sound", "head"),
    ("sound", "adapters"),
    ("dpsgd", "adapters"),
    ("dp_adversarial", "head"),
    ("dp_smoothing", "adapters"),
    ("securesgd", "head"),
    ("securesgd_agm", "adapters"),
]
"""Every method of the family that trains parts has one of both at least, and `sound` has both."""
FAMILY = {name for name, config in SMALL.items() if isinstance(method_of(config), DpSgdFamily)}
TRAINS = {name for name, config in SMALL.items() if method_of(config).trains_parts}
OTHERS = sorted(FAMILY & TRAINS - {name for name, _ in OURS})
"""Methods of other packages, of which nobody here knows the names."""
TRIED = [*(one for one in OURS if one[0] in SMALL), *((name, "head") for name in OTHERS)]


@pytest.fixture(params=TRIED, ids=" ".join)
def config(request: pytest.FixtureRequest) -> RunConfig:
    name, parts = request.param
    return SMALL[name].override_all(PARTS[parts])


def test_every_method_of_the_family_is_tried_or_refuses() -> None:
    if "sound" in SMALL:
        assert not OTHERS
        assert FAMILY <= TRAINS
    for name in SMALL.keys() - TRAINS:
        for key, value in (("model.train_only", "head"), ("model.adapter_rank", 1)):
            with pytest.raises(SettingError, match="are not for method"):
                stobatch.plan(SMALL[name].override(key, value), dataset=data_of(SMALL[name]))


@pytest.fixture
def method(config: RunConfig) -> Method:
    return method_of(config)


def test_releases_are_of_what_is_trained_alone(method: Method, config: RunConfig) -> None:
    trainable, engine = prepared(method, config), Noting()
    trained = {name for name, p in trainable.network.named_parameters() if p.requires_grad}
    assert 0 < len(trained) < len(list(trainable.network.parameters()))
    for step in (0, config.training.steps - 1):
        trainable.release(step, engine)
    # A method may release something else in some steps, which is not descended on.
    assert set(engine.releases[-1]) == trained


def test_a_record_moves_the_releases_that_drew_it_within_bounds(
    method: Method, config: RunConfig, tmp_path: Path
) -> None:
    assert not access.undue_influence(method, config, tmp_path)


def test_an_empty_sample_is_released_as_noise(method: Method, config: RunConfig) -> None:
    assert not access.silent_releases(method, config)


def test_two_devices_sum_to_the_bits_of_one(method: Method, config: RunConfig) -> None:
    larger = config.override(batch_key(config), 90)
    alone, engine = Noting(), Devices(2)
    for each in (alone, engine):
        prepared(method, larger).release(7, each)
    assert same(engine.releases[0], alone.releases[0])


def write(folder: Path, config: RunConfig, *may_contain: str) -> Path:
    """A prior for the network of an entry, with weights that its seed does not give."""
    info = data_of(config).info
    network = fresh_network(config, info, Seeds.reproducible(77), None)
    source = PriorSource(name="shapes", what="drawn shapes", licence="CC0-1.0", sha256=None, records=None)
    card = PriorCard(
        name="shapes", made_by="a test", architecture=config.model.to_dict(), input_shape=info.input_shape,
        num_classes=info.num_classes, sources=(source,), may_contain=may_contain, weights_sha256="",
        method="supervised", settings={},
    )  # fmt: skip
    write_prior(folder / "shapes", network.state_dict(), card)
    return folder / "shapes"


def from_prior(config: RunConfig, folder: Path, *may_contain: str) -> stobatch.TrainedModel:
    data, prior = data_of(config), write(folder, config, *may_contain)
    return stobatch.train(config.replace(seed=None), folder / "run", dataset=data, prior=prior, quiet=True)


def test_what_is_not_trained_is_the_priors_to_the_bit(config: RunConfig, tmp_path: Path) -> None:
    model = from_prior(config, tmp_path)
    given, _ = read_tensors(tmp_path / "shapes.safetensors")
    saved, _ = read_tensors(tmp_path / "run" / "model.safetensors")
    moved = {name for name in given if not torch.equal(given[name], saved[name])}
    assert model.plan.parts is not None
    assert moved == {re.sub(r"\.(up|down)$", ".weight", name) for name in model.plan.parts.names}
    assert model.guarantee.status is Status.PROVED
    assert model.guarantee.prior is not None
    verified = stobatch.verify(tmp_path / "run", sample=0, dataset=data_of(config))
    assert verified.verdict is Outcome.AGREES
    assert "prior" in {check.name for check in verified.checks}


def test_a_prior_that_may_have_seen_the_records_proves_nothing(config: RunConfig, tmp_path: Path) -> None:
    guarantee = from_prior(config, tmp_path, "mnist").guarantee
    assert guarantee.status is Status.CLAIMED
    assert "may contain the private records" in guarantee.objections[0]


def leaking(original: Callable[[DpSgdTrainable], None]) -> Callable[[DpSgdTrainable], None]:
    """As the step does, and then a frozen tensor moves with a private example, without noise."""

    def after_update(self: DpSgdTrainable) -> None:
        original(self)
        frozen = [p for p in self.network.parameters() if not p.requires_grad]
        if hasattr(self, "average"):
            inputs, _ = self.reader.fetch(torch.arange(1))
            with torch.no_grad():
                frozen[0].add_(1e-6 * inputs.mean())

    return after_update


def test_a_frozen_tensor_that_follows_the_data_is_never_saved(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken twin of the whole file."""
    kind = type(prepared(method_of(config), config))
    monkeypatch.setattr(kind, "after_update", leaking(kind.after_update))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="is not trained, and is not what it was before training"):
        stobatch.train(config, tmp_path / "run", dataset=data_of(config), quiet=True)
    assert not (tmp_path / "run" / "model.safetensors").exists()
