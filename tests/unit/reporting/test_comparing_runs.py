"""Several runs in one report: what is compared, at which radius, and what is not."""

from __future__ import annotations

import re
from pathlib import Path

from made_runs import RADII, config, guarantee, make, scores, share
from pages import page, shown
from scipy import stats

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
    assert rows[0][9] == shown(certified["published"][1]) + " claimed, not proved"
    assert rows[0][10] == shown(certified["corrected"][1]) + " proved"
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


def test_settings_stand_side_by_side_with_the_mean_over_their_seeds(path):
    found = page(*several(path))
    _, *rows = found.table("Accuracy at radius 0.2 (l∞ over [-1, 1])")
    assert [re.sub(r"\[\w{6}\]", "[hash]", row[0]) for row in rows] == [
        f"published, claimed ε = {epsilon} [hash] {function}, 200 test images"
        for epsilon in (1, 2)
        for function in ("single pass", "vote")
    ]
    assert rows[0][1:3] == ["CLAIMED, NOT PROVED: ε = 1", "97.5 ± 0.0%"]
    assert rows[1][5] == "43.7 ± 0.0% published rule claimed, not proved 41.1 ± 0.0% corrected rule proved"
    assert "Mean ± standard deviation over trainings 1, 2 (secret seeds)" in found.prose
    for radius in RADII:
        assert found.table(f"Accuracy at radius {radius:g} (l∞")


def test_t_tests_over_seeds_are_tabulated(path):
    """Three seeds whose accuracies differ by 10 points and hardly vary, against scipy's own test."""
    runs, tops = [], {1.0: (0.91, 0.92, 0.93), 2.0: (0.81, 0.82, 0.84)}
    for epsilon, values in tops.items():
        for number, value in enumerate(values, 1):
            found = {**scores(("single_pass",)), "certificates": None, "guarantee": guarantee("claimed", epsilon)}
            for entry in found["under_attack"]:
                entry["clean_accuracy"] = share(value)
            settings = config(number)
            settings["config"]["method"]["total_epsilon"] = epsilon
            runs.append(make(path.with_name(f"eps-{epsilon:g}-{number}"), found, settings))
    seen = page(*runs)
    expected = stats.ttest_rel(*tops.values())
    low, high = expected.confidence_interval()
    row = next(row for row in seen.table("First minus second") if row[2] == "clean")
    assert row[3:] == [
        f"9.7 points [{100 * low:.1f}, {100 * high:.1f}]", f"{expected.pvalue:.2g}", "paired", "3 and 3",
    ]  # fmt: skip
    assert [re.sub(r"\[\w{6}\]", "[hash]", name) for name in row[:2]] == [
        f"published, void ε = {epsilon} [hash] (void: public seed), single pass" for epsilon in (1, 2)
    ]


def test_one_run_has_nothing_to_be_compared_with(path):
    assert "t-tests" not in page(make(path)).prose
