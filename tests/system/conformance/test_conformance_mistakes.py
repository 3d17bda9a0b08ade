"""The same mistake gives the same kind of error with every method: it says what to do, and nothing was written.

What a setting may be is declared once and tested setting by setting elsewhere; here it is the whole way from a call of
`train` that is asked of each method.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import (
    batch_key,
    budget_keys,
    data_of,
    dataset_with,
    other_examples,
    own_network,
    replaced,
    train_of,
    with_own_network,
)
from small import LAYERS, PAPER_NETWORK

import stobatch
from stobatch import Dataset, RunConfig, Status, StobatchError
from stobatch.config import TrainingConfig
from stobatch.dp.plan import Plan
from stobatch.errors import DataError, ModelError, RunError, SettingError
from stobatch.settings import declared

Mistake = Callable[[RunConfig], tuple[RunConfig, dict[str, Any]]]
"""The settings and the further arguments of a call of `train` that has to be refused."""


def setting(key: str, value: Any) -> Mistake:
    return lambda config: (config.override(key, value), {})


def tensors(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Mistake:
    """Training examples with a mistake in them, on their way to a data set."""

    def made(config: RunConfig) -> tuple[RunConfig, dict[str, Any]]:
        train, test = train_of(config), data_of(config).test
        inputs, labels = change(train.inputs.clone(), train.labels.clone())
        return config, {"dataset": stobatch.from_tensors(inputs, labels, test.inputs, test.labels, num_classes=10)}

    return made


def with_pixel(value: float) -> Mistake:
    def change(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs[5, 0, 3, 3] = value
        return inputs, labels

    return tensors(change)


def with_label(value: int) -> Mistake:
    def change(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        labels[5] = value
        return inputs, labels

    return tensors(change)


def from_file(config: RunConfig, section: str, key: str, value: Any) -> tuple[RunConfig, dict[str, Any]]:
    values = config.to_dict()
    values[section][key] = value
    return RunConfig.from_dict(values), {}


Expected = type[StobatchError] | tuple[type[StobatchError], ...]

MISTAKES: dict[str, tuple[Expected, Mistake]] = {
    "a pixel that is no number": (DataError, with_pixel(nan)),
    "a pixel that is endless": (DataError, with_pixel(inf)),
    "a pixel outside of [-1, 1]": (DataError, with_pixel(1.01)),
    "a label beyond the classes": (DataError, with_label(10)),
    "a negative label": (DataError, with_label(-1)),
    "no training examples": (DataError, tensors(lambda inputs, labels: (inputs[:0], labels[:0]))),
    "fewer labels than inputs": (DataError, tensors(lambda inputs, labels: (inputs, labels[1:]))),
    "no steps": (SettingError, setting("training.steps", 0)),
    "a learning rate of 0": (SettingError, setting("training.learning_rate", 0.0)),
    "a negative learning rate": (SettingError, setting("training.learning_rate", -0.1)),
    "a learning rate that is no number": (SettingError, setting("training.learning_rate", nan)),
    "a huge learning rate": (SettingError, setting("training.learning_rate", 1e300)),
    "an endless learning rate": (SettingError, setting("training.learning_rate", inf)),
    "an optimiser that does not exist": (SettingError, setting("training.optimiser", "adamm")),
    "a setting that does not exist": (SettingError, setting("method.no_such_setting", 1)),
    "a setting of a file that does not exist": (SettingError, lambda config: from_file(config, "method", "nothing", 1)),
    "a method that does not exist": (SettingError, lambda config: from_file(config, "method", "name", "sond")),
    "an architecture that does not exist": (SettingError, setting("model.architecture", "mnist_cnnn")),
    "a network that is not handed over": (ModelError, setting("model.architecture", "custom")),
    "layers that do not fit the images": (ModelError, setting("model.architecture", "conv 3 30, relu, linear")),
    "a network for other images": (
        ModelError,
        lambda config: (with_own_network(config), {"network": own_network(config, shape=(1, 7, 7))}),
    ),
    "a batch larger than the data": (
        SettingError,
        # A multiple of any few attacks, so that nothing else is wrong with it.
        lambda config: (config.override(batch_key(config), 10 * len(train_of(config))), {}),
    ),
}


def require_refused(config: RunConfig, mistake: Mistake, expected: Expected, out: Path) -> StobatchError:
    """The very type, a remedy, one line, and no trace of a run."""

    def attempt() -> None:
        changed, further = mistake(config)
        stobatch.train(changed, out, quiet=True, **{"dataset": data_of(config), **further})

    with pytest.raises(StobatchError) as caught:
        attempt()
    assert type(caught.value) in (expected if isinstance(expected, tuple) else (expected,))
    assert caught.value.remedy.strip()
    assert "\n" not in str(caught.value)
    assert not out.exists()
    return caught.value


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_before_anything_is_written(config: RunConfig, tmp_path: Path, name: str) -> None:
    expected, mistake = MISTAKES[name]
    require_refused(config, mistake, expected, tmp_path / "run")


@pytest.mark.parametrize("value", [0.0, -1.0, nan, inf])
def test_a_budget_that_is_none_is_refused(config: RunConfig, tmp_path: Path, value: float) -> None:
    for key in [key for keys in budget_keys(config).values() for key in keys]:
        require_refused(config, setting(key, value), SettingError, tmp_path / "run")


def test_a_method_with_a_budget_has_settings_for_it(config: RunConfig, plan: Plan) -> None:
    keys = budget_keys(config)
    assert bool(keys["epsilon"]) == (plan.guarantee.status is not Status.NONE)
    assert bool(keys["delta"]) == (plan.guarantee.status is not Status.NONE and plan.guarantee.delta > 0)


@pytest.mark.parametrize("share", [1.0, 2.0])
def test_a_delta_that_would_allow_to_publish_a_record_is_refused(
    proved: Plan, config: RunConfig, tmp_path: Path, share: float
) -> None:
    (key,) = budget_keys(config)["delta"]
    require_refused(config, setting(key, share / len(train_of(config))), SettingError, tmp_path / "run")


def refused_or_trained(config: RunConfig, expected: Expected, out: Path) -> bool:
    """Whether it was trained; if not it was refused as any mistake is."""
    try:
        stobatch.train(config, out, dataset=data_of(config), quiet=True)
    except StobatchError:
        require_refused(config, lambda same: (same, {}), expected, out)
        return False
    return True


def test_an_optimiser_is_trained_with_or_refused(config: RunConfig, tmp_path: Path) -> None:
    choices = declared(TrainingConfig)["optimiser"].choices
    short = config.override("training.steps", 2)
    trained = [
        name
        for name in choices
        if refused_or_trained(short.override("training.optimiser", name), SettingError, tmp_path / name)
    ]
    assert config.training.optimiser in trained


def test_an_architecture_is_trained_or_refused(config: RunConfig, tmp_path: Path) -> None:
    short = config.override("training.steps", 2)
    trained = [
        name
        for name in (LAYERS, PAPER_NETWORK)
        if refused_or_trained(short.override("model.architecture", name), ModelError, tmp_path / name[:5])
    ]
    assert config.model.architecture in trained


def test_layers_that_mix_examples_are_refused_where_privacy_is_per_example(
    config: RunConfig, plan: Plan, tmp_path: Path
) -> None:
    """Where no privacy is promised a method may train them; elsewhere no bound would hold for them."""
    if plan.guarantee.status is Status.NONE:
        pytest.skip("no promise is broken")

    def handed_over(given: RunConfig) -> tuple[RunConfig, dict[str, Any]]:
        return with_own_network(given), {"network": own_network(given, mixing=True)}

    def built(given: RunConfig) -> tuple[RunConfig, dict[str, Any]]:
        return given.override_all({"model.architecture": PAPER_NETWORK, "model.normalisation": "batch"}), {}

    for mistake in (handed_over, built):
        assert "BatchNorm" in str(require_refused(config, mistake, ModelError, tmp_path / "run"))


# Directories that hold something already.


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def one_pixel_less(config: RunConfig) -> Dataset:
    return dataset_with(config, replaced(train_of(config), 0))


def other_data(config: RunConfig) -> Dataset:
    return dataset_with(config, other_examples(train_of(config)))


@pytest.mark.parametrize("data", [one_pixel_less, other_data])
def test_a_run_is_not_resumed_with_other_data(
    config: RunConfig, undisturbed: Path, data: Callable[[RunConfig], Dataset]
) -> None:
    refused_in_place(config, undisturbed, data(config), resume=True)


@pytest.mark.parametrize("key", ["training.learning_rate", "training.steps", "seed", "batch"])
def test_a_run_is_not_resumed_with_other_settings(config: RunConfig, undisturbed: Path, key: str) -> None:
    key = batch_key(config) if key == "batch" else key
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    refused_in_place(config.override(key, 2 * value), undisturbed, data_of(config), resume=True)


def test_a_finished_run_is_not_begun_again(config: RunConfig, undisturbed: Path) -> None:
    refused_in_place(config, undisturbed, data_of(config), resume=False)


def refused_in_place(config: RunConfig, run: Path, data: Dataset, *, resume: bool) -> None:
    before = content(run)
    with pytest.raises(RunError) as caught:
        stobatch.train(config, run, dataset=data, resume=resume, quiet=True)
    assert caught.value.remedy.strip()
    assert content(run) == before


@pytest.mark.parametrize("where", ["file", "file/run", "folder"])
def test_an_out_directory_that_is_none_is_refused(config: RunConfig, tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis").write_text("mine")
    before = content(tmp_path)
    with pytest.raises(RunError) as caught:
        stobatch.train(config, tmp_path / where, dataset=data_of(config), quiet=True)
    assert caught.value.remedy.strip()
    assert content(tmp_path) == before
