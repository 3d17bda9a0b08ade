"""What the page on serving says was measured is what the records say, and they say what is promised."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import make_serving


def test_the_page_is_made_from_the_records() -> None:
    assert make_serving.PAGE.read_text() == make_serving.page()


def test_the_records_show_what_is_promised() -> None:
    load, soak, fuzz, votes = (make_serving.read(name) for name in ("load", "soak", "fuzz", "votes"))
    assert load["one radius, 0.2"][make_serving.BY_TIME] >= 0.8
    assert load["largest radius"]["share, by processor time"] >= 0.8
    assert votes["share of the library's draws, by processor time"] >= 0.8
    assert soak["wrong"] == 0
    assert soak["requests"] > 50_000
    assert soak["p99_over_p50"] < 5
    assert soak["memory_mb"]["last third"] < 1.02 * soak["memory_mb"]["first third"]
    assert fuzz["cases"] >= 100_000
    assert fuzz["num_findings"] == 0


def _block(first: str) -> str:
    return next(
        block for block in re.findall(r"```text\n(.*?)```", make_serving.page(), re.S) if block.startswith(first)
    )


def test_probes_are_open_addresses_and_nobody_is_killed_while_it_drains() -> None:
    pytest.importorskip("uvicorn", reason="an extra: CI has it")
    from stobatch.serving.application import OPEN, ROUTES
    from stobatch.serving.server import DRAIN_S

    pod, unit = _block("containers:"), _block("[Unit]")
    probes = re.findall(r"Probe: {httpGet: {path: ([^,]+), port: 8080}", pod)
    assert len(probes) == 3
    assert all(path in OPEN and path in ROUTES for path in probes)
    seconds = [*re.findall(r"GracePeriodSeconds: (\d+)", pod), *re.findall(r"TimeoutStopSec=(\d+)", unit)]
    assert len(seconds) == 2
    assert all(int(one) > DRAIN_S for one in seconds)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "stobatch.service"
    file.write_text(_block("[Unit]").replace("/opt/stobatch/bin/stobatch", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", file], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
