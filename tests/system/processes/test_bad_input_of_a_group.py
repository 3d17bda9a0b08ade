"""Processes that do not fit together: one line from one of them, no traceback, nothing written, nobody left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.groups import AGENT_S, TIMEOUT_S, Group, Server, arguments, as_arguments, finished, said, torchrun, written

from stobatch.cli.app import app
from stobatch.config import DataConfig
from stobatch.data import load

QUICK_S = TIMEOUT_S / 2
"""Well below the time after which a process is given up for lost; two idle cores need three seconds."""


def refused(ended: Group, *words: str) -> None:
    """Everybody failed by himself and in time, and one of them said why."""
    assert all(code == 2 for code in ended.codes), (ended.codes, ended.err)
    assert len(ended.said) == 1, ended.err
    assert "Traceback" not in ended.err
    for word in words:
        assert word in ended.said[0]
    assert ended.said[0].endswith((".", "`")), "the line says what to do"
    assert ended.seconds < QUICK_S
    assert not any(process.out for process in ended.processes)


def changed(**changes: Any) -> Sequence[str]:
    """Arguments that are given after the others, and so outdo them."""
    return as_arguments({key.replace("__", "."): value for key, value in changes.items()})


ONE_DIFFERS: dict[str, tuple[Sequence[str], dict[str, Any], tuple[str, ...]]] = {
    "seed": (changed(seed=5), {}, ("processes 0 and 1 differ in their seed", "4 and 5", "--seed")),
    "method": (changed(method__epsilon=4.0), {}, ("configuration", "same command")),
    "steps": (changed(training__steps=7), {}, ("configuration", "same command")),
    "precision": (changed(machine__precision="float64"), {}, ("machine settings", "precision")),
    "memory": (changed(machine__memory_mb=64), {}, ("machine settings", "memory_mb")),
    "checkpoints": (changed(machine__checkpoint_every=3), {}, ("machine settings", "checkpoint_every")),
    "pieces": (changed(machine__pieces=8), {}, ("machine settings", "pieces")),
    "sums": (changed(machine__exact_sums=False), {}, ("machine settings", "exact_sums")),
    "code": ([], {"other_code": "0123456789ab"}, ("code", "0123456789ab", "same version of stobatch")),
    "torch": ([], {"other_torch": "2.4.0"}, ("torch version", "2.4.0", "same version of torch")),
    "late clock": ([], {"clock_ahead": -61.5}, ("clocks of processes 0 and 1", "s apart", "NTP")),
    "early clock": ([], {"clock_ahead": 3600.0}, ("clocks of processes 1 and 0", "3600 s apart", "NTP")),
}


@pytest.mark.parametrize("what", ONE_DIFFERS)
def test_one_process_that_differs_is_named(group: Server, tmp_path: Path, what: str) -> None:
    own, accident, words = ONE_DIFFERS[what]
    out = tmp_path / "run"
    ended = group(2, "train", "--out", out, *arguments(), each={1: own}, accidents={1: accident})
    refused(ended, *words)
    assert not written(tmp_path)


def test_of_three_the_one_that_differs_is_named(group: Server, tmp_path: Path) -> None:
    ended = group(3, "train", "--out", tmp_path / "run", *arguments(), each={2: changed(seed=6)})
    refused(ended, "processes 0 and 2 differ in their seed")
    assert not written(tmp_path)


def test_clocks_that_are_a_little_apart_are_no_matter(group: Server, tmp_path: Path) -> None:
    ended = group(2, "train", "--out", tmp_path / "run", *arguments(), accidents={1: {"clock_ahead": 50.0}})
    assert ended.codes == [0, 0], ended.err


SAME_FOR_ALL: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "three processes for trainers of two devices": (
        *(3, {"machine__devices_per_trainer": 2}),
        ("3 processes do not divide into trainers of 2 devices", "multiple of 2"),
    ),
    "two trainers at once for a step of one": (
        *(2, {"machine__devices_per_trainer": 1}),
        ("2 trainers at once, and a step has 1", "nothing to do"),
    ),
    "two trainers at once for a step of three": (
        *(2, {"machine__devices_per_trainer": 1, "trainers__num": 3, "trainers__per_step": 3}),
        ("2 trainers at once, and a step has 3", "devices_per_trainer unset"),
    ),
    "more processes than pieces": (
        *(3, {"machine__pieces": 2}),
        ("cut into 2 pieces, too few for 3 processes", "machine.pieces=3"),
    ),
    "a setting that is not known": (2, {"training__stpes": 3}, ("stpes",)),
    "an accelerator that is not there": (2, {"machine__device": "cuda"}, ("cuda", "--device cpu")),
    "a budget that is out of reach": (2, {"method__epsilon": 1000.0}, ("target_epsilon",)),
    "more trainers in a step than there are": (2, {"trainers__num": 2, "trainers__per_step": 3}, ("per_step=3",)),
}


@pytest.mark.parametrize("what", SAME_FOR_ALL)
def test_a_mistake_that_all_make_is_told_once(group: Server, tmp_path: Path, what: str) -> None:
    processes, changes, words = SAME_FOR_ALL[what]
    ended = group(processes, "train", "--out", tmp_path / "run", *arguments(**changes))
    refused(ended, *words)
    assert not written(tmp_path)


def test_a_mistake_that_one_makes_before_it_meets_the_others_is_told_once(group: Server, tmp_path: Path) -> None:
    """The others wait for it until their time is over, or until torchrun ends them: that is tried with torchrun."""
    own = {1: ["--set", "training.stpes=3"]}
    short = arguments(machine__timeout_s=3)
    ended = group(2, "train", "--out", tmp_path / "run", *short, each=own)
    refused(ended, "stpes")
    assert not written(tmp_path)


def test_a_run_directory_that_is_not_shared(group: Server, tmp_path: Path) -> None:
    folders = {rank: ["--out", tmp_path / f"node-{rank}" / "run"] for rank in range(2)}
    ended = group(2, "train", *arguments(), each=folders)
    refused(ended, "process 1 does not see", "file system that all nodes share")
    assert not (tmp_path / "node-1").exists()
    # The one that leads could not know before it had written the files that the others look for.
    assert not list((tmp_path / "node-0").rglob("*.safetensors"))


def test_a_network_that_is_handed_over_in_two_versions(group: Server, tmp_path: Path) -> None:
    ended = group(2, "train", "--out", tmp_path / "run", *arguments(), accidents={1: {"other_weights": True}})
    refused(ended, "differ in their first parameters", "same network")
    assert not written(tmp_path)


def test_data_that_differ(group: Server, tmp_path: Path) -> None:
    """What is said of them confirms no guess: a part of their checksum would, and it is in no other message either."""
    ended = group(2, "train", "--out", tmp_path / "run", *arguments(), accidents={1: {"other_labels": True}})
    refused(ended, "differ in their training data", "same data")
    assert not written(tmp_path)
    checksum = load(DataConfig(train_limit=2000, test_limit=100)).train.fingerprint()
    assert checksum[:12] not in ended.err


def test_a_run_that_is_there_already_is_refused_once(group: Server, sound_alone: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in sound_alone.rglob("*")}
    refused(group(2, "train", "--out", sound_alone, *arguments()), "already holds this run", "--resume")
    refused(
        group(2, "train", "--out", sound_alone, *arguments(training__steps=5), "--resume"),
        "was started with other settings",
    )
    assert {file: file.stat().st_mtime_ns for file in sound_alone.rglob("*")} == before


VERBS = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]


@pytest.mark.parametrize("verb", sorted({*VERBS} - {"train"}))
def test_other_verbs_run_in_one_process(group: Server, tmp_path: Path, verb: str) -> None:
    """Whatever their arguments are: before those are looked at."""
    refused(group(2, verb, tmp_path / "run"), f"`stobatch {verb}` runs in one process", "without torchrun")
    assert not written(tmp_path)


def test_who_speaks_for_all_does_not_depend_on_clocks(group: Server, tmp_path: Path) -> None:
    """A mistake is found at times that are close to each other, on any two sides of a full half minute."""
    refused(group(2, "plan", accidents={1: {"clock_ahead": 30.0}}), "`stobatch plan` runs in one process")


# By torchrun itself, whose own summary follows the line.


@pytest.mark.slow
def test_torchrun_ends_with_one_line_of_ours_and_leaves_nobody(tmp_path: Path) -> None:
    """Where a process is wrong before it has met the others, who wait for it."""
    accident = {"arguments": ["--set", "training.stpes=3"]}
    command = ["train", "--out", tmp_path / "run", *arguments(machine__timeout_s=2 * AGENT_S)]
    with torchrun(command, tmp_path / "agent", accidents={"1/0": accident}) as agent:
        ended = finished(agent, tmp_path / "agent", within_s=AGENT_S)
    assert ended.code != 0
    (line,) = said(ended.err)
    assert "stpes" in line
    assert "stobatch/" not in ended.err, "no traceback leads into the library"
    assert not (tmp_path / "run").exists()
    assert not ended.out


@pytest.mark.slow
def test_what_looks_for_processes_left_behind_finds_one(tmp_path: Path) -> None:
    """The broken twin: a worker that has started another process and does not wait for it."""
    accident = {"0/0": {"leave_a_sleeper": 2.0 * AGENT_S}}
    with (
        torchrun(["where", "Theorem 5"], tmp_path / "agent", processes=1, accidents=accident) as agent,
        pytest.raises(AssertionError, match="left behind"),
    ):
        finished(agent, tmp_path / "agent", within_s=AGENT_S)
