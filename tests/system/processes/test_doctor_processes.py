"""Doctor's probes in other processes: real ones that work, hang, crash and find nobody; and GPUs that are wrong."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from stobatch.doctor import gpus, processes
from stobatch.doctor.check import Health
from stobatch.doctor.children import RANKS, ProbeError, ask, environment, python


class TestAsking:
    """Small programs in place of probes."""

    def test_the_last_line_of_the_first_is_the_answer(self):
        first = python("-c", "print('some noise'); print('[1, 2]')")
        assert ask([first, python("-c", "print('another')")]) == [1, 2]

    @pytest.mark.parametrize(
        ("program", "said"),
        [
            ("raise RuntimeError('no such peer')", "RuntimeError: no such peer"),
            ("import sys; sys.exit('out of luck')", "a probe ended with code 1: out of luck"),
            ("import os; os.kill(os.getpid(), 11)", "a probe was killed by SIGSEGV"),
            ("import signal, time; signal.alarm(1); time.sleep(30)", "a probe hung and ended itself"),
            ("pass", "the probe ended without an answer"),
            ("print('not JSON')", "the probe ended without an answer"),
        ],
    )
    def test_a_failure_is_one_line(self, program, said):
        with pytest.raises(ProbeError, match=said):
            ask([python("-c", program)])

    def test_one_that_hangs_is_ended(self, tmp_path):
        file = tmp_path / "pid"
        program = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
        with pytest.raises(ProbeError, match="no answer within 4 s"):
            ask([python("-c", program)], seconds=4)
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)

    def test_one_that_does_not_want_to_end_is_killed(self, tmp_path):
        file = tmp_path / "pid"
        program = (
            "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            f"open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
        )
        with pytest.raises(ProbeError, match="no answer"):
            ask([python("-c", program)], seconds=4)
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)

    def test_the_first_failure_speaks_for_all_and_at_once(self):
        started = time.monotonic()
        with pytest.raises(ProbeError, match="OSError: mine"):
            ask([python("-c", "import time; time.sleep(60)"), python("-c", "raise OSError('mine')")])
        assert time.monotonic() - started < 50

    def test_a_launchers_variables_are_not_handed_on(self, monkeypatch):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
            monkeypatch.setenv(name, "7")
        monkeypatch.setenv("RANKING", "mine")
        assert set(os.environ) - set(environment()) == {
            "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"
        }  # fmt: skip


@contextmanager
def blocked() -> Iterator[int]:
    """A port where nobody answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.slow
class TestRealProcesses:
    def test_gloo_adds_up(self):
        outcome = processes.gloo()
        assert outcome.status is Health.OK, outcome.said
        assert "summed 1 MB at " in outcome.said
        assert ", 16 MB at " in outcome.said

    def test_a_blocked_port_is_caught(self):
        outcome = processes.gloo(blocked, limit=6)
        assert outcome.status is Health.BROKEN
        assert "two processes on 127.0.0.1 could not add up" in outcome.said

    def test_a_rank_alone_does_not_wait_for_ever(self):
        with processes.meeting_point() as port, pytest.raises(ProbeError):
            ask(processes.ranks("sum", port, 2, limit=6)[:1])

    def test_a_peer_that_does_not_come_is_noticed(self):
        outcome = processes.absent_peer()
        assert outcome.status is Health.OK, outcome.said

    def test_torchrun_starts_two_ranks(self, monkeypatch):
        monkeypatch.setenv("LOCAL_RANK", "5")  # as if doctor itself had been launched
        outcome = processes.torchrun()
        assert outcome.status is Health.OK, outcome.said
        assert outcome.said.startswith("started 2 processes, which summed 1 MB at ")

    def test_torchrun_with_a_probe_that_hangs(self, tmp_path):
        """The launcher's own children are in sessions of their own; they are gone as well."""
        probe = tmp_path / "probe.py"
        probe.write_text(
            "import os, pathlib, time; rank = os.environ['RANK']\n"
            f"pathlib.Path({str(tmp_path)!r}, rank + '.pid').write_text(str(os.getpid())); time.sleep(60)"
        )
        outcome = processes.torchrun(probe=probe, limit=10)
        assert outcome.status is Health.BROKEN
        assert "no answer within 15 s" in outcome.said
        files = list(tmp_path.glob("*.pid"))
        assert len(files) == 2
        assert not any(Path("/proc", file.read_text()).exists() for file in files)


