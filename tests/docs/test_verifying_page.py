"""The page for auditors: its commands run as written, and its numbers are those of the record."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stobatch
from stobatch_recipes import recipe

ROOT = Path(__file__).parents[2]
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
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "stobatch"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m stobatch "$@"\n')
    command.chmod(0o755)
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S)
    script = "set -e\n" + "".join(blocks).replace("-f owner_key", "-q -N '' -f owner_key")
    path = f"{command.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "signed by owner@example.org, checked with allowed_signers" in " ".join(done.stdout.split())


def test_the_numbers_are_those_of_the_record() -> None:
    record, page = json.loads((ROOT / "results" / "reliability" / "tampering.json").read_text()), PAGE.read_text()
    found = record["tamperings"]
    assert f"in {found['ways']} ways" in page
    for attacker in ("manifest left alone", "manifest mended", "manifest mended, signature asked for"):
        one = found[attacker]
        assert f"| {attacker} | {one['named_by_verify']} | {one['refused_by_report']} |" in page
    assert record["flipped_bits"] == {"flipped": 1000, "noticed": 1000}
    assert "all 1,000 flipped bits were noticed" in page
