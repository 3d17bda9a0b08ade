"""The reference is what the declarations say today, and the verbs that answer from it say the same."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from stobatch.settings import dotted_keys
from stobatch_recipes import RECIPES, recipe

ROOT = Path(__file__).parents[3]
MAKER = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))


@pytest.fixture(scope="module")
def files() -> dict[Path, str]:
    return MAKER["files"]()


def test_nothing_of_the_reference_is_out_of_date(files: dict[Path, str]) -> None:
    old = [path.name for path, text in files.items() if path.read_text(encoding="utf-8") != text]
    assert not old, f"run `python docs/make_reference.py`: {old}"


def test_every_setting_of_every_recipe_is_in_it(files: dict[Path, str]) -> None:
    listed = {row["key"] for row in json.loads(files[MAKER["DATA"]])["settings"]}
    assert {key for name in RECIPES for key in dotted_keys(recipe(name))} <= listed
    assert all(row["doc"] and row["type"] for row in json.loads(files[MAKER["DATA"]])["settings"])


def test_what_a_recipe_is_said_to_set_makes_the_recipe() -> None:
    for row in json.loads(MAKER["DATA"].read_text(encoding="utf-8"))["recipes"]:
        assert row["purpose"], row["name"]
        config = recipe(row["name"])
        plain = type(config)(method=type(config.method)())
        said = {key: value for key, value in row["settings"].items() if key != "method.name"}
        assert plain.override_all(said) == config, row["name"]
