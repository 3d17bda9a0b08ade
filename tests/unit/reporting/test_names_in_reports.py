"""A report calls a method by the name that people read, and never a budget without its status."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import config, guarantee, make, scores
from pages import page

from stobatch.reporting.comparison_document import compare_runs, settings_tests
from stobatch.reporting.summary import Facts
from stobatch.results import SettingsTest
from stobatch.runs import Run

METHODS = {
    "stobatch": ({"name": "stobatch", "total_epsilon": 1.5}, guarantee("claimed", 1.5), "published, claimed ε = 1.5"),
    "sound": ({"name": "sound", "epsilon": 1.0}, guarantee("proved", 0.998), "sound, proved ε = 0.998"),
    "plain": ({"name": "plain"}, guarantee("none"), "plain"),
}


def trained(path: Path, method: str, number: int, *, spent: float | None = None) -> Run:
    settings, found = config(), scores()
    settings["config"]["method"], found["guarantee"], _ = METHODS[method]
    if spent is not None:
        found["guarantee"] = guarantee("proved", spent)
    return make(path.with_name(f"{method}-{number}"), found, settings)


def between_settings(runs: list[Run]) -> list[SettingsTest]:
    document = compare_runs([Facts.read(run) for run in runs])
    assert document is not None
    return settings_tests(document)


@pytest.mark.parametrize("method", METHODS)
def test_a_t_test_names_method_budget_and_status(path: Path, method: str) -> None:
    other = "plain" if method != "plain" else "sound"
    runs = [trained(path, name, number) for name in (method, other) for number in (1, 2)]
    comparisons = between_settings(runs)
    assert comparisons
    for comparison in comparisons:
        assert comparison.first.rpartition(" [")[0] == METHODS[method][2]
        assert comparison.second.rpartition(" [")[0] == METHODS[other][2]


def test_trainings_of_one_setting_stay_together_and_show_the_most_that_was_spent(path: Path) -> None:
    """A training that repeated steps has spent more than its twin; the smaller number would not hold for both."""
    runs = [trained(path, "sound", 1, spent=0.99), trained(path, "sound", 2, spent=1.01)]
    runs += [trained(path, "plain", number) for number in (1, 2)]
    (first,) = {comparison.first.rpartition(" [")[0] for comparison in between_settings(runs)}
    assert first == "sound, proved ε = 1.01"


def test_a_page_calls_the_published_mechanism_by_its_name(path: Path) -> None:
    runs = [trained(path, "stobatch", number) for number in (1, 2)]
    assert "method published · data mnist" in page(runs[0]).prose
    _, *rows = page(*runs).table("Accuracy on the single pass")
    assert {row[1] for row in rows} == {"published"}
