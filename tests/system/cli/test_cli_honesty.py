"""An epsilon is never shown without who vouches for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import call

TOTAL = re.compile(r"ε = [0-9.]+")
MARK = re.compile("claimed|refuted", re.IGNORECASE)


def said_without_mark(text: str) -> list[str]:
    """Lines that give a value of ε and do not say on the same line that it is claimed."""
    return [line for line in text.splitlines() if TOTAL.search(line) and not MARK.search(line)]


def test_the_scan_finds_a_bare_epsilon():
    assert said_without_mark("fine\nthis run has ε = 1.0\n") == ["this run has ε = 1.0"]
    assert not said_without_mark("CLAIMED, NOT PROVED: ε = 1\nclaimed ε = 0.2")


@pytest.fixture(scope="module")
def texts(tiny: list[str], finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Everything that the verbs print for people."""
    return {
        "plan": call("plan", *tiny).out,
        "train": call("train", "--out", tmp_path_factory.mktemp("honest") / "run", *tiny).out,
        "evaluate": call("evaluate", finished_run, "--resume").out,
        "certify": call("certify", finished_run, "--resume").out,
        "demo": call("demo", "--out", finished_run, *tiny).out,
        "attack": call("attack", finished_run, "--resume").out,
    }


def test_printed_epsilons_are_called_claimed(texts):
    for name, text in texts.items():
        assert said_without_mark(text) == [], name
    statuses = dict.fromkeys(("plan", "train", "demo"), "CLAIMED, NOT PROVED")
    for name, status in (statuses | {"attack": "REFUTED", "evaluate": "REFUTED"}).items():
        # The demo has audited the run, so that what is printed about it afterwards says what was found.
        assert f"{status}: ε = 1" in texts[name], name
        assert "against it: one draw of noise is shared" in texts[name], name


def test_published_radii_are_called_claimed_wherever_they_are_shown(texts):
    for name in ("evaluate", "certify", "demo"):
        assert re.search(r"the paper's Eq\. 13, not valid", texts[name]), name
        assert "(claimed, not proved)" in texts[name], name


def keys(document: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(document, dict):
        for key, value in document.items():
            yield (*path, key)
            yield from keys(value, (*path, key))
    elif isinstance(document, list):
        for value in document:
            yield from keys(value, path)


ALLOWED = {"claimed_epsilon", "claimed_delta", "refuted_epsilon", "refuted_delta", "epsilon_at_least", "at_delta"}


def bare(document: Any) -> list[tuple[str, ...]]:
    """Keys about privacy that carry no status, outside of the settings that a user gave."""
    return [
        path
        for path in keys(document)
        if re.search("epsilon|delta|^eps", path[-1])
        and path[-1] not in ALLOWED
        and not {"config", "sizes"} & set(path[:-1])
    ]


def test_the_key_scan_finds_a_bare_key():
    assert bare({"guarantee": {"epsilon": 1.0}}) == [("guarantee", "epsilon")]
    assert bare({"list": [{"delta": 0}]}) == [("list", "delta")]


def test_no_file_of_a_run_has_a_bare_epsilon(finished_run: Path):
    files = [file for file in finished_run.rglob("*.json") if "private" not in file.parts]
    assert {"plan.json", "scores.json", "config.json"} <= {file.name for file in files}
    for file in files:
        assert bare(json.loads(file.read_text())) == [], file.name


def test_no_json_output_has_a_bare_epsilon(cli, tiny, finished_run, tmp_path):
    outputs = {
        "plan": cli("plan", "--json", *tiny),
        "train": cli("train", "--out", tmp_path / "run", "--json", *tiny),
        "certify": cli("certify", finished_run, "--resume", "--json"),
        "evaluate": cli("evaluate", finished_run, "--resume", "--json"),
        "demo": cli("demo", "--out", finished_run, "--json", *tiny),
    }
    for verb, output in outputs.items():
        document = output.json()
        assert bare(document) == [], verb
        assert not [path for path in keys(document) if path[-1] == "epsilon"], verb
    for verb, status in (("plan", "claimed"), ("train", "claimed"), ("evaluate", "refuted"), ("demo", "refuted")):
        assert outputs[verb].json()["guarantee"]["status"] == status, verb
