"""Processes that are killed, hang, have no room left or are told to stop: one line, nobody left, and the same bits."""

from __future__ import annotations

import signal
import subprocess
from base64 import b64decode
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from support import checkpoints
from support.groups import (
    AGENT_S,
    Group,
    Server,
    arguments,
    differences,
    finished,
    kill_all,
    said,
    torchrun,
    wait_for,
)

import stobatch
from stobatch.dp.plan import DpSgdPlan
from stobatch.training.ledger import Ledger

STEPS, EVERY = 6, 2
PATIENCE_S = 6
SHORT = arguments(machine__timeout_s=PATIENCE_S)


def one_line(ended: Group, *words: str) -> None:
    assert len(ended.said) == 1, ended.err
    assert any(word in ended.said[0] for word in words), ended.said
    assert "--resume" in ended.said[0]
    assert "Traceback" not in ended.err


def resumed(group: Server, out: Path, alone: Path, processes: int, *, again: int = 0) -> None:
    """Continued by so many processes it ends as if nothing had happened, and every release is counted once.

    Steps that are made `again`, and not repeated, have noise of their own and are counted beside the others.
    """
    counted = out.with_name("counted")
    accidents = {0: {"count_steps": str(counted)}}
    ended = group(processes, "train", "--out", out, "--resume", accidents=accidents)
    assert ended.codes == [0] * max(processes, 1), ended.err
    assert bool(differences(alone, out)) == bool(again)
    model, made = stobatch.load(out), counted.read_text().split()
    assert model.accounted_steps == STEPS + again
    assert sorted(set(made)) == [str(step) for step in range(STEPS)]
    assert isinstance(model.plan, DpSgdPlan)
    assert model.guarantee.epsilon >= model.plan.mechanism(model.accounted_steps).epsilon(model.plan.delta)


def begun(group: Server, out: Path, processes: int, accidents: dict[int, Any], **more: Any) -> Group:
    """A training that meets an accident; the leader keeps a count of the steps that were released."""
    mine = {**accidents, 0: {"count_steps": str(out.with_name("counted")), **accidents.get(0, {})}}
    return group(processes, "train", "--out", out, *SHORT, accidents=mine, **more)


@pytest.mark.parametrize(("victim", "processes", "after"), [(0, 2, 3), (1, 2, 0), (1, 3, 4)])
def test_a_killed_process_is_missed_and_any_number_continues(
    group: Server, sound_alone: Path, tmp_path: Path, victim: int, processes: int, after: int
) -> None:
    """At step 3, the second of its stretch: both of the stretch are made again, bit by bit, and counted once."""
    out = tmp_path / "run"
    ended = begun(group, out, processes, {victim: {"signal_at_step": [signal.SIGKILL, 3]}})
    assert ended.codes == [-signal.SIGKILL if rank == victim else 2 for rank in range(processes)]
    one_line(ended, "lost contact", "was not heard of")
    assert Ledger.of(out) == Ledger(EVERY, EVERY)
    resumed(group, out, sound_alone, after)


