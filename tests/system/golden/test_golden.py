"""Yesterday's numbers are today's: plan, history, weights and certificates of a short run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from golden_run import FILE, compute

TOLERANCE = 1e-4
"""Relative to the size of the number, with a floor under it: room for another CPU's rounding."""

HOW = "If the change is meant, run `python tests/system/golden/regenerate.py` and say why in the commit."


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def fresh() -> dict[str, Any]:
    return compute()


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Where two documents differ by more than the tolerance."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = [f"{path}: keys {sorted(old.keys() ^ new.keys())}"] if old.keys() != new.keys() else []
        return found + [
            line for key in old.keys() & new.keys() for line in differences(old[key], new[key], f"{path}/{key}")
        ]
    if isinstance(old, list) and isinstance(new, list):
        found = [f"{path}: length {len(old)} is {len(new)}"] if len(old) != len(new) else []
        return found + [
            line for i, (a, b) in enumerate(zip(old, new, strict=False)) for line in differences(a, b, f"{path}/{i}")
        ]
    if isinstance(old, float | int) and isinstance(new, float | int):
        # One test image of sixty may change sides by rounding.
        floor = 1e-3 if path.startswith("/certificates") else 1.0
        allowed = 1.01 / 60 if path.endswith("test_accuracy") else TOLERANCE * max(floor, abs(old))
        return [] if abs(old - new) <= allowed else [f"{path}: {old} is {new}"]
    return [] if old == new else [f"{path}: {old} is {new}"]


def test_the_comparison_sees_a_change():
    assert differences({"a": [1.0, 2.0]}, {"a": [1.0, 2.00005]}) == []
    assert differences({"a": [1.0, 2.0]}, {"a": [1.0, 2.001]}) == ["/a/1: 2.0 is 2.001"]
    assert differences({"a": 1}, {"b": 1}) == [": keys ['a', 'b']"]
    assert differences([1], [1, 2]) == [": length 1 is 2"]


@pytest.mark.parametrize(
    "part", ["plan", "history", "weights_l1", "test_loss", "logits", "mean_scores", "certificates"]
)
def test_the_numbers_are_those_of_yesterday(golden, fresh, part):
    assert differences({part: golden[part]}, {part: fresh[part]}) == [], HOW


def test_the_configuration_has_the_same_name(golden, fresh):
    """A changed hash makes every stored run foreign to its own program."""
    assert golden["training_hash"] == fresh["training_hash"], HOW


def test_the_golden_run_says_something(golden):
    """Numbers that would stay the same whatever the code does guard nothing."""
    accuracies = {row["test_accuracy"] for row in golden["history"]}
    assert len(accuracies) > 2, "nothing moved"
    radii = golden["certificates"]["corrected_radius"]
    assert radii == sorted(radii, reverse=True)
    assert radii[0] > 1.1 * radii[2] > 0
    for part in ("logits", "mean_scores"):
        first, second = golden[part][:2]
        assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 100 * TOLERANCE, "every image is the same"
