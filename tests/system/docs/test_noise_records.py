"""Which noise keeps the published mechanism from learning: what is said of it is what the records say."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from support.pages import ROOT

from stobatch.data import DatasetInfo
from stobatch.published.training import Published
from stobatch_recipes import recipe


def records(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "results" / f"{name}.json").read_text())
    return found


def said(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


NOISES = {
    "all as at a claimed epsilon of 2": ("2 | 2", {}),
    "chi1 and chi2 as at a claimed epsilon of 2, chi3 off": (
        "2 | off",
        {"method.budget_split": "fixed_label", "method.label_epsilon": 1e6, "method.epsilon": 1e6 + 1},
    ),
    "chi3 as at a claimed epsilon of 2, chi1 and chi2 off": (
        "off | 2",
        {"method.budget_split": "fixed_label", "method.label_epsilon": 1.0, "method.epsilon": 1e6 + 1},
    ),
    "off": ("off | off", {"method.epsilon": 1e6}),
    "all as at a claimed epsilon of 10": ("10 | 10", {"method.epsilon": 10.0}),
}


@pytest.mark.parametrize("record", records("paper_cifar10_noises"), ids=lambda r: f"{r['noise']}, {r['steps']} steps")
def test_which_noise_keeps_the_published_method_from_learning(record: dict[str, Any]) -> None:
    row, changed = NOISES[record["noise"]]
    stopped = "stopped" in record.get("incomplete", "")
    planned = record["steps_of_the_recipe"] if stopped else record["steps"]
    settings = {**changed, "training.steps": planned, "training.monitor_every": 50, "seed": 1}
    assert record["training_hash"] == recipe("published.cifar10").override_all(settings).training_hash
    assert record["status"] == "void"
    if not stopped:
        page = said("results/README.md")
        line = f"| {row} | {record['steps']:,} | {100 * record['test_accuracy']:.1f}% |"
        if "diagnosis" in record:
            found = record["diagnosis"]
            line += f" {found['output_weight_norm']:.{1 if found['output_weight_norm'] < 10 else 0}f} |"
            line += f" {100 * found['share_common_to_all_classes']:.1f}% | {found['encoder_effective_rank']:.1f} |"
        assert line in page
    learns = record["noise"].endswith("chi3 off")
    final = record.get("test_accuracy", record.get("history", [{}])[-1].get("test_accuracy"))
    assert (final > 0.4) == learns
    assert final < 0.25 or learns


def test_without_label_noise_nothing_is_certified_and_attacks_on_the_function_break_most() -> None:
    (record,) = [r for r in records("paper_cifar10_noises") if r["steps"] == 3500]
    page, under = said("results/README.md"), {each["protocol"]: each for each in record["under_attack"]}
    blind, adaptive = (under[name]["accuracy"]["worst"]["0.05"] for name in ("published", "adaptive"))
    assert f"{100 * record['clean']:.1f}% clean, {100 * blind:.1f}% under the attacks of the paper" in page
    assert f"{100 * adaptive:.1f}% under attacks on the function itself" in page
    assert f"verified inference {100 * record['verified']:.1f}%" in page
    assert {rule["0.05"] for rule in record["certified"].values()} == {0.0}


@pytest.mark.parametrize("record", records("paper_cifar10_adam"), ids=lambda r: f"{r['noise']}, {r['learning_rate']}")
def test_records_with_adam_are_of_the_recipe_and_carry_its_noise(record: dict[str, Any]) -> None:
    stopped = "stopped" in record.get("incomplete", "")
    rule = {"training.optimiser": "adam", "training.learning_rate": record["learning_rate"]}
    steps = record["steps_of_the_recipe"] if stopped else record["steps"]
    settings = {"training.steps": steps, "training.monitor_every": 50, "seed": 1}
    config = recipe("published.cifar10").override_all({**NOISES[record["noise"]][1], **rule, **settings})
    assert record["training_hash"] == config.training_hash
    assert (
        f"--set training.optimiser=adam --set training.learning_rate={record['learning_rate']:g}"
        in record["commands"][0]
    )
    plan = Published().plan(config, DatasetInfo("cifar10", (3, 28, 28), 10, 50_000, 10_000, tuple("0123456789")), None)
    scales = (plan.input_noise_scale, plan.hidden_noise_scale, plan.label_noise_scale)
    assert list(record["scales"].values()) == pytest.approx(scales, rel=1e-4)
    assert record["status"] == "void"
    assert [point["step"] for point in record["history"][:10]] == list(range(50, 501, 50))


def test_with_adam_the_whole_recipe_learns_and_does_not_settle() -> None:
    found = records("paper_cifar10_adam")
    (whole,) = [r for r in found if r["steps"] == recipe("published.cifar10").training.steps]
    page, under = said("results/README.md"), {each["protocol"]: each for each in whole["under_attack"]}
    blind, adaptive = (under[name]["accuracy"]["worst"]["0.05"] for name in ("published", "adaptive"))
    assert f"{100 * whole['clean']:.1f}% clean, {100 * blind:.1f}% and {100 * adaptive:.1f}% under the same" in page
    assert f"verified inference {100 * whole['verified']:.1f}%, one label for every input" in page
    assert whole["share_of_commonest_prediction"] == 1.0
    assert {rule["0.05"] for rule in whole["certified"].values()} == {0.0}
    seen = {point["step"]: point["test_accuracy"] for point in whole["history"]}
    assert whole["history"][-1]["step"] == whole["steps"]
    assert seen[whole["steps"]] == whole["test_accuracy"]
    assert f"has {100 * seen[1000]:.1f}% after 1,000 steps and {100 * max(seen.values()):.1f}% at best" in page
    assert f"ends the recipe at {100 * whole['test_accuracy']:.1f}%, after nine falls by more than ten points" in page
    assert sum(after < before - 0.1 for before, after in pairwise(seen.values())) == 9
    others = {
        r["learning_rate"]: r["history"][9]["test_accuracy"] for r in found if "stopped" in r.get("incomplete", "")
    }
    assert f"At 0.001 it had {100 * others[0.001]:.1f}% after 500 steps" in page
    assert f"the recipe's 0.05 {100 * others[0.05]:.1f}%" in page
    assert recipe("published.cifar10").training.learning_rate == 0.05
    diagnosis = whole["diagnosis"]
    assert (
        f"norm {diagnosis['output_weight_norm']:.0f} at the end, "
        f"cosine {diagnosis['cosine_of_common_part_and_label_noise']:.2f}, "
        f"{100 * diagnosis['share_common_to_all_classes']:.1f}% of it common to all classes"
    ) in page
    assert f"{100 * diagnosis['share_of_saturated_last_hidden_values']:.1f}% of h_π are at ±1" in page


def test_with_the_released_labels_the_whole_recipe_learns_and_attacks_on_the_function_leave_little() -> None:
    (record,) = records("paper_cifar10_released")
    changes = {"method.label_noise": "penalty", "training.monitor_every": 50, "seed": 1}
    config = recipe("published.cifar10").override_all({**changes, "method.epsilon": 2.0})
    assert record["training_hash"] == config.training_hash
    assert record["steps"] == record["history"][-1]["step"] == config.training.steps
    assert record["status"] == "void"
    seen = [point["test_accuracy"] for point in record["history"]]
    assert all(after > before - 0.05 for before, after in pairwise(seen))
    page, under = said("results/README.md"), {each["protocol"]: each for each in record["under_attack"]}
    blind, adaptive = (under[name]["accuracy"]["worst"]["0.05"] for name in ("published", "adaptive"))
    assert f"{100 * seen[19]:.1f}% after 1,000 steps and {100 * record['test_accuracy']:.1f}% at the end" in page
    assert f"{100 * record['clean']:.1f}% clean, {100 * blind:.1f}% and {100 * adaptive:.1f}% under the same" in page
    assert {rule["0.05"] for rule in record["certified"].values()} == {0.0}


def test_label_noise_on_mnist() -> None:
    by = {}
    for record in records("label_noise_mnist"):
        given = dict(part.split("=") for part in record["command"].split() if "=" in part)
        by[record["chi3"], given["training.optimiser"], given["training.learning_rate"]] = record
        changed = {
            name: float(value) if "." in value or "epsilon" in name else int(value)
            for name, value in given.items()
            if name not in ("training.optimiser", "machine.threads")
        }
        remade = recipe("published.mnist").override_all(
            {**changed, "training.optimiser": given["training.optimiser"], "seed": 1}
        )
        assert record["training_hash"] == remade.training_hash
    with_adam, without = by["on", "adam", "0.001"], by["off", "adam", "0.001"]
    page = said("results/README.md")
    assert f"{100 * with_adam['test_accuracy']:.1f}% with χ3 and {100 * without['test_accuracy']:.1f}% without" in page
    plain = by["on", "sgd", "0.05"]
    assert f"stay at {100 * plain['test_accuracy']:.1f}% with χ3" in page
    assert f"(‖W_π‖ = {plain['diagnosis']['output_weight_norm']:.0f}," in page
    assert f"steps of 0.001 reach {100 * by['on', 'sgd', '0.001']['test_accuracy']:.1f}% with it" in page
    assert "diverged" in by["off", "sgd", "0.05"]["incomplete"]
