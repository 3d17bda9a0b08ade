"""One name for people, the stored one in files: hashes stay, both are accepted, and nobody reads the stored one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stobatch
import stobatch.cli
from stobatch.cli.app import app
from stobatch.config import MethodConfig, RunConfig
from stobatch.errors import BudgetError, SettingError
from stobatch.registry import METHODS
from stobatch.settings import dotted_keys
from stobatch_recipes import RECIPES, baselines, recipe

ROOT = Path(__file__).parents[3]
STORED = [
    ("published", "epsilon", "total_epsilon", 7.0),
    ("adlm", "epsilon", "total_epsilon", 7.0),
    *((name, "batch_size", "expected_batch_size", 77) for name in ("sound", "dpsgd", "securesgd", "federated")),
]


def settings_of(method: str) -> MethodConfig:
    return METHODS[method].config_class()


def test_the_published_mechanism_has_its_own_name_and_files_keep_theirs() -> None:
    config = recipe("published.mnist")
    assert (config.method.title, config.method.name) == ("published", "stobatch")
    values = config.to_dict()
    assert values["method"]["name"] == "stobatch"
    for name in ("published", "stobatch"):
        values["method"]["name"] = name
        assert RunConfig.from_dict(values) == config
    assert METHODS["published"] is METHODS["stobatch"]
    assert "stobatch" not in list(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_people_and_files_agree_on_every_other_name(name: str) -> None:
    settings = settings_of(name)
    assert settings.title == name
    assert (settings.name == name) is (name != "published")
    assert RunConfig(method=settings).to_dict()["method"]["name"] == settings.name


def test_records_are_of_the_recipes_by_either_name() -> None:
    records = json.loads((ROOT / "results" / "paper_mnist.json").read_text())
    assert len(records) == 3
    for record in records:
        for family, key in (("published", "epsilon"), ("paper", "total_epsilon")):
            config = recipe(f"{family}.mnist").override(f"method.{key}", record["claimed_epsilon"])
            assert config.override("seed", record["seed"]).training_hash == record["training_hash"]


def test_the_papers_recipes_are_aliases() -> None:
    family = [name for name in RECIPES if name.startswith("published.")]
    assert family
    for name in family:
        assert recipe(name.replace("published.", "paper.")) == recipe(name)
    assert not [name for name in RECIPES if name.startswith("paper.")]


@pytest.mark.parametrize(("method", "name", "stored", "value"), STORED)
def test_a_setting_has_one_name_for_people_and_is_stored_by_another(
    method: str, name: str, stored: str, value: float
) -> None:
    config = RunConfig(method=settings_of(method))
    changed = config.override(f"method.{name}", value)
    assert getattr(changed.method, name) == value
    assert changed == config.override(f"method.{stored}", value)
    assert changed.method == config.method.replace(**{stored: value})
    plain = changed.to_dict()["method"]
    assert plain[stored] == value
    assert name not in plain
    assert RunConfig.from_dict(changed.to_dict()) == changed
    assert MethodConfig.from_dict({key if key != stored else name: v for key, v in plain.items()}) == changed.method
    keys = dotted_keys(config)
    assert f"method.{name}" in keys
    assert f"method.{stored}" not in keys


@pytest.mark.parametrize(("method", "name", "stored", "value"), STORED)
def test_both_names_at_once_are_refused(method: str, name: str, stored: str, value: float) -> None:
    config = RunConfig(method=settings_of(method))
    with pytest.raises(SettingError, match=f"'{name}' and '{stored}' are one setting. Give {name} alone"):
        config.override_all({f"method.{name}": value, f"method.{stored}": value})
    with pytest.raises(SettingError, match="are one setting"):
        MethodConfig.from_dict({"name": method, name: value, stored: value})


def test_errors_speak_of_the_name_that_people_set() -> None:
    for key in ("method.epsilon", "method.total_epsilon"):
        with pytest.raises(SettingError) as caught:
            recipe("published.mnist").override(key, -1.0)
        assert str(caught.value).startswith("epsilon=-1.0 is not allowed")
    with pytest.raises(SettingError, match=r"batch_size=60001 does not fit.*method\.batch_size"):
        stobatch.plan(recipe("sound.mnist").override("method.expected_batch_size", 60_001))
    with pytest.raises(SettingError, match="not for method 'published'"):
        stobatch.plan(recipe("published.mnist").override("trainers.num", 2))
    with pytest.raises(BudgetError, match=r"Raise method\.epsilon"):
        stobatch.plan(recipe("published.mnist").override("method.epsilon", 0.05))


def test_rows_of_a_comparison_have_the_name_that_people_read() -> None:
    rows = baselines.rows(["stobatch", "published", "sound"], [1.0], 0.2)
    assert list(rows) == ["published ε=1", "sound ε=1"]
    assert "stobatch" not in baselines.COMPARED
    with pytest.raises(SettingError, match="published"):
        baselines.compared("publishd")


@pytest.mark.parametrize("verb", ["plan", "train", "compare", "certify", "attack"])
def test_help_has_the_names_that_people_read(verb: str) -> None:
    text = " ".join(CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"}).output.split())
    assert text
    assert not re.search(r"paper\.[a-z]|total_epsilon|expected_batch_size|,stobatch", text)


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{name}.md" for name in ("comparing", "guarantees", "tutorial"))]
)
def test_pages_have_the_names_that_people_read(page: str) -> None:
    text = (ROOT / page).read_text()
    assert not re.search(r"method\.total_epsilon|method\.expected_batch_size|--recipe paper\.|\| `stobatch` \|", text)
