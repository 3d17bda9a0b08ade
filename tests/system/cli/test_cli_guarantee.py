"""`stobatch guarantee`: the guarantee of a run in full, with its status, before and after an evaluation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stobatch


def words(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_it_prints_everything_that_a_guarantee_rests_on(cli, finished_run: Path) -> None:
    held = stobatch.load(finished_run).guarantee
    result = cli("guarantee", finished_run)
    assert result.code == 0
    said = words(result.out)
    assert f"REFUTED: ε = {held.epsilon:g}" in said
    assert "An audit or a counterexample shows that this does not hold." in said
    assert held.assumptions
    assert held.objections
    assert held.audits
    for line in (*held.assumptions, *held.objections, *held.audits, held.source):
        assert " ".join(line.split()) in said, line


def test_json_is_the_guarantee_of_the_model(cli, finished_run: Path, tiny, tmp_path: Path) -> None:
    assert cli("train", "--out", tmp_path / "run", "--json", *tiny).code == 0
    for run in (finished_run, tmp_path / "run"):
        found = cli("guarantee", run, "--json").json()
        assert found["guarantee"] == stobatch.load(run).guarantee.to_dict()
        assert found["training_hash"] == json.loads((run / "config.json").read_text())["training_hash"]


def test_verbs_say_it_in_short_with_the_command_for_the_rest(cli, finished_run: Path) -> None:
    said = words(cli("evaluate", finished_run, "--resume").out)
    held = stobatch.load(finished_run).guarantee
    assert f"REFUTED: ε = {held.epsilon:g}" in said
    assert f"against it: {held.objections[0]}" in said
    assert f"`stobatch guarantee {finished_run}`" in said.replace(" ", "").replace(
        "stobatchguarantee", "stobatch guarantee "
    )
    assert f"assumes: {held.assumptions[0]}" not in said


def test_what_is_no_run_is_refused(cli, tmp_path: Path) -> None:
    assert "is not a run" in cli("guarantee", tmp_path / "nothing", "--json").refusal()


@pytest.mark.parametrize("name", ["config.json", "training.json", "audit.json"])
def test_a_damaged_run_is_refused_in_one_line(cli, finished_run: Path, tmp_path: Path, name: str) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    content = json.loads((run / name).read_text())
    for damaged in ({**content, next(reversed(content)): {"status": "proven"}}, {}, []):
        (run / name).write_text(json.dumps(damaged))
        message = cli("guarantee", run, "--json").refusal()
        assert name in message or str(run) in message


def test_a_console_without_greek_letters_is_told_all_the_same(finished_run: Path) -> None:
    command = [sys.executable, "-m", "stobatch", "guarantee", str(finished_run)]
    environment = os.environ | {"PYTHONIOENCODING": "cp1252"}
    ended = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert b"REFUTED: \\u03b5 = " in ended.stdout
