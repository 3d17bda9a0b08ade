"""Trainings that leave parts of a network as they are: what moves, what is saved, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stobatch
from stobatch import RunConfig
from stobatch.config import DataConfig, EvaluationConfig, MachineConfig, ModelConfig, TrainingConfig
from stobatch.data import load as load_data
from stobatch.errors import ModelError, SettingError
from stobatch.files import read_tensors
from stobatch.loading import make_network, plain_network
from stobatch.models import Classifier, Layered
from stobatch.models.low_rank import Adapted
from stobatch.results import Outcome, Training
from stobatch.runs import Run
from stobatch.seeds import Seeds
from stobatch.sound.settings import SoundConfig
from stobatch.sound.step import DpSgdTrainable

CONFIG = RunConfig(
    method=SoundConfig(epsilon=3.0, delta=1e-3, batch_size=30, clip_norm=0.5, warm_up=0.0),
    data=DataConfig(name="small_digits", train_limit=120, test_limit=20),
    model=ModelConfig(architecture="conv 4 3/2, relu, linear 12, relu, linear"),
    training=TrainingConfig(steps=3, learning_rate=0.5, optimiser="sgd", monitor_every=3, monitor_examples=20),
    evaluation=EvaluationConfig(radii=(0.05,)),
    machine=MachineConfig(threads=1, checkpoint_every=1),
    seed=4,
)
HEAD, ALL = ("layers.5.weight", "layers.5.bias"), ("0.weight", "0.bias", "3.weight", "3.bias", "5.weight", "5.bias")


def config_with(**model: Any) -> RunConfig:
    return CONFIG.override_all({f"model.{key}": value for key, value in model.items()})


def start_of(config: RunConfig, given: Classifier | None = None) -> dict[str, torch.Tensor]:
    info, seeds = load_data(config.data).info, Seeds.reproducible(config.seed or 0)
    return {name: value.clone() for name, value in plain_network(config, info, seeds, given).state_dict().items()}


def moved(config: RunConfig, run: Path, given: Classifier | None = None) -> set[str]:
    """The tensors of a saved model that are not what they were at the start."""
    first, (last, _) = start_of(config, given), read_tensors(run / "model.safetensors")
    assert first.keys() == last.keys()
    return {name for name in first if not torch.equal(first[name], last[name])}


@pytest.mark.parametrize(
    ("train_only", "names"),
    [
        ("head", HEAD),
        ("last-2", ("layers.3.weight", "layers.3.bias", *HEAD)),
        ("last-3", tuple(f"layers.{name}" for name in ALL)),
        ("*.bias", ("layers.0.bias", "layers.3.bias", "layers.5.bias")),
        ("layers.0.*, layers.5.weight", ("layers.0.weight", "layers.0.bias", "layers.5.weight")),
    ],
)
def test_what_is_named_is_trained_and_nothing_else(train_only: str, names: tuple[str, ...], tmp_path: Path) -> None:
    config = config_with(train_only=train_only)
    model = stobatch.train(config, tmp_path / "run", quiet=True)
    assert moved(config, tmp_path / "run") == set(names)
    facts, whole = Training.read(Run(tmp_path / "run")).network, sum(v.numel() for v in start_of(config).values())
    assert facts is not None
    count = sum(value.numel() for name, value in start_of(config).items() if name in names)
    assert facts.parameters == whole
    assert (facts.trained, facts.trained_names) == ((None, None) if count == whole else (count, names))
    rows = {row["name"]: (row["value"], row["formula"]) for row in model.plan.to_dict()["rows"]}
    assert rows.get("parameters trained") == (None if count == whole else (count, f"of {whole}"))


@pytest.mark.parametrize("train_only", ["head", "*.bias"])
def test_a_run_with_frozen_parts_is_verified(train_only: str, tmp_path: Path) -> None:
    stobatch.train(config_with(train_only=train_only), tmp_path / "run", quiet=True)
    assert stobatch.verify(tmp_path / "run", sample=0).verdict is Outcome.AGREES


def test_the_rest_of_a_network_handed_over_stays_as_it_is(tmp_path: Path) -> None:
    def own() -> Layered:
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)]
        network = Layered(layers, (1, 8, 8))
        network.layers[0].requires_grad_(False)
        return network

    config, data = CONFIG.override("model.architecture", "custom"), load_data(CONFIG.data)
    stobatch.train(config, tmp_path / "run", dataset=data, network=own(), quiet=True)
    assert moved(config, tmp_path / "run", own()) == {"layers.3.weight", "layers.3.bias"}
    verified = stobatch.verify(tmp_path / "run", sample=0, dataset=data, network=own())
    assert verified.verdict is Outcome.AGREES
    with pytest.raises(ModelError, match="no parameter of the network is trained"):
        stobatch.train(config, tmp_path / "none", dataset=data, network=own().requires_grad_(False), quiet=True)
    assert not (tmp_path / "none").exists()


def test_adapters_are_trained_and_merged(tmp_path: Path) -> None:
    config = config_with(adapter_rank=1)
    model = stobatch.train(config, tmp_path / "run", quiet=True)
    # The weights of adapted layers move, their biases do not; the last layer is trained as it is.
    assert moved(config, tmp_path / "run") == {"layers.0.weight", "layers.3.weight", *HEAD}
    assert not any(isinstance(layer, Adapted) for layer in model.network.modules())
    first, (last, _) = start_of(config), read_tensors(tmp_path / "run" / "model.safetensors")
    for name in ("layers.0.weight", "layers.3.weight"):
        assert torch.linalg.matrix_rank((last[name] - first[name]).flatten(1), rtol=1e-3) == 1
    facts = Training.read(Run(tmp_path / "run")).network
    assert facts is not None
    assert facts.parameters == sum(value.numel() for value in first.values())
    adapters = (4 + 9) + (12 + 4 * 9)
    assert facts.trained == adapters + 12 * 10 + 10
    assert facts.trained_names is not None
    assert {"layers.0.up", "layers.0.down"} < set(facts.trained_names)
    assert stobatch.verify(tmp_path / "run", sample=0).verdict is Outcome.AGREES
    assert stobatch.certify(tmp_path / "run", quiet=True).rows == 20


@pytest.mark.parametrize("model", [{"train_only": "last-2"}, {"adapter_rank": 1}], ids=["frozen", "adapters"])
def test_a_killed_training_ends_with_the_same_bits(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_with(**model)
    stobatch.train(config, tmp_path / "whole", quiet=True)
    original = DpSgdTrainable.released

    def killed(self: DpSgdTrainable, step: int, gradients: Any) -> None:
        if step == 2:
            raise KeyboardInterrupt
        original(self, step, gradients)

    with monkeypatch.context() as patch:
        patch.setattr(DpSgdTrainable, "released", killed)
        with pytest.raises(KeyboardInterrupt):
            stobatch.train(config, tmp_path / "killed", quiet=True)
    stobatch.train(config, tmp_path / "killed", resume=True, quiet=True)
    digests = [Training.read(Run(tmp_path / name)).weights_sha256 for name in ("whole", "killed")]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("model", [{"train_only": "head"}, {"adapter_rank": 1}], ids=["frozen", "adapters"])
def test_a_frozen_layer_that_moves_with_the_data_is_never_saved(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken twin: a layer that is called frozen follows private examples without noise."""
    original = DpSgdTrainable.after_update

    def leaking(self: DpSgdTrainable) -> None:
        original(self)
        if hasattr(self, "average"):
            inputs, _ = self.reader.fetch(torch.arange(1))
            with torch.no_grad():
                next(self.network.parameters()).add_(1e-6 * inputs.mean())

    monkeypatch.setattr(DpSgdTrainable, "after_update", leaking)
    with pytest.raises(ModelError, match="is not trained, and is not what it was before training"):
        stobatch.train(config_with(**model), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"train_only": "last-4"}, "asks for more layers than the 3 that have parameters"),
        ({"train_only": "layers.9.*"}, "no parameter has a name like 'layers.9.*'"),
        ({"adapter_rank": 40}, "fits no layer that is not trained"),
    ],
)
def test_settings_that_name_nothing_are_refused_before_anything_is_written(
    model: dict[str, Any], words: str, tmp_path: Path
) -> None:
    for verb in (stobatch.plan, lambda config: stobatch.train(config, tmp_path / "run")):
        with pytest.raises(SettingError) as error:
            verb(config_with(**model))
        assert words in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_method_whose_analysis_is_of_the_whole_network_refuses_parts() -> None:
    from stobatch_recipes import recipe

    with pytest.raises(SettingError, match=r"model\.train_only and model\.adapter_rank are not for method"):
        stobatch.plan(recipe("audit.published").override("model.train_only", "head"))


