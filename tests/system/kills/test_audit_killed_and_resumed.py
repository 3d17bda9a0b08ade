"""An audit that is killed for good and resumed keeps the parts it had and ends with the same document."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pyarrow.parquet
import pytest

ARGUMENTS = [
    *("--recipe", "audit.sound_strict", "--trainings", "27", "--seed", "1"),
    *("--set", "audit.models_at_once=9", "--set", "training.steps=2", "--set", "machine.threads=1"),
]
# Every file is flushed once before it takes its place and its folder once afterwards, in this order.
WRITES = ["key", "config", "plan", "seeds", "part 1", "part 2", "part 3", "evidence", "audit", "manifest"]


def table(run: Path) -> dict[str, list[object]]:
    columns: dict[str, list[object]] = {}
    for part in sorted(run.glob("private/records/audit-many_runs-*/rows-*.parquet")):
        for name, values in pyarrow.parquet.read_table(part).to_pydict().items():
            columns.setdefault(name, []).extend(values)
    return columns


@pytest.fixture(scope="module")
def quiet_run(stobatch_process, tmp_path_factory) -> Path:
    """If this fails the list above misses a file, and its moments are not tried."""
    out = tmp_path_factory.mktemp("quiet") / "run"
    done = stobatch_process("audit", out, *ARGUMENTS, "--json", kill_at_fsync=2 * len(WRITES))
    assert done.code == 0, done.err
    assert json.loads(done.out)["verdict"] == "consistent"
    return out


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["while", "after"])
@pytest.mark.parametrize("write", WRITES)
def test_killed_and_resumed(stobatch_process, quiet_run, tmp_path, write, after):
    out, point = tmp_path / "run", 2 * WRITES.index(write) + after
    killed = stobatch_process("audit", out, *ARGUMENTS, "--json", kill_at_fsync=point, torn=not after)
    assert killed.code == -signal.SIGKILL
    assert (out / "audit.json").exists() == (write == "manifest" or (write == "audit" and after))
    kept = {file: file.stat().st_mtime_ns for file in out.glob("private/records/*/rows-*.parquet")}
    assert len(kept) == max(0, min(3, (point + 1) // 2 - WRITES.index("part 1")))
    resumed = stobatch_process("audit", out, *ARGUMENTS, "--json", "--resume")
    assert resumed.code == 0, resumed.err
    assert all(file.stat().st_mtime_ns == written for file, written in kept.items()), "a finished part was made again"
    assert table(out) == table(quiet_run)
    assert len(table(out)["score"]) == 27
    for name in ("audit.json", "evidence/many_runs.json"):
        assert (out / name).read_bytes() == (quiet_run / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_stop_exits_130_with_whole_parts(stobatch_process, quiet_run, tmp_path, number):
    out = tmp_path / "run"
    told = ["stobatch.evaluation.tables:_Ticks.__init__", 2, int(number), str(tmp_path / "told")]
    stopped = stobatch_process("audit", out, *ARGUMENTS, signal_in=told)
    assert stopped.code == 130, stopped.err
    assert stopped.err.count("stobatch: interrupted") == 1
    assert "Traceback" not in stopped.err
    assert not (out / "audit.json").exists()
    assert len(table(out)["score"]) == 9, "the first part is whole"
    resumed = stobatch_process("audit", out, "--seed", "1", "--resume", "--json")
    assert resumed.code == 0, resumed.err
    assert (out / "audit.json").read_bytes() == (quiet_run / "audit.json").read_bytes()
