"""Two trainings in one directory would count each other's steps only once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import stobatch
from stobatch.errors import RunError
from stobatch.runs import Run


def test_a_second_training_is_refused_and_changes_nothing(config, tmp_path, files) -> None:
    out = tmp_path / "run"
    stobatch.train(config, out, quiet=True)
    before = files(out)
    with Run(out).held(), pytest.raises(RunError, match="another command works on") as caught:
        stobatch.train(config, out, resume=True, quiet=True)
    assert "Wait for it" in caught.value.remedy
    assert files(out) == before
    stobatch.train(config, out, resume=True, quiet=True)


def test_a_directory_that_is_held_before_its_first_file_can_be_started_after(config, tmp_path) -> None:
    with Run(tmp_path / "run").held():
        pass
    stobatch.train(config, tmp_path / "run", quiet=True)


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from stobatch.runs import Run\n"
    code += "with Run(Path(sys.argv[1])).held(): print('held', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(RunError), Run(tmp_path / "run").held():
        pass
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    other.stdout.close()
    with Run(tmp_path / "run").held():
        pass
