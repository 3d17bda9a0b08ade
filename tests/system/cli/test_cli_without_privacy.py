"""A method that promises nothing says so everywhere, and gets no certificate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def vanilla(tmp_path: Path, settings: dict[str, object]) -> Path:
    """A configuration file for vanilla adversarial training."""
    sections: dict[str, dict[str, object]] = {"method": {"name": "vanilla_adversarial"}}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    file = tmp_path / "vanilla.json"
    file.write_text(json.dumps(sections))
    return file


def test_no_guarantee_is_shown_as_none(cli, vanilla, tmp_path):
    run = tmp_path / "run"
    outputs = {
        "plan": cli("plan", "--config", vanilla),
        "train": cli("train", "--config", vanilla, "--out", run),
        "evaluate": cli("evaluate", run),
    }
    for verb, result in outputs.items():
        assert result.code == 0, (verb, result.err)
        assert "NO PRIVACY GUARANTEE" in result.out, verb
        assert "ε = " not in result.out, verb
    for file in run.rglob("*.json"):
        assert "epsilon" not in file.read_text(), file
        assert "Infinity" not in file.read_text(), file
    assert cli("plan", "--config", vanilla, "--json").json()["guarantee"]["status"] == "none"


def test_there_is_no_certificate_without_noise(cli, vanilla, tmp_path):
    run = tmp_path / "run"
    assert cli("train", "--config", vanilla, "--out", run, "--json").code == 0
    message = cli("certify", run).refusal()
    assert "no certificate" in message
    assert "stobatch evaluate" in message
    assert not (run / "records").exists()
    assert not (run / "certificates.json").exists()


@pytest.mark.parametrize(("size", "said"), [(63, "do not fit 120"), (31, "Use 30 or 33.")])
def test_impossible_batches_are_refused(cli, vanilla, tmp_path, size, said):
    message = cli(
        "train", "--config", vanilla, "--out", tmp_path / "run", "--set", f"method.batch_size={size}"
    ).refusal()
    assert said in message
    assert not (tmp_path / "run").exists()


def test_a_killed_baseline_resumes_to_the_same_scores(cli, vanilla, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for run in (one, two):
        assert cli("train", "--config", vanilla, "--seed", 2, "--out", run, "--json").code == 0
    (two / "model.safetensors").unlink()
    shutil.rmtree(two / "private" / "checkpoints")
    assert cli("train", "--out", two, "--resume", "--json").code == 0
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    scores = [cli("evaluate", run, "--json").json()["under_attack"] for run in (one, two)]
    assert scores[0] == scores[1]


def test_batch_normalisation_trains_or_is_refused_where_nothing_is_promised(cli, vanilla, tmp_path):
    """The setting's own words: refused where a guarantee is per example. Here there is none."""
    result = cli(
        "train", "--config", vanilla, "--out", tmp_path / "run", "--set", "model.normalisation=batch", "--json"
    )
    assert result.code in (0, 2)
