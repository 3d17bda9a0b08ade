"""A figure of the paper: planned from what is there, made for real in small, killed, continued, drawn from points."""

from __future__ import annotations

import importlib.util
import json
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stobatch.comparison import compare
from stobatch.errors import DataError, RunError, SettingError
from stobatch.figures import reproduce
from stobatch.figures.catalogue import FIGURES
from stobatch.figures.configurations import in_smoke
from stobatch.figures.drawing import figure_svg, figure_table
from stobatch.figures.plan import Asked, plan_figure
from stobatch.figures.records import file_of, merged, read_paper, read_points, write_points
from stobatch.results import FigurePoint
from stobatch.runs import Run

ROOT = Path(__file__).parents[3]
RECORDS = ROOT / "results" / "figures"


def recorded(number: int) -> list[FigurePoint]:
    return read_points(file_of(RECORDS, FIGURES[number], "full"), FIGURES[number], "full")


# Made for real, and killed on the way.


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Asked, Counter[str], list[FigurePoint]]:
    """Figure 4 in small with two methods, interrupted before the second is trained, and continued."""
    asked = Asked(tmp_path_factory.mktemp("smoke"), methods=("published", "sound"), scale="smoke")
    trained: Counter[str] = Counter()
    real = compare.train

    def train(config: Any, out: Path, **more: Any) -> Any:
        trained[str(out)] += 1
        if len(trained) == 2 and trained.total() == 2:
            raise KeyboardInterrupt
        return real(config, out, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "train", train)
        with pytest.raises(KeyboardInterrupt):
            reproduce.figure("4", asked, quiet=True)
        path = file_of(asked.out, FIGURES[4], "smoke")
        before = read_points(path, FIGURES[4], "smoke")
        reproduce.figure("4", asked, quiet=True)
    return asked, trained, before


def test_a_killed_figure_continues_and_loses_no_point(smoke: tuple[Asked, Counter[str], list[FigurePoint]]) -> None:
    asked, trained, before = smoke
    after = read_points(file_of(asked.out, FIGURES[4], "smoke"), FIGURES[4], "smoke")
    assert before
    assert {point.method for point in before} == {"published"}
    assert after[: len(before)] == before
    assert {point.method for point in after} == {"published", "sound"}
    # The first was trained once, the second begun twice.
    assert sorted(trained.values()) == [1, 2]


def test_a_smoke_figure_is_trained_attacked_and_certified_for_real(smoke: tuple[Asked, Any, Any]) -> None:
    asked = smoke[0]
    points = read_points(file_of(asked.out, FIGURES[4], "smoke"), FIGURES[4], "smoke")
    runs = [Run(path.parent) for path in asked.out.rglob("model.safetensors")]
    assert len(runs) == 2
    assert {point.training_hash for point in points} == {run.read("config")["training_hash"] for run in runs}
    assert {point.scale for point in points} == {"smoke"}
    kinds = {(point.method, point.protocol, point.status) for point in points}
    assert kinds == {
        ("published", "published protocol", "measured"),
        ("published", "adaptive protocol", "measured"),
        ("sound", "adaptive protocol", "measured"),
        ("sound", "proved", "proved"),
    }
    scores = next(run.read("scores") for run in runs if "published" in str(run.path))
    under = {
        (t["protocol"]["name"], r["attack"], r["radius"]): r["value"]
        for t in scores["under_attack"]
        for r in t["accuracy"]
    }
    own = {(p.protocol.split()[0], p.attack, p.radius): p.accuracy for p in points if p.method == "published"}
    assert own == under


def test_the_picture_says_statuses_and_that_smoke_is_no_result(smoke: tuple[Asked, Any, Any]) -> None:
    svg = (smoke[0].out / "figure-4-smoke.svg").read_text()
    for words in ("SMOKE", "(measured)", "(proved)", "ε refuted", "every ε here is void", "not measured yet"):
        assert words in svg, words
    page = (smoke[0].out / "figure-4-smoke.md").read_text()
    assert "no result" in page
    assert "0.2 (refuted)" in page
    assert "0.2 void; with secret seeds (proved)" in page


