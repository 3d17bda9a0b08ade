"""docs/pretraining.md: every command and every line of Python on the page, with a few steps instead of thousands."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
from support.page_blocks import blocks_of
from support.pages import ROOT

import stobatch
from stobatch.cli.app import parser
from stobatch.pretraining import images
from stobatch.pretraining import pretrain as module
from stobatch.results.prior import read_prior

PAGE = ROOT / "docs" / "pretraining.md"


def test_the_page_s_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 2)
    monkeypatch.setattr(module, "BATCH_SIZE", 8)
    monkeypatch.setattr(images, "_STROKES_PER_DIGIT", 6)
    few = {"steps": 2, "batch_size": 8, "quiet": True}
    monkeypatch.setattr(stobatch.pretrain, "__kwdefaults__", stobatch.pretrain.__kwdefaults__ | few)
    printed = io.StringIO()
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(printed):
        for block in blocks_of(PAGE):
            if block.mark == "not run":
                continue
            if block.language == "python":
                exec(compile(block.code, str(block), "exec"), {"__name__": "__main__"})
            elif block.language == "sh":
                for command in block.commands:
                    parser()(command.split()[1:], standalone_mode=False)
    made = sorted(path.name.removesuffix(".card.json") for path in (tmp_path / "priors").glob("*.card.json"))
    assert made == ["again", "digits", "generators", "leaves"]
    cards = {name: read_prior(tmp_path / "priors" / name)[1] for name in made}
    assert {name: card.method for name, card in cards.items()} == {
        "again": "supervised",
        "digits": "supervised",
        "generators": "contrastive",
        "leaves": "contrastive",
    }
    assert [source.name for source in cards["digits"].sources] == ["fonts", "strokes"]
    assert cards["digits"].tuned_on == ("mnist",)
    assert "handwriting fonts" in printed.getvalue()
