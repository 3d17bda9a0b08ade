"""Every accuracy once more, by a slow loop over the rows of random records."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from samples import table
from scipy import stats

from stobatch.evaluation.accuracy import (
    AttackedTable,
    certified_accuracy,
    gaps,
    verified_accuracy,
)
from stobatch.evaluation.protocols import attacked_column
from stobatch.evaluation.statistics import paired_difference
from stobatch.types import Radius, Status
from stobatch.verifier import CertificateKind

KINDS = [
    CertificateKind(name, Status.PROVED, "a test", Radius(1.0), 0.0, column=column)
    for name, column in (("corrected", "corrected_radius"), ("published", "published_largest_attack"))
]
ATTACKS, SIZES, ROWS = ("fgsm", "madry", "square"), (0.05, 0.2, 0.4), 40


def random_table(seed: int, *, protocol: str = "adaptive") -> AttackedTable:
    random = np.random.default_rng(seed)
    columns: dict[str, Any] = {"label": random.integers(0, 3, ROWS), "prediction": random.integers(0, 3, ROWS)}
    for attack, size in product(ATTACKS, SIZES):
        columns[f"{attack}@{size}"] = random.integers(0, 3, ROWS)
        columns[f"{attack}@{size}/abstain"] = random.random(ROWS) < 0.3
        columns[f"{attack}@{size}/published"] = random.choice([0.0, 0.05, 0.1, 0.2, 0.4], ROWS)
        columns[f"{attack}@{size}/corrected"] = random.choice([0.0, 0.05, 0.1, 0.2, 0.4], ROWS)
    return table(columns, ATTACKS, SIZES, protocol=protocol, function="vote")


def counted(found: AttackedTable, holds: Callable[[dict[str, Any], str, float], bool], attack: str, size: float) -> int:
    """Rows on which something holds; under the worst attack it must hold for every attack."""
    names = ATTACKS if attack == "worst" else (attack,)
    rows = [{name: column[row] for name, column in found.records.items()} for row in range(ROWS)]
    return sum(all(holds(row, name, size) for name in names) for row in rows)


def is_correct(row: dict[str, Any], attack: str, size: float) -> bool:
    return row[f"{attack}@{size}"] == row["label"]


def is_correct_and_robust(rule: str) -> Callable[[dict[str, Any], str, float], bool]:
    def holds(row: dict[str, Any], attack: str, size: float) -> bool:
        robust = row[f"{attack}@{size}/{rule}"] >= size and not row[f"{attack}@{size}/abstain"]
        return is_correct(row, attack, size) and robust

    return holds


@pytest.mark.parametrize("seed", range(3))
def test_conventional_accuracy_counts_rows_that_are_right(seed: int) -> None:
    found = random_table(seed)
    scores = found.conventional()
    assert {(score.attack, score.radius) for score in scores} == set(product((*ATTACKS, "worst"), SIZES))
    for score in scores:
        assert score.count == counted(found, is_correct, score.attack, score.radius)
        assert score.total == ROWS
        assert (score.protocol, score.function) == ("adaptive", "vote")
    right = sum(a == b for a, b in zip(found.records["prediction"], found.records["label"], strict=True))
    assert int(found.clean().sum()) == right


@pytest.mark.parametrize("rule", ["published", "corrected"])
@pytest.mark.parametrize("seed", range(3))
def test_certified_accuracy_at_attacked_inputs_counts_rows_that_are_right_and_robust(seed: int, rule: str) -> None:
    found = random_table(seed)
    scores = found.certified_at_attacked(rule)
    assert {(score.attack, score.radius) for score in scores} == set(product((*ATTACKS, "worst"), SIZES))
    for score in scores:
        assert score.count == counted(found, is_correct_and_robust(rule), score.attack, score.radius)


def test_the_loop_catches_an_accuracy_that_forgets_abstaining() -> None:
    """The broken twin: nobody abstains."""
    found = random_table(0)
    twin = {name: [False] * ROWS if name.endswith("/abstain") else column for name, column in found.records.items()}
    careless = AttackedTable(found.protocol, found.function, found.attacks, found.radii, twin)
    counts = [score.count for score in careless.certified_at_attacked("corrected")]
    assert counts != [score.count for score in found.certified_at_attacked("corrected")]


def test_a_score_carries_how_it_was_measured() -> None:
    for score in random_table(0).conventional():
        said = score.to_dict()
        assert (said["protocol"], said["function"], said["norm"]) == ("adaptive", "vote", "linf")
        assert said["input_range"] == "[-1, 1]"
        assert said["radius"] in SIZES
        low, high = stats.binomtest(said["count"], ROWS).proportion_ci(0.95, method="exact")
        assert (said["low"], said["high"]) == pytest.approx((low, high))


def test_gaps_compare_the_worst_cases_row_by_row() -> None:
    published, adaptive = random_table(1, protocol="published"), random_table(2)
    adaptive.records["label"][:] = published.records["label"]
    for gap in gaps(published, adaptive):
        size = gap.radius
        assert gap.published.count == counted(published, is_correct, "worst", size)
        assert gap.adaptive.count == counted(adaptive, is_correct, "worst", size)
        differences = []
        for row in range(ROWS):
            label = published.records["label"][row]
            first, second = (
                all(one.records[f"{attack}@{size}"][row] == label for attack in ATTACKS)
                for one in (published, adaptive)
            )
            differences.append(int(first) - int(second))
        assert gap.gap.value == pytest.approx(np.mean(differences))
        expected = paired_difference(*zip(*[(d > 0, d < 0) for d in differences], strict=True))
        assert gap.to_dict()["gap"] == pytest.approx(expected.to_dict())


def test_certified_on_clean_and_certified_at_attacked_inputs_are_different_numbers() -> None:
    """Rows: safe and right; moved to another safe label; right, and safe only once attacked; wrong throughout."""
    clean = {
        "label": [0, 0, 0, 0],
        "prediction": [0, 0, 0, 1],
        "corrected_radius": [0.3, 0.3, 0.0, 0.3],
        "published_largest_attack": [0.0, 0.0, 0.0, 0.0],
    }
    attacked = table(
        {
            "label": clean["label"],
            "prediction": clean["prediction"],
            "madry@0.2": [0, 1, 0, 1],
            "madry@0.2/abstain": [False] * 4,
            "madry@0.2/corrected": [0.1, 0.3, 0.3, 0.3],
        },
        *(("madry",), (0.2,)),
        function="vote",
    )
    assert certified_accuracy(clean, KINDS, [0.2])["corrected"][0.2].count == 2  # rows 0 and 1
    assert attacked.certified_at_attacked("corrected")[0].count == 1  # row 2
    assert attacked.conventional()[0].count == 2  # rows 0 and 2


def test_certified_and_verified_accuracy_on_clean_inputs_by_a_loop() -> None:
    random = np.random.default_rng(4)
    records = {
        "label": random.integers(0, 3, 50).tolist(),
        "prediction": random.integers(0, 3, 50).tolist(),
        "abstain": (random.random(50) < 0.3).tolist(),
        "corrected_radius": random.choice([0.0, 0.05, 0.1, 0.3], 50).tolist(),
        "published_largest_attack": random.choice([0.0, 0.05, 0.1, 0.3], 50).tolist(),
    }
    rows = [dict(zip(records, values, strict=True)) for values in zip(*records.values(), strict=True)]
    right = [row for row in rows if row["label"] == row["prediction"]]
    found = certified_accuracy(records, KINDS, [0.05, 0.2])
    for kind, column in (("corrected", "corrected_radius"), ("published", "published_largest_attack")):
        for size in (0.05, 0.2):
            assert found[kind][size].count == sum(row[column] >= size for row in right)
    verified = verified_accuracy(records)
    assert verified.correct.count == len(right)
    assert verified.correct_without_abstaining.count == sum(not row["abstain"] for row in right)
    assert verified.abstained.count == sum(row["abstain"] for row in rows)


@pytest.mark.parametrize("size", [0.05, 8 / 255, 2.0])
def test_a_column_names_attack_radius_and_part(size: float) -> None:
    assert attacked_column("fgsm", size).startswith(f"fgsm@{size:g}")
    assert float(attacked_column("fgsm", size).partition("@")[2]) == pytest.approx(size, rel=1e-11)
    assert attacked_column("fgsm", size, "distance") == f"{attacked_column('fgsm', size)}/distance"
    assert attacked_column("fgsm", size) != attacked_column("fgsm", size * (1 + 1e-9)), "two radii, two columns"
