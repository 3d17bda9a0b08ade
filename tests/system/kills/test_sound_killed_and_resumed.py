"""The sound method, killed for good while it writes: the same bits, and never too few steps on the ledger."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support.checkpoints import same_bits
from support.tiny import as_arguments

import stobatch
from stobatch.dp.plan import DpSgdPlan

SETTINGS = {
    "data.train_limit": 120,
    "data.test_limit": 20,
    "method.epsilon": 3.0,
    "method.delta": 1e-3,
    "method.expected_batch_size": 30,
    "model.architecture": "squash 3, conv 4 7/3, relu, linear",
    "training.steps": 4,
    "training.monitor_every": 2,
    "machine.checkpoint_every": 2,
    "machine.threads": 1,
}
SECRET = ["--recipe", "sound.mnist", *as_arguments(SETTINGS)]
ARGUMENTS = [*SECRET, "--seed", "4"]
LEDGER = Path("private", "ledger.json")
# Every file is flushed once before it takes its place and its folder once afterwards, in this order. A checkpoint is
# its part and then its list; before the list is there, its steps are repeated.
WRITES = [
    *("key", "config", "plan", "data"),
    *("begin 1", "part 1", "list 1", "settle 1", "begin 2", "part 2", "list 2", "settle 2"),
    *("training", "model", "manifest"),
]
KILLED_AT = ("data", "begin 1", "part 1", "list 1", "settle 1", "part 2", "list 2", "model")
# Other settings of the machine, and so other bits: how many steps are counted in the end, if the kill comes while the
# file is written, and just after.
COUNTED_ELSEWHERE = {"begin 1": (4, 6), "part 1": (6, 6), "list 1": (6, 4), "part 2": (6, 6)}


@pytest.fixture(scope="module")
def quiet_run(stobatch_process, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("quiet") / "run"
    done = stobatch_process("train", "--out", out, *ARGUMENTS, kill_at_fsync=2 * len(WRITES))
    assert done.code == 0, done.err
    return out


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["while", "after"])
@pytest.mark.parametrize("write", KILLED_AT)
def test_killed_and_resumed(stobatch_process, quiet_run, tmp_path, write, after):
    out = tmp_path / "run"
    killed = stobatch_process(
        "train", "--out", out, *ARGUMENTS, kill_at_fsync=2 * WRITES.index(write) + after, torn=not after
    )
    assert killed.code == -signal.SIGKILL
    resumed = stobatch_process("train", "--out", out, *ARGUMENTS, "--resume", "--json")
    assert resumed.code == 0, resumed.err
    assert same_bits(out, quiet_run)
    model = stobatch.load(out)
    assert model.accounted_steps == 4, "the same bits are the same releases"
    assert (out / LEDGER).read_text() == (quiet_run / LEDGER).read_text()
    assert json.loads(resumed.out)["guarantee"]["void_epsilon"] == model.guarantee.epsilon
    assert model.guarantee == model.plan.guarantee


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["while", "after"])
@pytest.mark.parametrize("write", COUNTED_ELSEWHERE)
def test_killed_and_resumed_elsewhere(stobatch_process, quiet_run, tmp_path, write, after):
    out = tmp_path / "run"
    killed = stobatch_process(
        "train", "--out", out, *ARGUMENTS, kill_at_fsync=2 * WRITES.index(write) + after, torn=not after
    )
    assert killed.code == -signal.SIGKILL
    elsewhere = [*ARGUMENTS, "--set", "machine.memory_mb=256"]
    resumed = stobatch_process("train", "--out", out, *elsewhere, "--resume", "--json")
    assert resumed.code == 0, resumed.err
    model, counted = stobatch.load(out), COUNTED_ELSEWHERE[write][after]
    assert isinstance(model.plan, DpSgdPlan)
    assert model.accounted_steps == counted
    assert same_bits(out, quiet_run) == (counted == 4), "what is counted again has noise of its own"
    said = json.loads(resumed.out)["guarantee"]["void_epsilon"]
    assert said == model.guarantee.epsilon == model.plan.mechanism(counted).epsilon(1e-3)


@pytest.mark.slow
def test_a_secret_root_is_kept_for_the_rest_of_the_run(stobatch_process, tmp_path):
    """Resumed with other seeds, the repeated steps would be other steps."""
    out = tmp_path / "run"
    killed = stobatch_process("train", "--out", out, *SECRET, kill_at_fsync=2 * WRITES.index("settle 1") + 2)
    assert killed.code == -signal.SIGKILL
    root = (out / "private" / "seeds.json").read_bytes()
    assert stobatch_process("train", "--out", out, *SECRET, "--resume").code == 0
    assert (out / "private" / "seeds.json").read_bytes() == root
    assert json.loads(root)["root"] not in "".join(file.read_text() for file in out.glob("*.json"))
