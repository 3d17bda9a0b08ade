"""`results/search_sound.py`: a cheap trial has the noise of the whole training, and a search goes on where it was."""

from __future__ import annotations

import importlib
import json
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.pages import ROOT

import stobatch


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    return importlib.import_module("search_sound")


def test_a_trial_at_a_share_of_the_cost_has_the_noise_of_the_whole(script: ModuleType) -> None:
    """In a mean gradient: σC/B. A share that would leave too little noise for that is raised."""
    whole = script.TASKS["mnist_strict"].start
    plan = stobatch.plan(whole)
    for asked, expected in ((1 / 16, 1 / 16), (1 / 1000, script.LEAST_NOISE / plan.noise_multiplier), (1, 1)):
        config, share = script.at_share(whole, asked, None)
        cheap = stobatch.plan(config)
        assert share == pytest.approx(expected)
        assert cheap.expected_batch_size == pytest.approx(share * plan.expected_batch_size, abs=0.5)
        per_mean = [one.noise_stddev / one.expected_batch_size for one in (plan, cheap)]
        assert per_mean[1] == pytest.approx(per_mean[0], rel=0.01)


def test_the_best_quarter_goes_on_and_nothing_is_measured_twice(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainings are left out: what is tried is who goes on, what is written, and what a second start does."""
    made: list[tuple[float, Any]] = []

    def trial(task: Any, settings: dict[str, Any], share: float, *_: object) -> dict[str, Any]:
        made.append((share, settings))
        if len(made) == 14:
            raise KeyboardInterrupt
        return {"score": len(json.dumps(settings)) + share}

    monkeypatch.setattr(script, "trial", trial)
    monkeypatch.setattr(script, "Records", lambda *_: Namespace(dataset=None))
    options = Namespace(
        device="cpu", memory_mb=512, held_out=10, draw=1, changes=None, settings=12, part="0/1", shares=(0.1, 0.5, 1.0)
    )
    with pytest.raises(KeyboardInterrupt):
        script.search("mnist", options, script.Log(tmp_path / "log"), 60.0)
    (best,) = script.search("mnist", options, script.Log(tmp_path / "log"), 60.0)
    shares = [share for share, _ in made]
    # 12, then 3, of which the second was killed and made again, then 1.
    assert [shares.count(share) for share in options.shares] == [12, 4, 1]
    first = sorted((settings for share, settings in made if share == 0.1), key=lambda one: -len(json.dumps(one)))
    assert best["settings"] == first[0]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert len(lines) == 16
    assert len({script.Log.key(line) for line in lines}) == 16
    for part in ("0/2", "1/2"):
        options = Namespace(**{**vars(options), "part": part, "shares": (0.1,)})
        script.search("mnist", options, script.Log(tmp_path / "parts"), 60.0)
    parts = [json.loads(line)["settings"] for line in (tmp_path / "parts").read_text().splitlines()]
    assert sorted(map(json.dumps, parts)) == sorted(map(json.dumps, first))


def test_settings_of_trials_from_priors_are_read_as_they_are_written(script: ModuleType) -> None:
    read = importlib.import_module("search_prior").parsed
    assert read('training.steps=100 model.architecture="squash 4, linear" method.radius=0.5') == {
        "training.steps": 100,
        "model.architecture": "squash 4, linear",
        "method.radius": 0.5,
    }
    assert read("") == {}


def test_logged_trials_from_priors_are_of_settings_that_exist(script: ModuleType) -> None:
    prior = importlib.import_module("search_prior")
    for line in map(json.loads, prior.LOG.read_text().splitlines()):
        for settings in (line["prior"]["settings"], line["settings"] or {}):
            assert prior.weighed(prior.START, settings)
