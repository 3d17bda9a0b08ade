"""The page for auditors: its commands run as written, and its numbers are those of the record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.pages import ROOT, blocks, run_shell

import stobatch
from stobatch_recipes import recipe

PAGE = ROOT / "docs" / "verifying.md"
SMALL = {
    "data.train_limit": 300,
    "data.test_limit": 30,
    "method.expected_batch_size": 50,
    "model.architecture": "conv 4 5/3, relu, linear",
    "training.steps": 2,
    "certification.limit": 20,
    "canaries.num": 0,
    "machine.threads": 1,
    "seed": None,
}


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_the_commands_run_as_written(tmp_path: Path) -> None:
    stobatch.train(recipe("demo").override_all(SMALL), tmp_path / "RUN", quiet=True)
    stobatch.certify(tmp_path / "RUN", quiet=True)
    script = "".join(blocks(PAGE, "bash")).replace("-f owner_key", "-q -N '' -f owner_key")
    said = run_shell(script, tmp_path)
    assert "signed by owner@example.org, checked with allowed_signers" in " ".join(said.split())


def test_the_numbers_are_those_of_the_record() -> None:
    record, page = json.loads((ROOT / "results" / "reliability" / "tampering.json").read_text()), PAGE.read_text()
    found = record["tamperings"]
    assert f"in {found['ways']} ways" in page
    for attacker in ("manifest left alone", "manifest mended", "manifest mended, signature asked for"):
        one = found[attacker]
        assert f"| {attacker} | {one['named_by_verify']} | {one['refused_by_report']} |" in page
    assert record["flipped_bits"] == {"flipped": 1000, "noticed": 1000}
    assert "all 1,000 flipped bits were noticed" in page
