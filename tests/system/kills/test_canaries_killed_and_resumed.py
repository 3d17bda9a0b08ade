"""A training with canaries, killed for good while it writes: the same weights, and the same scores of every canary."""

from __future__ import annotations

import signal
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import checkpoints
from support.checkpoints import same_bits
from support.tiny import as_arguments

SETTINGS = {
    "canaries.num": 200,
    "training.steps": 4,
    "training.monitor_every": 4,
    "data.test_limit": 20,
    "machine.checkpoint_every": 2,
    "machine.threads": 1,
}
ARGUMENTS = ["--recipe", "audit.sound", "--seed", "4", *as_arguments(SETTINGS)]
# Every file is flushed once before it takes its place and its folder once afterwards, in this order. A checkpoint is
# its part and then its list.
WRITES = [
    *("key", "config", "plan", "data"),
    *("begin 1", "part 1", "list 1", "settle 1", "begin 2", "part 2", "list 2", "settle 2"),
    *("canary scores", "training", "model", "manifest"),
]
MOMENTS = ["data", "part 1", "list 1", "settle 1", "part 2", "list 2", "canary scores", "training", "model"]
SCORES = Path("private") / "canary_scores.safetensors"


@pytest.fixture(scope="module")
def quiet_run(stobatch_process, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("quiet") / "run"
    done = stobatch_process("train", "--out", out, *ARGUMENTS, kill_at_fsync=2 * len(WRITES))
    assert done.code == 0, done.err
    return out


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["while", "after"])
@pytest.mark.parametrize("write", MOMENTS)
def test_killed_and_resumed(stobatch_process, quiet_run, tmp_path, write, after):
    out = tmp_path / "run"
    killed = stobatch_process(
        "train", "--out", out, *ARGUMENTS, kill_at_fsync=2 * WRITES.index(write) + after, torn=not after
    )
    assert killed.code == -signal.SIGKILL
    resumed = stobatch_process("train", "--out", out, "--resume")
    assert resumed.code == 0, resumed.err
    assert same_bits(out, quiet_run)
    assert same_bits(out, quiet_run, SCORES)
    assert stat.S_IMODE((out / SCORES).stat().st_mode) == 0o600


def test_the_scores_are_of_all_steps(quiet_run):
    """Those of the last checkpoint, and not those of a part: a canary's sum has moved in every stretch."""
    (sums,) = load_file(quiet_run / SCORES).values()
    assert torch.equal(sums, checkpoints.tensors(quiet_run)["carried.canary_sums"])
    assert len(sums) == 200
    assert bool(sums.all())


@pytest.mark.slow
def test_sums_that_were_not_carried_over_are_caught(stobatch_process, quiet_run, tmp_path):
    """The broken twin: sums that begin at zero again where a training is resumed."""
    out = tmp_path / "run"
    moment = 2 * WRITES.index("begin 2")
    assert stobatch_process("train", "--out", out, *ARGUMENTS, kill_at_fsync=moment).code == -signal.SIGKILL
    checkpoints.forge(checkpoints.newest(out), lambda tensors: tensors["carried.canary_sums"].zero_())
    assert stobatch_process("train", "--out", out, "--resume").code == 0
    assert same_bits(out, quiet_run)
    assert not same_bits(out, quiet_run, SCORES)
