"""docs/public-start.md: every command and every line of Python on the page, with a few steps instead of hundreds."""

from __future__ import annotations

import contextlib
import io
import shlex
from pathlib import Path

import pytest
from support.page_blocks import blocks_of
from support.pages import ROOT

import stobatch
import stobatch_recipes
from stobatch import RunConfig, Status
from stobatch.cli.app import parser
from stobatch.pretraining import images
from stobatch.pretraining import pretrain as module
from stobatch.results import Scores, Training
from stobatch.runs import Run

PAGE = ROOT / "docs" / "public-start.md"
SMALL = {
    "data.train_limit": 300,
    "data.test_limit": 20,
    "method.batch_size": 60,
    "training.steps": 2,
    "evaluation.adaptive_attacks": ["fgsm"],
    "evaluation.attacks": ["fgsm"],
    "evaluation.num_images": 0,
    "machine.threads": 1,
}


def test_the_page_s_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 2)
    monkeypatch.setattr(module, "BATCH_SIZE", 8)
    monkeypatch.setattr(images, "_STROKES_PER_DIGIT", 6)
    whole = stobatch_recipes.recipe

    def small(name: str) -> RunConfig:
        return whole(name).override_all(SMALL)

    monkeypatch.setattr(stobatch_recipes, "recipe", small)
    printed = io.StringIO()
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(printed):
        for block in blocks_of(PAGE):
            if block.language == "python":
                exec(compile(block.code, str(block), "exec"), {"__name__": "__main__"})
            for command in block.commands if block.language == "sh" else ():
                parser()(shlex.split(command)[1:], standalone_mode=False)
    said = " ".join(printed.getvalue().split())
    for words in (
        "from the prior scribbles",
        "The prior alone",
        "scribbles of my own (licence: CC0-1.0",
        "prior, made from",
    ):
        assert words in said, words
    runs = {path.name: stobatch.load(path) for path in (tmp_path / "runs").iterdir()}
    assert {name: model.guarantee.status for name, model in runs.items()} == dict.fromkeys(
        ("from-fonts", "from-scribbles", "head", "adapters"), Status.PROVED
    )
    counts = {name: Training.read(Run(model.run.path)).network for name, model in runs.items()}
    trained = {name: facts.trained for name, facts in counts.items() if facts is not None}
    assert trained["from-fonts"] is None
    assert trained["head"] is not None
    assert trained["adapters"] is not None
    assert trained["head"] < trained["adapters"]
    assert Scores.read(Run(tmp_path / "runs" / "from-fonts")).prior is not None
