"""Several runs in one report: what is compared, at which radius, and what is not."""

from __future__ import annotations

from pathlib import Path

from made_runs import config, guarantee, make, scores, share
from pages import page, shown

from stobatch.results import SettingsTest
from stobatch.runs import Run


def several(path: Path, seed: int | None = None) -> list[Run]:
    runs = []
    for epsilon in (1.0, 2.0):
        for number in (1, 2):
            found = {**scores(), "guarantee": guarantee("claimed", epsilon)}
            settings = config(seed if seed is None else seed + number)
            settings["config"]["method"]["total_epsilon"] = epsilon
            runs.append(make(path.with_name(f"eps-{epsilon:g}-{number}"), found, settings))
    return runs


def test_several_runs_are_compared_at_a_common_radius_then_told_one_by_one(path):
    runs = several(path)
    found = page(*runs)
    headings, *rows = found.table("Accuracy on the single pass at radius 0.2 (l∞ over [-1, 1])")
    recorded = runs[0].read("scores")
    gap, certified = recorded["gaps"]["single_pass"][1], recorded["certificates"]["certified_accuracy"]
    assert headings[:5] == ["run", "method", "ε and its status", "seed", "test images"]
    assert [row[2] for row in rows] == ["1 claimed, not proved"] * 2 + ["2 claimed, not proved"] * 2
    assert [row[3:5] for row in rows] == [["secret", "200"]] * 4
    assert rows[0][5:8] == [shown(share(0.975)), shown(gap["published"]), shown(gap["adaptive"])]
    assert rows[0][9] == shown(certified["published"][1]) + "claimed, not proved"
    assert rows[0][10] == shown(certified["corrected"][1]) + "proved"
    assert sum(tag == "details" and a.get("class") == "run" for tag, a in found.elements) == 4
    assert found.prose.index("4 runs compared") < found.prose.index("Run by run")


def test_runs_with_public_seeds_are_void_whenever_they_were_evaluated(path):
    _, *rows = page(*several(path, seed=0)).table("Accuracy on the single pass at radius 0.2")
    assert [row[2] for row in rows] == ["1 void: public seed"] * 2 + ["2 void: public seed"] * 2
    assert [row[3] for row in rows] == ["1", "2", "1", "2"]


def test_runs_in_different_units_are_not_compared(path):
    found = page(make(path), make(path.with_name("other"), {**scores(), "norm": "l2"}))
    assert "not attacked at a common radius" in found.prose
    assert found.table("share no function, radius and unit")[0][-1] == "clean"


def test_a_run_without_privacy_is_compared_but_not_on_the_curve(path):
    open_run = make(path.with_name("open"), {**scores(), "guarantee": guarantee("none")})
    assert "Runs without any privacy guarantee are not on it: 1." in page(make(path), open_run).prose
    assert "Accuracy against ε" not in page(open_run, make(path.with_name("b"), open_run.read("scores"))).prose


def test_t_tests_over_seeds_are_tabulated(path):
    test = {
        "difference": 0.0612,
        "low": -0.0105,
        "high": 0.1329,
        "p_value": 0.0812,
        "paired": True,
        "num_seeds": [3, 3],
    }
    comparison = {
        "first": "a <1>",
        "second": "b",
        "protocol": "adaptive",
        "function": "single_pass",
        "norm": "linf",
        "input_range": "[-1, 1]",
        "radius": 0.2,
        "t_test": test,
    }
    for runs in ([make(path)], several(path)):
        found = page(*runs, comparisons=[SettingsTest.model_validate(comparison)])
        assert "Two-tailed t-tests over seeds" in found.prose
        row = found.table("First minus second")[1]
        assert row == [
            "a <1>",
            "b",
            "adaptive",
            "single pass",
            "0.2, l∞ over [-1, 1]",
            "6.1 points [-1.1, 13.3]",
            "0.081",
            "paired",
            "3 and 3",
        ]
