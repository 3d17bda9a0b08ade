"""Which noise keeps the published mechanism from learning: what is said of it is what the records say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.pages import ROOT

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
