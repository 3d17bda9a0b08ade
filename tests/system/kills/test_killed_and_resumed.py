"""A run that is killed at any moment and resumed ends with the same bits as an undisturbed one."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import checkpoints

# Every file is flushed once before it takes its place and its folder once afterwards. With a public seed a training of
# four steps writes these, in this order. A checkpoint is its part and then its list.
CHECKPOINTS = [f"{file} {n}" for n in range(1, 5) for file in ("part", "list")]
WRITES = ["key", "config", "plan", "data", "noise", *CHECKPOINTS, "training", "model", "manifest"]
MOMENTS = [
    *[(write, True) for write in WRITES],
    ("part 2", False),
    ("list 2", False),
    ("model", False),
    ("manifest", False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("write", "torn"), MOMENTS)
def test_killed_while_writing(stobatch_process, undisturbed, same_training, tiny, tmp_path, write, torn):
    out, point = tmp_path / "run", 2 * WRITES.index(write)
    killed = stobatch_process("train", "--out", out, *tiny, kill_at_fsync=point, torn=torn)
    assert killed.code == -signal.SIGKILL
    assert (out / "model.safetensors").exists() == (write == "manifest")
    assert list(out.rglob(".*")), "the kill was meant to leave a file that has not taken its place"
    resumed = stobatch_process("train", "--out", out, *tiny, "--resume")
    assert resumed.code == 0, resumed.err
    same_training(out, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITES[1:])
def test_killed_just_after_a_file_took_its_place(stobatch_process, undisturbed, same_training, tiny, tmp_path, write):
    out, point = tmp_path / "run", 2 * WRITES.index(write) + 1
    killed = stobatch_process("train", "--out", out, *tiny, kill_at_fsync=point)
    assert killed.code == -signal.SIGKILL
    resumed = stobatch_process("train", "--out", out, "--resume")
    assert resumed.code == 0, resumed.err
    same_training(out, undisturbed)


def test_the_training_has_no_other_moments_of_writing(stobatch_process, tiny, tmp_path):
    """If this fails the list above misses a file, and its moments are not tried."""
    beyond = stobatch_process("train", "--out", tmp_path / "run", *tiny, kill_at_fsync=2 * len(WRITES))
    assert beyond.code == 0


@dataclass(frozen=True)
class Longer:
    """A training of sixteen steps: its arguments, its undisturbed run, and how long that took."""

    arguments: list[str]
    run: Path
    seconds: float


@pytest.fixture(scope="module")
def longer(stobatch_process, tiny, tmp_path_factory) -> Longer:
    changes = {"training.steps": 16, "training.monitor_every": 8, "machine.checkpoint_every": 5}
    arguments = [*tiny, *[part for key, value in changes.items() for part in ("--set", f"{key}={value}")]]
    out, started = tmp_path_factory.mktemp("longer") / "run", time.monotonic()
    assert stobatch_process("train", "--out", out, *arguments).code == 0
    return Longer(arguments, out, time.monotonic() - started)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again_at_random_moments(stobatch_process, longer, same_training, tmp_path, seed):
    moments, out, kills, patience = random.Random(seed), tmp_path / "run", 0, longer.seconds
    for _ in range(8):
        if not (out / "config.json").exists():
            shutil.rmtree(out, ignore_errors=True)  # the known gap above
        accident = {"signal": signal.SIGKILL, "signal_after": moments.uniform(0.3, 0.7) * patience}
        ended = stobatch_process("train", "--out", out, *longer.arguments, "--resume", **accident)
        assert ended.code in (0, -signal.SIGKILL), ended.err
        kills += ended.code != 0
        if ended.code == 0 and not kills:
            # The machine is less busy than when the undisturbed run was timed: begin anew and strike earlier.
            shutil.rmtree(out)
            patience /= 2
    assert stobatch_process("train", "--out", out, *longer.arguments, "--resume").code == 0
    assert kills, "no kill hit the training; move the moments"
    same_training(out, longer.run)


VERBS = {"certify": "certificates.json", "attack": "attack.json"}


@pytest.fixture(scope="module")
def tables(stobatch_process, undisturbed, tmp_path_factory) -> Path:
    """Both tables in three parts of 20 rows, undisturbed."""
    out = tmp_path_factory.mktemp("tables") / "run"
    shutil.copytree(undisturbed, out, ignore=shutil.ignore_patterns("records", *VERBS.values()))
    for verb in VERBS:
        assert stobatch_process(verb, out, "--json", tile=20).code == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("point", range(8))
@pytest.mark.parametrize("verb", VERBS)
def test_a_killed_table_resumes_to_the_same_rows(stobatch_process, trained, tables, rows, verb, point):
    """Three parts and a summary, each flushed twice: eight moments."""
    killed = stobatch_process(verb, trained, "--json", tile=20, kill_at_fsync=point, torn=point % 2 == 0)
    assert killed.code == -signal.SIGKILL
    kept = {file: file.stat().st_mtime_ns for file in trained.glob(f"records/{verb}-*/rows-*.parquet")}
    assert len(kept) == min(3, (point + 1) // 2)
    resumed = stobatch_process(verb, trained, "--resume", "--json", tile=20)
    assert resumed.code == 0, resumed.err
    assert all(file.stat().st_mtime_ns == written for file, written in kept.items()), "a finished part was made again"
    assert rows(trained, verb) == rows(tables, verb)
    assert len(rows(tables, verb)["index"]) == 60
    ours, theirs = (json.loads((run / VERBS[verb]).read_text()) for run in (trained, tables))
    assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}


def test_resuming_with_other_parts_never_counts_a_row_twice(stobatch_process, trained):
    """A part's draws depend on where it begins, so parts of another size are another table."""
    assert stobatch_process("certify", trained, "--json", tile=20).code == 0
    assert stobatch_process("certify", trained, "--json", "--resume", tile=15).code == 0
    parts = {folder: len(list(folder.iterdir())) for folder in trained.glob("records/certify-*")}
    assert sorted(parts.values()) == [3, 4]
    assert json.loads((trained / "certificates.json").read_text())["rows"] == 60


