"""What records must be on whatever page: of recipes that ship, with their status, and never too good."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.pages import ROOT

from stobatch_recipes import baselines, recipe

Record = dict[str, Any]


def records(name: str) -> list[Record]:
    found: list[Record] = json.loads((ROOT / "results" / f"{name}.json").read_text())
    return found


SOUND = {
    "sound_mnist": ("sound.mnist", "sound.mnist_wide", "sound.mnist_strict"),
    "sound_mnist_near": ("sound.mnist_near",),
    "sound_mnist_wide_pooled": ("sound.mnist_wide_pooled",),
    "sound_mnist_strict_pooled": ("sound.mnist_strict_pooled",),
    "sound_fashion_mnist_near": ("sound.fashion_mnist_near",),
    "sound_mnist_middle": ("sound.mnist_middle",),
    "sound_mnist_l2": ("sound.mnist_l2",),
    "sound_mnist_l2_scattering": ("sound.mnist_l2_scattering",),
    "sound_cifar10": tuple(f"sound.cifar10{more}" for more in ("", "_wide", "_strict", "_strict_wide")),
    "sound_tiny_imagenet": ("sound.tiny_imagenet",),
}


@pytest.mark.parametrize("file", SOUND)
def test_sound_records_are_of_the_recipes_that_ship_and_hold(file: str) -> None:
    made = {recipe(name).override("seed", s).training_hash: (name, s) for name in SOUND[file] for s in (1, 2, 3)}
    found = records(file)
    assert sorted(record["config_hash"] for record in found) == sorted(made)
    for record in found:
        name, seed = made[record["config_hash"]]
        assert record["seed"] == seed
        assert record.get("status_with_secret_seeds", record["status"]) == record["certificate"]["status"] == "proved"
        assert record["delta"] == 1e-5
        assert 0 <= recipe(name).method.epsilon - record["epsilon"] < 0.002  # type: ignore[attr-defined]
        assert record["accounted_steps"] == record["steps"]
        assert record["test_examples"] == {"sound_tiny_imagenet": 1500, "sound_mnist_l2_scattering": 1000}.get(
            file, 10_000
        )
        attacked = record["attacked"]
        if attacked:
            assert attacked["broken_certificates"] == 0
            left = {f"{float(radius):.6g}": share for radius, share in attacked["accuracy"].items()}
            if attacked["test_examples"] == record["test_examples"]:
                assert all(share <= left[radius] for radius, share in record["certified"].items() if radius in left)


def test_audits_refute_the_claim_and_the_controls_and_nothing_that_is_proved() -> None:
    for record in records("audits"):
        for finding in record["findings"]:
            assert (finding["verdict"] == "consistent") is record["name"].startswith("audit-sound"), record["name"]


BASELINES = records("baselines_mnist")


@pytest.mark.parametrize("record", BASELINES, ids=lambda r: f"{r['row']}-{r['seed']}")
def test_no_more_is_proved_than_attacks_left_of_the_same_images(record: Record) -> None:
    for certified in record["certified"].values():
        for under in record["under_attack"].values():
            if certified["status"] == "proved" and certified["test_examples"] == under["test_examples"]:
                for radius, share in certified["accuracy"].items():
                    assert share <= under["accuracy"].get(radius, 1.0)


@pytest.mark.parametrize("record", BASELINES + records("baselines_mnist_radii"), ids=lambda record: record["row"])
def test_a_baseline_record_is_of_the_recipe_that_ships(record: Record) -> None:
    name, _, epsilon = record["row"].partition("-eps-")
    config = baselines.compared(name.replace("-", "_"))(float(epsilon or 1), 0.2).override("seed", record["seed"])
    assert config.training_hash == record["training_hash"]
    assert config.method.name == record["method"]


@pytest.mark.parametrize("record", BASELINES, ids=lambda r: f"{r['row']}-{r['seed']}")
def test_a_record_carries_its_status_and_never_more_privacy_than_was_asked_for(record: Record) -> None:
    _, _, asked = record["row"].partition("-eps-")
    budgets = {key: value for key, value in record.items() if key.endswith("_epsilon")}
    if record["status"] == "none":
        assert not budgets
        assert not asked
    else:
        assert list(budgets) == [f"{record['status']}_epsilon"]
        assert 0.99 * float(asked) <= budgets[f"{record['status']}_epsilon"] <= float(asked)
    assert record["status"] in ("none", "proved", "claimed", "refuted", "void")
    assert not any(flag["level"] == "error" for flag in record["flags"]), "a proved certificate was broken"


@pytest.mark.parametrize(("method", "steps"), [("dpsgd", 220), ("pixeldp", 2000), ("securesgd", 220)])
def test_baselines_on_cifar10_say_what_they_guarantee(method: str, steps: int) -> None:
    (record,) = [record for record in records("baselines_cifar10") if record["method"] == method]
    assert record["steps"] == record["history"][-1]["step"] == steps
    assert record["status"] == ("none" if method == "pixeldp" else "void")
    assert f"--methods {method} --epsilon 2 " in record["command"]
    assert ("incomplete" in record) == (record["under_attack"] is None) == (method == "securesgd")


def test_the_published_method_had_learnt_nothing() -> None:
    (record,) = records("paper_cifar10_partial")
    assert record["share_of_commonest_prediction"] == 1.0
    assert record["history"][-1]["step"] == record["steps"] == 5000
    assert record["steps_of_the_recipe"] == recipe("paper.cifar10").training.steps
    assert record["accuracy_of_test_examples"] == 1000
    remade = recipe("paper.cifar10").override_all({"training.steps": 5000, "training.monitor_every": 100, "seed": 1})
    assert record["training_hash"] == remade.training_hash


def test_votes_of_the_benchmark_were_the_same() -> None:
    lines = (ROOT / "benchmarks" / "results" / "2026-11-15.txt").read_text().splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert [line["ratios"]["votes_identical"] for line in found if "votes_identical" in line["ratios"]] == [1.0]
    (long_attack,) = (line["steps"] for line in found if line["benchmark"] == "long attack")
    assert long_attack["2000"]["peak_mib"] <= long_attack["20"]["peak_mib"]