def answers(answer: Any) -> Any:
    def asked(commands, **more):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return asked


def test_built_with_gloo():
    assert processes.available().status is Health.OK
    assert "gloo" in processes.available().said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"raised": "", "seconds": 2.0}, "as if the peer had been there"),
        ({"raised": "RuntimeError", "seconds": 29.0}, "after 29.0 s"),
        ({"raised": "RuntimeError", "seconds": 0.0}, "after 0.0 s"),
        (ProbeError("a probe hung and ended itself"), "a probe hung"),
    ],
)
def test_a_peer_that_goes_unnoticed_is_caught(answer, said):
    outcome = processes.absent_peer(answers(answer))
    assert outcome.status is Health.BROKEN
    assert said in outcome.said


def test_a_launcher_that_starts_too_few_is_caught():
    outcome = processes.torchrun(answers({"world": 1, "latency": 1e-4, "sums": {"1": 1e-3}}))
    assert outcome.status is Health.BROKEN
    assert "started 1" in outcome.said


GPU = {
    "name": "GPU", "error": 1e-7, "bfloat16": True, "bfloat16_error": 3e-3, "gflops": 1e4, "free": 8e10, "total": 9e10,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, Health.OK),
        ({"error": 1e-3}, Health.BROKEN),
        ({"error": float("nan")}, Health.BROKEN),
        ({"bfloat16": False}, Health.BROKEN),
        ({"bfloat16_error": 0.5}, Health.BROKEN),
        ({"free": 1e8}, Health.WARNING),
    ],
)
def test_every_gpu_is_judged(change, status):
    outcome = gpus.cuda(lambda: 2, answers([GPU, {**GPU, **change}]))
    assert outcome.status is status
    assert "cuda:1 GPU" in outcome.said
    assert bool(outcome.remedy) == (status is Health.WARNING)


def test_a_gpu_that_gets_lost_on_the_way_to_a_process_is_caught():
    outcome = gpus.cuda(lambda: 2, answers([GPU]))
    assert outcome.status is Health.BROKEN
    assert "counts 2 GPUs here and 1" in outcome.said


def test_without_a_gpu_there_is_nothing_to_mend(tmp_path):
    for outcome in (gpus.cuda(lambda: 0, driver=tmp_path / "none"), gpus.nccl(lambda: 0)):
        assert outcome.status is Health.ABSENT
        assert outcome.remedy == ""


def test_a_driver_that_torch_does_not_see_is_a_warning(tmp_path):
    outcome = gpus.cuda(lambda: 0, driver=tmp_path)
    assert outcome.status is Health.WARNING
    assert "build of torch for CUDA" in outcome.remedy


def test_nccl_without_its_library_is_missing_and_a_failure_is_broken(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert gpus.nccl(lambda: 1).status is Health.MISSING
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert gpus.nccl(lambda: 2, answers(ProbeError("unhandled system error"))).status is Health.BROKEN
    answer = {"version": "2.28.3", "world": 2, "latency": 1e-5, "sums": {"1": 1e-3, "16": 1e-3}}
    assert (
        gpus.nccl(lambda: 1, answers(answer)).said
        == "NCCL 2.28.3: a group of one process summed 1 and 16 MB on its GPU"
    )
    outcome = gpus.nccl(lambda: 2, answers(answer))
    assert outcome.status is Health.OK
    assert outcome.said.startswith("NCCL 2.28.3: 2 processes, one for each GPU, summed 1 MB at 1,000 MB/s")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_broken():
    """A machine that counts a GPU which does not answer."""
    assert gpus.cuda(lambda: 1).status is Health.BROKEN
    assert gpus.nccl(lambda: 1).status in (Health.BROKEN, Health.MISSING)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_the_gpus_work_here():
    assert gpus.cuda().status is Health.OK
    assert gpus.nccl().status is Health.OK


def test_probes_import_torch_alone():
    program = f"import runpy, sys; runpy.run_path({str(RANKS)!r}); assert 'stobatch' not in sys.modules; print('[]')"
    assert ask([python("-c", program)]) == []