# Four tables of one part each, the probe, the images, the scores and the manifest, in turn.
EVALUATION_WRITES = 8


@pytest.mark.slow
@pytest.mark.parametrize("point", [0, 3, 4, 7, 8, 10, 12])
def test_a_killed_evaluation_resumes_to_the_same_scores(stobatch_process, trained, undisturbed, point):
    """Each file is flushed twice; after the last flush but three the scores are there."""
    killed = stobatch_process("evaluate", trained, "--json", kill_at_fsync=point, torn=point % 2 == 0)
    assert killed.code == -signal.SIGKILL
    assert not (trained / "scores.json").exists()
    resumed = stobatch_process("evaluate", trained, "--resume", "--json")
    assert resumed.code == 0, resumed.err
    ours, theirs = (json.loads((run / "scores.json").read_text()) for run in (trained, undisturbed))
    beside = {"certificates": None, "flags": None, "same_images": None}
    assert ours | beside == theirs | beside, "but for what the other run had certified"


def test_the_evaluation_has_no_other_moments_of_writing(stobatch_process, trained):
    """If this fails the moments above miss a file."""
    last, beyond = 2 * EVALUATION_WRITES - 1, 2 * EVALUATION_WRITES
    assert stobatch_process("evaluate", trained, "--json", kill_at_fsync=last).code == -signal.SIGKILL
    assert stobatch_process("evaluate", trained, "--json", kill_at_fsync=beyond).code == 0


STEP, PART = "stobatch.training.trainable:Trainable.release", "stobatch.evaluation.tables:_Ticks.__init__"
"""Called at the beginning of each step of a training, and of each part of a table."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_stop_saves_the_step_and_exits_130(stobatch_process, longer, same_training, tmp_path, number):
    out, told = tmp_path / "run", [STEP, 8, int(number), str(tmp_path / "told")]
    stopped = stobatch_process("train", "--out", out, *longer.arguments, signal_in=told)
    assert stopped.code == 130, stopped.err
    assert stopped.err.count("stobatch: interrupted") == 1
    assert "--resume" in stopped.err
    assert "Traceback" not in stopped.err
    assert not (out / "model.safetensors").exists()
    assert checkpoints.last_step(out) == 8, "the step in which it was told is the last"
    assert re.findall(r"train: (\d+) of 16", stopped.err)[-1] == "8", "the last finished step was not saved"
    resumed = stobatch_process("train", "--out", out, "--resume")
    assert resumed.code == 0, resumed.err
    same_training(out, longer.run)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_stop_of_a_table_exits_130_and_says_so(stobatch_process, trained, tmp_path, verb, number):
    told = [PART, 2, int(number), str(tmp_path / "told")]
    stopped = stobatch_process(verb, trained, tile=20, signal_in=told)
    assert stopped.code == 130, stopped.err
    assert not (trained / VERBS[verb]).exists()
    assert list(trained.glob("records/*/rows-00000000.parquet"))
    assert "stobatch: interrupted" in stopped.err
    assert "Traceback" not in stopped.err
