"""`stobatch compare` from beginning to end: what it prints, what it leaves, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.command_line import Result, call
from support.tiny import as_arguments

from stobatch.comparison.plan import change_rows
from stobatch.interrupts import Interrupted
from stobatch.results import ComparedFlag, Comparison
from stobatch_recipes.baselines import COMPARED, rows

PAGE = Path(__file__).parents[3] / "docs" / "comparing.md"
NAMES = "sound,published,vanilla_adversarial"


@pytest.fixture(scope="session")
def few(settings: dict[str, Any]) -> list[str]:
    """Settings of all methods that make a training take well under a second."""
    own = ("audit.", "model.architecture", "training.learning_rate")
    changes = {key: value for key, value in settings.items() if not key.startswith(own)}
    changes |= {"method.expected_batch_size": 30, "method.delta": 1e-3, "training.steps": 2, "data.test_limit": 30}
    changes |= {"evaluation.adaptive_steps": 1, "evaluation.attack_steps": 1, "evaluation.num_images": 0}
    del changes["evaluation.radii"]
    return ["--radius", "0.2", "--radius", "0.05", *as_arguments(changes)]


@pytest.fixture(scope="module")
def compared(few: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Read only."""
    out = tmp_path_factory.mktemp("compared") / "out"
    result = call("compare", "--out", out, "--methods", NAMES, "--epsilon", 3, "--repeats", 2, *few)
    assert result.code == 0, result.err
    return out, result


def test_the_table_says_who_vouches_for_every_budget_and_every_certificate(compared) -> None:
    out, result = compared
    document = json.loads((out / "comparison.json").read_text())
    for row in document["rows"]:
        (line,) = {
            line.split("│")[2].strip()
            for line, below in zip(result.out.splitlines(), result.out.splitlines()[1:], strict=False)
            if line.startswith(f"│ {row['name']} ") and f"│ {row['function'].replace('_', ' ')}, " in below
        }
        assert (
            line
            == {
                "sound ε=3": f"proved: ε = {row['guarantees'][0].get('proved_epsilon', 0):g}, δ = 0.001",
                "published ε=3": "CLAIMED, NOT PROVED: ε = 3",
                "vanilla_adversarial": "NO PRIVACY GUARANTEE",
            }[row["name"]]
        )
        assert f"{100 * row['clean']['mean']:.1f} ± {100 * row['clean']['stddev']:.1f}%" in result.out
    for line in result.out.splitlines():
        if "published ε=3" in line:
            assert re.search("claimed", line, re.IGNORECASE), line
        assert not re.search("published ε=3.*│ proved", line), line
    assert "published rule (claimed, not proved)" in result.out
    assert "corrected rule (proved)" in result.out
    assert "bounds rule (proved)" in result.out
    assert "at radius 0.2 (l∞ over [-1, 1])" in result.out
    assert "at radius 0.05 (l∞ over [-1, 1])" in result.out
    assert f"page: {out / 'comparison.html'}" in " ".join(result.out.split())
    assert "30 two-tailed t-tests over two seeds are withheld" in result.out
    assert len(document["t_tests"]) == 30
    # On the way, too: a name carries its ε.
    assert "1 of 6: sound ε=3 (proved), training 1" in result.err
    assert "3 of 6: published ε=3 (claimed, not proved), training 1" in result.err


def test_json_is_the_document_and_a_second_call_trains_nothing(cli, few, compared, monkeypatch) -> None:
    out, _ = compared
    monkeypatch.setattr("stobatch.comparison.compare.train", None)
    monkeypatch.setattr("stobatch.comparison.compare.evaluate", None)
    result = cli("compare", "--out", out, "--methods", NAMES, "--epsilon", 3, "--repeats", 2, *few, "--json")
    stored = json.loads((out / "comparison.json").read_text())
    assert result.json() == {key: value for key, value in stored.items() if key not in ("schema", "version")}
    assert result.err == ""
    text = json.dumps(stored)
    assert '"claimed_epsilon"' in text
    assert not re.search(r'"(total_|spent_)?epsilon"', text)