def test_noise_and_canaries_are_of_what_is_trained(tmp_path: Path) -> None:
    config = config_with(train_only="head").override_all({"canaries.num": 40, "method.epsilon": 1.0})
    stobatch.train(config, tmp_path / "run", quiet=True)
    assert moved(config, tmp_path / "run") == set(HEAD)
    audit = stobatch.audit(tmp_path / "run", quiet=True)
    assert [finding.instrument for finding in audit.findings] == ["one_run"]
    assert all(finding.verdict != "refuted" for finding in audit.findings)


def test_adapters_start_as_the_network_that_was_there() -> None:
    info, seeds = load_data(CONFIG.data).info, Seeds.reproducible(1)
    plain = plain_network(CONFIG, info, seeds, None)
    adapted = make_network(config_with(adapter_rank=1), info, seeds, None)
    inputs = torch.rand(3, *info.input_shape)
    assert torch.equal(plain(inputs), adapted(inputs))


def test_a_plain_module_is_trained_in_part_by_its_own_names(tmp_path: Path) -> None:
    def own() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 12), nn.ReLU(), nn.Linear(12, 10)
        )

    data = load_data(CONFIG.data)
    plain = CONFIG.override("method.certified_weight", 0.0)
    for train_only, rank, names in (("5.*, 0.bias", 0, {"0.bias", "5.weight", "5.bias"}), (None, 1, None)):
        config = plain.override_all({"model.train_only": train_only, "model.adapter_rank": rank})
        run = tmp_path / f"rank {rank}"
        stobatch.train(config, run, dataset=data, network=own(), quiet=True)
        last, _ = read_tensors(run / "model.safetensors")
        found = {name for name, value in own().state_dict().items() if not torch.equal(value, last[name])}
        assert found == (names or {"0.weight", "3.weight", "5.weight", "5.bias"})
        assert stobatch.verify(run, sample=0, dataset=data, network=own()).verdict is Outcome.AGREES
