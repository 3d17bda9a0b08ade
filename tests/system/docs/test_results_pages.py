"""Pages of results, their figures and the README's numbers are those that the records give, to the byte."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from support.pages import ROOT

README = ROOT / "README.md"


@pytest.fixture(scope="module")
def maker() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield import_module("make_results")


def test_the_pages_are_made_from_the_records(maker: ModuleType) -> None:
    for path, text in maker.pages().items():
        assert path.read_text() == text, "run python docs/make_results.py"


def test_the_figures_are_made_from_the_records(maker: ModuleType, tmp_path: Path) -> None:
    maker.draw(tmp_path)
    made = sorted(tmp_path.glob("*.svg"))
    assert [path.name for path in made] == sorted(path.name for path in (ROOT / "docs" / "figures").glob("*.svg"))
    for path in made:
        same = path.read_bytes() == (ROOT / "docs" / "figures" / path.name).read_bytes()
        assert same, f"{path.name}: run python docs/make_results.py, with the versions of constraints.txt"


def test_another_record_makes_another_page(maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "results", tmp_path / "results")
    changed = tmp_path / "results" / "sound_mnist.json"
    found = json.loads(changed.read_text())
    for record in found:
        record["certified"]["0.2"] += 0.01
    changed.write_text(json.dumps(found))
    before = maker.sound.page()
    monkeypatch.setattr(import_module("result_pages.records"), "ROOT", tmp_path)
    assert maker.sound.page() != before


def test_records_of_other_settings_are_refused(maker: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"no record of sound\.mnist as it ships"):
        maker.sound.of_recipe("sound.mnist", "sound_cifar10")


def test_a_bar_is_reached_by_the_mean_of_all_seeds_at_every_radius(maker: ModuleType) -> None:
    found = [{"clean": 0.9, "certified": {"0.5": 0.7}}, {"clean": 0.8, "certified": {"0.5": 0.5}}]
    assert maker.sound.verdict(found, {"clean": 0.84, "0.5": 0.59}) == "reached"
    assert maker.sound.verdict(found, {"clean": 0.84, "0.5": 0.61}) == "**missed**"
    assert maker.sound.verdict(found, {"clean": 0.86}) == "**missed**"


def test_a_record_with_secret_seeds_would_not_be_void(maker: ModuleType) -> None:
    baselines, sound = maker.baselines, maker.sound
    (record, *_) = [found for found in baselines.records("baselines_mnist") if found["status"] == "proved"]
    assert baselines.privacy(record).startswith("void (proved ε = ")
    assert baselines.privacy({**record, "seed": None}).startswith("proved ε = ")
    renamed = {"status": "void", "status_with_secret_seeds": "proved", "void_epsilon": record["proved_epsilon"]}
    assert baselines.privacy({**record, **renamed}) == baselines.privacy(record)
    (one, *_) = sound.records("sound_mnist")
    assert sound.privacy(one) == "void (proved ε = 1.0)"
    assert sound.privacy({**one, "seed": None, "status": "proved"}) == "proved ε = 1.0"


CLAIM = {
    "figure": 2, "claim": "", "dataset": "mnist", "method": "published", "epsilon": 0.3, "radius": 0.2, "steps": 10,
    "kind": "conventional", "accuracy": 0.8, "where": "", "rule": "value",
}  # fmt: skip


@pytest.mark.parametrize(
    ("shown", "left", "verdict"),
    [
        (0.81, 0.78, "reproduced"),
        (0.9, 0.79, "not reproduced"),
        (0.9, 0.7, "refuted"),
        (0.7, 0.1, "not reproduced"),  # an attacker refutes what was reached, and nothing else
        (None, None, "not run"),
    ],
)
def test_the_verdict_on_a_number_follows_the_records(
    maker: ModuleType, shown: float | None, left: float | None, verdict: str
) -> None:
    measured = {"published": shown, "adaptive": left}
    known = [
        maker.paper.Point("mnist", "published", measure, 0.3, 0.2, share, 1, "a.json", 1)
        for measure, share in measured.items()
        if share is not None
    ]
    assert maker.paper.judge(CLAIM, known).verdict == verdict
    unfinished = [replace(point, note="12 of 600 steps") for point in known]
    found = maker.paper.judge(CLAIM, unfinished)
    assert found.verdict == "not run", "a training that is changed or unfinished is no evidence"
    assert not known or (found.ours.startswith("(") and "12 of 600 steps" in found.remark)


@pytest.mark.parametrize(
    ("lead", "real", "verdict"), [(0.1, 0.1, "not run"), (-0.01, 0.1, "not reproduced"), (0.1, -0.1, "refuted")]
)
def test_one_place_behind_disproves_a_lead_and_places_ahead_of_some_do_not_prove_it(
    maker: ModuleType, lead: float, real: float, verdict: str
) -> None:
    leads = {"published": lead, "adaptive": real}
    known = [
        maker.paper.Point("mnist", own, measure, 0.3, 0.2, 0.5 + (own == "published") * share, 1, "a.json", 1)
        for measure, share in leads.items()
        for own in ("published", "dpsgd")
    ]
    claim = {**CLAIM, "rule": "ahead", "than": ["dpsgd", "adlm"]}
    found = maker.paper.judge(claim, known)
    assert (found.verdict, "missing: AdLM" in found.remark) == (verdict, True)


@pytest.mark.parametrize("rule", ["ahead", "gain"])
def test_a_lead_counts_over_all_that_is_named_and_a_mean_of_leads_over_two_places(maker: ModuleType, rule: str) -> None:
    def judged(others: tuple[str, ...], budgets: tuple[float, ...]) -> str:
        known = [
            maker.paper.Point("mnist", own, "published", budget, 0.2, 0.5 + 0.1 * (own == "published"), 1, "a.json", 1)
            for own in ("published", *others)
            for budget in budgets
        ]
        named = ["dpsgd", "adlm"] if rule == "ahead" else ["dpsgd"]
        claim = CLAIM | {"rule": rule, "epsilon": None, "than": named, "points": 0.1}
        verdict: str = maker.paper.judge(claim, known).verdict
        return verdict

    assert judged(("dpsgd", "adlm"), (0.3, 0.4)) == "reproduced"
    few = judged(("dpsgd",), (0.3, 0.4)) if rule == "ahead" else judged(("dpsgd",), (0.3,))
    assert few == "not run"


def test_a_point_of_a_figure_changes_its_verdict(
    maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "results", tmp_path / "results")
    claim = {**CLAIM, "method": "securesgd", "epsilon": 2.0, "accuracy": 0.7864}
    figure = tmp_path / "results" / "figures" / "figure-2.jsonl"
    recorded = map(json.loads, figure.read_text().splitlines())
    point = next(one for one in recorded if (one["method"], one["protocol"]) == ("securesgd", "published protocol"))
    point |= {"epsilon": 2.0, "accuracy": 0.79, "source": "runs/securesgd"}
    monkeypatch.setattr(import_module("result_pages.records"), "ROOT", tmp_path)
    seen = []
    for change in ({}, {"accuracy": 0.6}, {"settings": ["training.steps=7"]}, {"source": "results/paper_mnist.json"}):
        figure.write_text(json.dumps({**point, **change}) + "\n")
        seen.append(maker.paper.judge(claim, maker.paper.points()).verdict)
    assert seen == ["reproduced", "not reproduced", "not run", "not run"]


def test_a_judgement_whose_record_has_changed_is_refused(maker: ModuleType) -> None:
    judged = [claim for claim in maker.paper.records("figures/claims") if claim["rule"] == "judged"]
    assert all(claim["verdict"] == "not run" or claim["evidence"] for claim in judged)
    (reference, *_) = [one for claim in judged for one in claim["evidence"] if isinstance(one["value"], float)]
    assert maker.paper.referred([reference]) == [reference["value"]]
    with pytest.raises(ValueError, match=r"judge results/figures/claims\.json anew"):
        maker.paper.referred([{**reference, "value": reference["value"] + 0.01}])


PUBLIC = {
    "results/sound": ("sound_mnist", "sound_mnist_l2", "sound_cifar10", "sound_tiny_imagenet"),
    "results/baselines": ("baselines_mnist", "baselines_cifar10"),
    "results/published": ("paper_mnist",),
    "results/paper": ("paper_mnist", "paper_mnist_seeds", "paper_cifar10_released", "paper_cifar10_partial"),
}


@pytest.mark.parametrize("page", PUBLIC)
def test_tables_of_runs_with_public_seeds_say_that_their_privacy_is_void(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for name in PUBLIC[page]:
        records = json.loads((ROOT / "results" / f"{name}.json").read_text())
        assert all(record["seed"] is not None for record in records), "with secret seeds a row would not be void"
    assert "Experiment with public seeds; a release would draw its own" in text
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    for table in (table for table in tables if re.search(r"\bε\b|privacy", table.splitlines()[0])):
        for row in table.splitlines()[2:]:
            assert re.search(r"void \((proved|claimed)|refuted ε|no privacy", row), row


def test_the_readme_is_one_screen_and_has_no_targets() -> None:
    text = README.read_text()
    assert len(text.encode()) <= 6000
    assert not re.search(r"\bwanted\b|\btarget", text)
    assert "Experiment with public seeds; a release would draw its own" in text