def test_methods_without_privacy_have_one_row_and_others_one_for_each_budget(cli, few, tmp_path) -> None:
    result = cli("compare", "--out", tmp_path / "out", "--methods", "vanilla_adversarial,sound", "--epsilon", 2,
                 "--epsilon", 3, "--limit", 8, *few, "--json")  # fmt: skip
    found = result.json()
    assert [row["name"] for row in found["rows"]] == ["vanilla_adversarial", "sound ε=2", "sound ε=3"]
    assert {row["test_examples"] for row in found["rows"]} == {8}
    assert {entry["test_examples"] for row in found["rows"] for entry in row["certified"]} == {8}
    assert found["t_tests"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--methods", "sounds"), "Nearest: sound"),
        (("--methods", ""), "no method ''"),
        (("--epsilon", "0"), "--epsilon 0 is not a budget"),
        (("--epsilon", "nan"), "is not a budget"),
        (("--methods", "vanilla_adversarial", "--epsilon", "-1"), "is not a budget"),
        (("--methods", "published", "--epsilon", "0.01"), "label"),
        (("--radius", "3"), "radi"),
        (("--radius", "-0.1"), "radi"),
        (("--radius", "0.1", "--radius", "0.1"), "twice"),
        (("--seeds", "1,x"), "not whole numbers"),
        (("--seeds", "1,1"), "each seed once"),
        (("--seeds", "1,2", "--repeats", "2"), "not both"),
        (("--repeats", "0"), "repeats=0"),
        (("--limit", "0"), "limit=0"),
        (("--set", "method.epsilon=3"), "Use --epsilon"),
        (("--set", "method.noise_multiplier=3"), "Use --epsilon"),
        (("--set", "evaluation.radii=[0.3]"), "Use --radius"),
        (("--set", "seed=3"), "Use --seeds"),
        (("--set", "method.batch_sizes=3"), "method.batch_size"),
        (("--set", "method.name=sound"), "no setting 'method.name'"),
        (("--set", "training.step=3"), "Nearest: steps"),
        (("--methods", "sound", "--set", "method.label_epsilon=1"), "no setting 'method.label_epsilon'"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(cli, tmp_path, monkeypatch, arguments, said) -> None:
    monkeypatch.setattr("stobatch.comparison.compare.train", None)
    assert said in cli("compare", "--out", tmp_path / "out", *arguments).refusal()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_other_settings_is_refused(cli, few, tmp_path) -> None:
    command = ("compare", "--out", tmp_path / "out", "--methods", "sound,vanilla_adversarial", *few, "--json")
    assert cli(*command).code == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    message = cli(*command, "--set", "training.steps=3").refusal()
    assert "never overwrites" in message
    assert "another --out" in message
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_an_interrupted_call_says_how_to_continue(cli, tmp_path, monkeypatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise Interrupted

    monkeypatch.setattr("stobatch.compare", interrupted)
    result = cli("compare", "--out", tmp_path / "out")
    assert result.code == 130
    assert "run the same command again" in result.err


@pytest.mark.parametrize(("refuted", "code"), [("proved", 1), ("claimed", 0)])
def test_a_broken_proof_ends_with_1(cli, tmp_path, monkeypatch, refuted: str, code: int) -> None:
    flag = ComparedFlag(
        row="sound ε=3 (proved)",
        seed=1,
        name="certificate broken",
        level="error",
        raised_if="it is",
        evidence="here",
        explanation="",
        remedy="",
        refutes=refuted,
    )
    document = Comparison(
        norm="linf",
        input_range="[-1, 1]",
        radii=(),
        public_seeds=True,
        seeds=(1,),
        data="mnist",
        protocols={},
        rows=(),
        flags=(flag,),
        t_tests=(),
        t_tests_below_level=0,
        t_tests_below_level_by_chance=0.0,
    )
    monkeypatch.setattr("stobatch.compare", lambda *arguments, **options: document)
    result = cli("compare", "--out", tmp_path)
    assert result.code == code
    assert "ERROR, sound ε=3 (proved), seed 1: certificate broken. here" in result.out


def test_a_methods_setting_goes_to_the_methods_that_have_it() -> None:
    made = change_rows(rows(NAMES.split(","), [1.0], 0.2), {"method.batch_size": 30, "training.steps": 7})
    assert {name: config.training.steps for name, config in made.items()} == dict.fromkeys(made, 7)
    assert {config.method.batch_size for config in made.values()} == {30}
    weights = {"method.certified_weight": 0.25, "method.label_epsilon": 0.3}
    made = change_rows(rows(NAMES.split(","), [1.0], 0.2), weights)
    found = {name: {key: getattr(config.method, key[7:], None) for key in weights} for name, config in made.items()}
    assert [list(values.values()) for values in found.values()] == [[0.25, None], [None, 0.3], [None, None]]


@pytest.mark.parametrize("name", COMPARED)
def test_every_recipe_of_a_comparison_is_measured_the_same_way(name: str) -> None:
    configs = [config.evaluation for config in rows(list(COMPARED), [1.0], 0.2).values()]
    own = next(iter(rows([name], [1.0], 0.2).values())).evaluation
    assert own.protocols == ("published", "adaptive")
    for other in configs:
        assert own == other.replace(functions=own.functions, num_images=own.num_images)


def test_the_pages_command_runs_as_written(cli, tmp_path, monkeypatch) -> None:
    (command,) = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    result = cli(*shlex.split(command)[1:])
    assert result.code == 0, result.err
    assert sorted(path.name for path in (tmp_path / "runs" / "methods").iterdir()) == [
        "comparison.html", "comparison.json", "comparison.svg", "published-eps-1", "sound-eps-1",
    ]  # fmt: skip