def test_a_second_call_trains_nothing_and_draws_the_same(
    smoke: tuple[Asked, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = smoke[0]
    before = {path: path.read_bytes() for path in asked.out.glob("figure-4-smoke.*")}
    for verb in ("train", "certify", "evaluate"):
        monkeypatch.setattr(compare, verb, None)
    made = reproduce.figure("4", asked, quiet=True)
    assert {path: path.read_bytes() for path in asked.out.glob("figure-4-smoke.*")} == before
    assert {run.state for run in made.figures[0].runs} == {"recorded"}
    # Points that were lost are read off the runs, which are not made again.
    path = file_of(asked.out, FIGURES[4], "smoke")
    write_points(path, [point for point in recorded_in(path) if point.method == "sound"])
    planned = reproduce.figure("4", asked, dry_run=True, quiet=True).figures[0].runs
    assert [run.state for run in planned] == ["measured", "recorded"]
    reproduce.figure("4", asked, quiet=True)
    assert sorted(path.read_bytes().splitlines()) == sorted(before[path].splitlines())


def recorded_in(path: Path) -> list[FigurePoint]:
    return read_points(path, FIGURES[4], "smoke")


def test_a_public_start_is_pretrained_once_and_has_its_own_rows(tmp_path: Path) -> None:
    asked = Asked(tmp_path, methods=("sound", "published"), scale="smoke", start="dead-leaves")
    reproduce.figure("4", asked, quiet=True)
    points = recorded_in(file_of(tmp_path, FIGURES[4], "smoke"))
    assert {(point.method, point.settings) for point in points} == {("sound", ("start=dead-leaves",))}
    (run,) = (Run(path.parent) for path in tmp_path.rglob("model.safetensors"))
    config = run.read("config")["config"]
    assert config["prior"]["name"] == "start"
    assert config["method"]["ramp"] == 0.0
    # Another seed starts from the same weights, and from random ones it is another training.
    (card,) = tmp_path.rglob("*.card.json")
    before = card.read_bytes()
    reproduce.figure("4", replace(asked, seeds=(2,)), quiet=True)
    assert card.read_bytes() == before
    (planned,) = plan_figure(in_smoke(FIGURES[4]), asked, points)
    (scratch,) = plan_figure(in_smoke(FIGURES[4]), replace(asked, methods=("sound",), start=None), points)
    assert (planned.state, scratch.state) == ("recorded", "not begun")
    with pytest.raises(SettingError, match="none of published starts from public weights"):
        reproduce.figure("4", replace(asked, methods=("published",)), quiet=True)


# What is recorded.


def collector() -> Any:
    spec = importlib.util.spec_from_file_location("collect_figures", ROOT / "results" / "collect_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_points_are_those_of_the_records_that_they_name() -> None:
    collect = collector()
    collected = list(collect.every())
    for number, figure in FIGURES.items():
        of_records = [collect.placed(figure, point) for point in collected if collect.fits(figure, point)]
        of_runs = [point for point in recorded(number) if not point.source.startswith("results/")]
        expected = [point for point in merged(of_records, of_runs) if point.source.startswith("results/")]
        found = [point for point in recorded(number) if point.source.startswith("results/")]
        assert found == expected, "run python results/collect_figures.py"
        for point in found:
            assert point.training_hash in (ROOT / point.source).read_text()


def test_a_plan_takes_what_is_recorded_and_nothing_of_other_settings(tmp_path: Path) -> None:
    figure = FIGURES[3]
    only = {"out": tmp_path, "methods": ("published",), "epsilons": (2.0,)}
    adam = {"training.optimiser": "adam", "training.learning_rate": 0.0001, "machine.device": "cpu"}
    (as_printed,) = plan_figure(figure, Asked(**only), recorded(3))
    (changed,) = plan_figure(figure, Asked(**only, changes=adam), recorded(3))
    assert as_printed.state == "not begun"
    assert (changed.state, changed.minutes) == ("recorded", 0.0)
    assert changed.settings == ("training.learning_rate=0.0001", "training.optimiser=adam")
    (other_seed,) = plan_figure(figure, Asked(**only, changes=adam, seeds=(2,)), recorded(3))
    assert other_seed.missing == other_seed.wanted
    assert changed.run.path != as_printed.run.path
    assert not list(tmp_path.iterdir())


def test_the_paper_stands_in_the_picture_and_what_is_not_measured_is_said() -> None:
    figure, points, paper = FIGURES[2], recorded(2), read_paper(RECORDS, FIGURES[2])
    svg = figure_svg(figure, points, paper).decode()
    for words in ("the paper (claimed)", "published protocol, worst attack (measured)", "(not measured yet: 0.5, 1.5)"):
        assert words in svg, words
    table = figure_table(figure, points, paper).to_markdown()
    assert "82.7%" in table
    without = [point for point in points if point.method != "adlm"]
    assert ">not measured yet<" in figure_svg(figure, without, paper).decode()
    assert ">not measured yet<" not in svg


# Bad input.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"figure": 5}, "Line 2 is of Figure 5"),
        ({"scale": "smoke"}, "smoke"),
        ({"method": "mine"}, "the method 'mine'"),
        ({"training_hash": "0123456789ab"}, "configuration 0123456789ab"),
        ({"more": 1}, "more is nothing that it may hold"),
        (None, "Line 2 is no whole JSON object"),
    ],
)
def test_foreign_and_partial_records_are_refused(tmp_path: Path, change: dict[str, Any] | None, words: str) -> None:
    lines = file_of(RECORDS, FIGURES[4], "full").read_text().splitlines()[:2]
    lines[1] = lines[1][:80] if change is None else json.dumps({**json.loads(lines[1]), **change})
    (tmp_path / "figure-4.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(RunError, match=words) as error:
        reproduce.figure("4", Asked(tmp_path / "out"), records=tmp_path, quiet=True)
    assert error.value.remedy
    assert not (tmp_path / "out").exists()


def test_too_few_minutes_say_what_they_would_buy(tmp_path: Path) -> None:
    asked = Asked(tmp_path / "out", methods=("sound",), epsilons=(0.5,))
    shortest = r"the shortest, sound, ε = 0\.5 \(void; proved with secret seeds\), seed"
    with pytest.raises(SettingError, match=f"buys nothing.*Of 3 runs.*{shortest}.*all together"):
        reproduce.figure("2", asked, records=tmp_path, minutes=1e-4, quiet=True)
    assert not (tmp_path / "out").exists()


def test_missing_data_say_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    changes = {"machine.data_root": str(tmp_path / "data")}
    asked = Asked(tmp_path / "out", methods=("sound",), changes=changes)
    for which in ("5", "all"):
        with pytest.raises(DataError, match="cifar-10-batches-bin"):
            reproduce.figure(which, asked, records=RECORDS, retrain=True, quiet=True)
        assert not (tmp_path / "out").exists()


def test_without_records_nothing_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no points of Figure 9") as error:
        reproduce.figure("9", Asked(tmp_path / "out"), records=tmp_path, quiet=True)
    assert "--scale smoke" in error.value.remedy
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"methods": ("pixeldp",)}, "the method pixeldp is not in this figure"),
        ({"epsilons": (3.0,)}, "ε = 3.0 is not in this figure"),
        ({"changes": {"seed": 3}}, "--set seed is not for a figure"),
        ({"changes": {"method.epsilom": 3}}, "method.epsilom"),
    ],
)
def test_what_a_figure_has_not_is_refused(tmp_path: Path, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        reproduce.figure("2", Asked(tmp_path / "out", **asked), records=RECORDS, quiet=True)
    assert not (tmp_path / "out").exists()