# Where a process is killed, which one, and how often the file was written before.
WRITES = {
    "the tensors": (0, "part-1-of-1", 0),
    "just after the tensors": (0, "part-1-of-1", 1),
    "the list": (0, "complete.json", 0),
    "just after the list": (0, "complete.json", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", WRITES)
def test_killed_between_the_files_of_a_checkpoint(group: Server, sound_alone: Path, tmp_path: Path, where: str) -> None:
    """The second checkpoint, of step 4. Until its list is there, that of step 2 counts."""
    victim, file, after = WRITES[where]
    out = tmp_path / "run"
    ended = begun(group, out, 2, {victim: {"kill_at_fsync": [file, after, 1]}})
    assert ended.codes[victim] == -signal.SIGKILL
    assert ended.codes[1 - victim] == 2
    one_line(ended, "lost contact", "was not heard of")
    assert [folder.name for folder in checkpoints.folders(out)] == ["step-00000002", "step-00000004"]
    assert checkpoints.last_step(out) == (4 if where == "just after the list" else 2)
    resumed(group, out, sound_alone, 3)


@pytest.mark.slow
def test_a_process_that_hangs_is_given_up(group: Server, sound_alone: Path, tmp_path: Path) -> None:
    """It is stopped and never comes back; who watches over the processes has to end it, as torchrun does."""
    out, victim = tmp_path / "run", 1
    ended = begun(group, out, 2, {victim: {"signal_at_step": [signal.SIGSTOP, 3]}}, grace_s=1)
    assert ended.codes[victim] == -999
    assert ended.codes[1 - victim] == 2
    one_line(ended, "lost contact", "was not heard of")
    assert ended.processes[1 - victim].seconds > PATIENCE_S - 1
    resumed(group, out, sound_alone, 2)


def test_a_disk_that_is_full_for_one_process(group: Server, sound_alone: Path, tmp_path: Path) -> None:
    """Documents and logs fit, and no checkpoint does."""
    out = tmp_path / "run"
    ended = begun(group, out, 2, {0: {"largest_file": 6000}})
    assert ended.codes == [2, 2], ended.err
    one_line(ended, "part-1-of-1.safetensors: File too large")
    assert not list(out.rglob(".*"))
    assert not list(out.glob(checkpoints.PATTERN))
    resumed(group, out, sound_alone, 2)


@pytest.mark.parametrize("damage", ["torn", "missing", "altered"])
def test_a_file_that_was_damaged_later_makes_the_checkpoint_before_count(
    group: Server, sound_alone: Path, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "run"
    ended = begun(group, out, 2, {1: {"signal_at_step": [signal.SIGTERM, 2]}})
    assert ended.codes == [130, 130], ended.err
    assert [folder.name for folder in checkpoints.folders(out)] == ["step-00000002", "step-00000003"]
    part = checkpoints.newest(out) / "part-1-of-1.safetensors"
    content = part.read_bytes()
    if damage == "missing":
        part.unlink()
    else:
        part.write_bytes(content[:-100] if damage == "torn" else content[:-1] + bytes([content[-1] ^ 1]))
    # The third step is made again, and counted again.
    resumed(group, out, sound_alone, 2, again=1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("told", [0, 1])
def test_whoever_is_told_to_stop_all_stop_at_one_step(
    group: Server, sound_alone: Path, tmp_path: Path, told: int, number: int
) -> None:
    out = tmp_path / "run"
    ended = begun(group, out, 2, {told: {"signal_at_step": [number, 2]}})
    assert ended.codes == [130, 130], ended.err
    one_line(ended, "interrupted")
    assert checkpoints.last_step(out) == 3, "the step in which it was told is the last"
    assert Ledger.of(out) == Ledger(3, 0)
    resumed(group, out, sound_alone, 3)


def test_a_training_that_diverges_everywhere_is_told_once(group: Server, tmp_path: Path) -> None:
    ended = group(3, "train", "--out", tmp_path / "run", *arguments(training__learning_rate=1e38))
    assert ended.codes == [2, 2, 2], ended.err
    (line,) = ended.said
    assert "diverged" in line
    assert "Traceback" not in ended.err


def test_a_finished_training_is_not_touched_by_any_number_of_processes(group: Server, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert group(2, "train", "--out", out, *SHORT).codes == [0, 0]
    before = {file: file.read_bytes() for file in (*out.glob("*.safetensors"), *out.rglob("complete.json"))}
    counted = Ledger.of(out)
    ended = group(3, "train", "--out", out, "--resume")
    assert ended.codes == [0, 0, 0], ended.err
    assert {file: file.read_bytes() for file in before} == before
    assert Ledger.of(out) == counted == Ledger(STEPS, 0)


@pytest.mark.slow
def test_processes_that_torchrun_has_replaced_a_different_number_of_times_meet(
    group: Server, sound_alone: Path, tmp_path: Path
) -> None:
    """Every agent of torchrun counts for itself, so a node that was replaced counts from 0 and the others do not."""
    out = tmp_path / "run"
    begun(group, out, 2, {1: {"signal_at_step": [signal.SIGKILL, 3]}})
    accidents = {1: {"environment": {"TORCHELASTIC_RESTART_COUNT": "1"}}}
    ended = group(2, "train", "--out", out, *SHORT, accidents=accidents)
    assert ended.codes == [0, 0], ended.err
    assert not differences(sound_alone, out)


# By torchrun, whose processes import everything: one may come half a minute after the other on a busy machine.

PATIENT = arguments(machine__timeout_s=30)


@pytest.mark.slow
def test_torchrun_that_is_told_to_stop_ends_with_a_whole_checkpoint(
    group: Server, sound_alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    slow = {f"{rank}/0": {"slow_step": 0.5} for rank in range(2)}
    with torchrun(["train", "--out", out, *PATIENT], tmp_path / "agent", accidents=slow) as agent:
        wait_for(lambda: list(out.glob(checkpoints.PATTERN)))
        agent.send_signal(signal.SIGTERM)
        ended = finished(agent, tmp_path / "agent", within_s=AGENT_S)
    assert ended.code != 0
    (line,) = said(ended.err)
    assert "interrupted" in line
    made = checkpoints.last_step(out)
    assert 2 <= made < STEPS
    assert Ledger.of(out) == Ledger(made, 0)
    (tmp_path / "counted").write_text("\n".join(map(str, range(made))) + "\n")
    resumed(group, out, sound_alone, 3)


def two_nodes(port: int, *more: str, address: str = "127.0.0.1") -> tuple[str, ...]:
    """Return options of agents that are on two nodes, and that find each other here; the lower address leads."""
    meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=nodes")
    return (*meeting, f"--local-addr={address}", "--max-restarts=2", *more)


def meets(meeting: torch.distributed.TCPStore, address: str) -> bool:
    """Return whether an agent of this address has come to a rendezvous."""
    state = "torch.rendezvous.nodes"
    return meeting.check([state]) and address.encode() in b64decode(meeting.get(state))


@pytest.mark.slow
def test_nodes_meet_again_after_the_leader_was_killed(sound_alone: Path, tmp_path: Path) -> None:
    """Two agents, of which one counts a failure; the other restarts its process, which is busy, and counts nothing."""
    out, counted = tmp_path / "run", str(tmp_path / "counted")
    meeting = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = two_nodes(meeting.port, "--nnodes=2", "--rdzv-conf=is_host=false")
    accidents: dict[str, dict[str, Any]] = {f"0/{attempt}": {"count_steps": counted} for attempt in range(2)}
    accidents["0/0"] |= {"signal_at_step": [signal.SIGKILL, 3]}
    accidents["1/0"] = {"sleep_at_step": [2.0, 3]}
    command = ["train", "--out", out, *PATIENT]
    node_1, node_2 = tmp_path / "node 1", tmp_path / "node 2"
    with (
        torchrun(command, node_1, processes=1, options=options, accidents=accidents) as agent,
        torchrun(command, node_2, processes=1, options=options, accidents=accidents) as other,
    ):
        ends = [finished(agent, node_1, within_s=AGENT_S), finished(other, node_2, within_s=AGENT_S)]
    said_by_both = ends[0].err + ends[1].err
    assert [ended.code for ended in ends] == [0, 0], said_by_both
    assert not differences(sound_alone, out)
    assert (tmp_path / "counted").read_text().split() == ["0", "1", "2", "2", "3", "4", "5"]
    assert stobatch.load(out).accounted_steps == STEPS
    # At the first trial, and not once their counts happen to agree.
    assert "did not find each other" not in said_by_both
    assert len(said(said_by_both)) <= 1, "a line for the accident at most"


@pytest.mark.slow
def test_when_a_node_disappears_the_other_continues_alone(sound_alone: Path, tmp_path: Path) -> None:
    """Two agents on this machine, as on two nodes; the second is killed with its process, and nobody says good-bye.

    The rendezvous is completed by the last of two, and for one alone when the time is over that the first to come has
    set. So the node that disappears comes first and would wait for long; the other waits a second for it to come back.
    """
    out = tmp_path / "run"
    meeting = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    slow = {f"{rank}/0": {"slow_step": 0.5} for rank in range(2)}
    command = ["train", "--out", out, *PATIENT]

    def node(name: str, address: str, last_call_s: int) -> AbstractContextManager[subprocess.Popen[str]]:
        # One that is silent for eight seconds is gone.
        patience = f"last_call_timeout={last_call_s},keep_alive_interval=1,keep_alive_max_attempt=8"
        options = two_nodes(meeting.port, "--nnodes=1:2", f"--rdzv-conf=is_host=false,{patience}", address=address)
        return torchrun(command, tmp_path / name, processes=1, options=options, accidents=slow)

    with node("node 2", "127.0.0.2", round(AGENT_S)) as other:
        wait_for(lambda: meets(meeting, "127.0.0.2"))
        with node("node 1", "127.0.0.1", 1) as agent:
            wait_for(lambda: list(out.glob(checkpoints.PATTERN)))
            other.kill()
            kill_all(tmp_path / "node 2")
            ended = finished(agent, tmp_path / "node 1", within_s=AGENT_S)
    assert ended.code == 0, ended.err
    assert len(said(ended.err)) == 1
    assert not differences(sound_alone, out)
    model = stobatch.load(out)
    assert model.run.read("training")["processes"] == 1
    assert model.accounted_steps == STEPS
    assert (out / "private" / "logs" / "process-00001.log").exists()
