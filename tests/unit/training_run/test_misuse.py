"""What a caller in Python hands over by mistake: one line with a remedy, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import stobatch
from stobatch.errors import DataError, RunError, SettingError
from tests.support.small_records import small_config, small_records

VERBS: dict[str, Any] = {
    "plan": lambda config, out: stobatch.plan(config),
    "train": stobatch.train,
    "tune": stobatch.tune,
    "pretrain": lambda config, out: stobatch.pretrain(config, "digits", out),
    "compare": lambda config, out: stobatch.compare({"row": config}, out),
    "shard": stobatch.shard,
    "federate": stobatch.federate,
}
INSTEAD = {
    "a recipe's name": ("demo", r"a str\. .*stobatch_recipes\.recipe\('demo'\)"),
    "a dictionary": ({"training": {"steps": 3}}, r"a dict\. .*RunConfig\.from_dict"),
    "nothing": (None, r"a NoneType\. .*stobatch_recipes\.recipe"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", INSTEAD)
def test_settings_that_are_no_config_are_refused_with_what_to_hand_over(verb: str, name: str, tmp_path: Path) -> None:
    given, said = INSTEAD[name]
    with pytest.raises(SettingError, match=f"settings are a RunConfig, and this is {said}"):
        VERBS[verb](given, tmp_path / "out")
    assert not list(tmp_path.iterdir())


WITH_DATA: dict[str, Any] = {
    "plan": lambda run, out, data: stobatch.plan(small_config(), dataset=data),
    "train": lambda run, out, data: stobatch.train(small_config(), out, dataset=data, quiet=True),
    "tune": lambda run, out, data: stobatch.tune(small_config(), out, dataset=data, quiet=True),
    "compare": lambda run, out, data: stobatch.compare({"row": small_config()}, out, dataset=data, quiet=True),
    "federate": lambda run, out, data: stobatch.federate(small_config(), out, dataset=data, quiet=True),
    "certify": lambda run, out, data: stobatch.certify(run, dataset=data, quiet=True),
    "evaluate": lambda run, out, data: stobatch.evaluate(run, dataset=data, quiet=True),
    "attack": lambda run, out, data: stobatch.attack(run, dataset=data, quiet=True),
    "audit": lambda run, out, data: stobatch.audit(run, dataset=data, quiet=True),
    "verify": lambda run, out, data: stobatch.verify(run, dataset=data),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that no verb gets to change."""
    out = tmp_path_factory.mktemp("misuse") / "run"
    stobatch.train(small_config(), out, dataset=small_records(), quiet=True)
    return out


@pytest.mark.parametrize("verb", WITH_DATA)
def test_tensors_are_no_data_set_and_are_refused_with_what_makes_one(verb: str, trained: Path, tmp_path: Path) -> None:
    inputs = torch.zeros(4, 1, 4, 4)
    for given, kind in (((inputs, torch.zeros(4).long()), "tuple"), (inputs, "Tensor")):
        with pytest.raises(DataError, match=rf"dataset is a {kind}, .*stobatch\.from_tensors\("):
            WITH_DATA[verb](trained, tmp_path / "out", given)
    assert not list(tmp_path.iterdir())


def test_rows_of_a_comparison_have_names(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="a RunConfig is no table of settings"):
        stobatch.compare(small_config(), tmp_path / "out")  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", [stobatch.load, stobatch.verify, stobatch.certify, stobatch.audit, stobatch.export])
@pytest.mark.parametrize("given", [3, None])
def test_what_is_no_path_names_no_run(verb: Any, given: Any, tmp_path: Path) -> None:
    more = {"out": tmp_path / "out", "to": "pt2"} if verb is stobatch.export else {}
    with pytest.raises(RunError, match=r"names no run\. Give the run's directory"):
        verb(given, **more)


def test_a_run_that_is_there_is_continued_as_python_says_it_and_samples_are_counted(tmp_path: Path) -> None:
    out = tmp_path / "run"
    stobatch.train(small_config(), out, dataset=small_records(0), quiet=True)
    with pytest.raises(RunError, match="resume=True"):
        stobatch.train(small_config(), out, dataset=small_records(0), quiet=True)
    for sample in (-1, 2.5):
        with pytest.raises(SettingError, match=f"sample={sample} is no number of rows"):
            stobatch.verify(out, sample=sample)  # type: ignore[arg-type]
