"""Doctor's probes in other processes: real ones that work, hang and crash; and GPUs that are wrong."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import call
from support.groups import wait_for

from stobatch.doctor import Health, checks, probes
from stobatch.doctor.probes import ProbeError, ask, environment


@pytest.fixture
def hangs_once_written(monkeypatch):
    """Count the time that a probe may take from when it has written so many files: a busy machine starts it late."""

    def hangs(folder, pattern, count):
        class Started(subprocess.Popen):
            def communicate(self, input=None, timeout=None):
                wait_for(lambda: len([file for file in folder.glob(pattern) if file.read_text()]) == count)
                return super().communicate(input, timeout)

        monkeypatch.setattr(subprocess, "Popen", Started)

    return hangs


class TestAsking:
    """Small programs in place of probes."""

    def test_the_last_line_is_the_answer(self):
        assert ask(["-c", "print('some noise'); print('[1, 2]')"]) == [1, 2]

    @pytest.mark.parametrize(
        ("program", "said"),
        [
            ("raise RuntimeError('no such peer')", "RuntimeError: no such peer"),
            ("import sys; sys.exit('out of luck')", "a probe ended with code 1: out of luck"),
            ("import os; os.kill(os.getpid(), 11)", "a probe was killed by SIGSEGV"),
            ("import signal, time; signal.alarm(1); time.sleep(30)", "a probe hung and ended itself"),
            ("print('not JSON')", "the probe ended without an answer"),
        ],
    )
    def test_a_failure_is_one_line(self, program, said):
        with pytest.raises(ProbeError, match=said):
            ask(["-c", program])

    def test_one_that_hangs_and_does_not_want_to_end_is_killed(self, tmp_path, hangs_once_written):
        file = tmp_path / "pid"
        program = (
            "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            f"open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
        )
        hangs_once_written(tmp_path, "pid", 1)
        with pytest.raises(ProbeError, match=r"no answer within 0\.5 s"):
            ask(["-c", program], seconds=0.5)
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)

    def test_a_launchers_variables_are_not_handed_on(self, monkeypatch):
        names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
        for name in names:
            monkeypatch.setenv(name, "7")
        monkeypatch.setenv("RANKING", "mine")
        assert set(os.environ) - set(environment()) == names


@pytest.mark.slow
class TestRealProcesses:
    def test_gloo_adds_up(self, monkeypatch):
        monkeypatch.setenv("LOCAL_RANK", "5")  # as if doctor itself had been launched
        done = call("doctor", "--only", "gloo")
        assert done.code == 0, done.err
        assert "started summed 1 MB at " in done.out
        assert ", 16 MB at " in done.out

    def test_a_network_that_is_not_there_is_caught(self, monkeypatch):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch0")
        outcome = checks.gloo()
        assert outcome.status is Health.BROKEN
        assert "torchrun could not start two processes that add up: " in outcome.said
        assert "nonesuch0" in outcome.said

    def test_ranks_that_hang_end_with_their_launcher(self, tmp_path, hangs_once_written):
        """The launcher's own children are in sessions of their own; they are gone as well."""
        probe = tmp_path / "probe.py"
        probe.write_text(
            "import os, pathlib, time; rank = os.environ['RANK']\n"
            f"pathlib.Path({str(tmp_path)!r}, rank + '.pid').write_text(str(os.getpid())); time.sleep(60)"
        )
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(probe)]
        hangs_once_written(tmp_path, "*.pid", 2)
        with pytest.raises(ProbeError, match=r"no answer within 0\.5 s"):
            ask(launch, seconds=0.5)
        files = list(tmp_path.glob("*.pid"))
        assert len(files) == 2
        assert not any(Path("/proc", file.read_text()).exists() for file in files)


def answers(answer: Any) -> Any:
    def asked(*arguments):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return asked


SUMS = {"world": 2, "latency": 1e-5, "sums": {"1": 1e-3, "16": 1e-3}}


def test_a_launcher_that_starts_too_few_is_caught():
    outcome = checks.gloo(answers({**SUMS, "world": 1}))
    assert outcome.status is Health.BROKEN
    assert "started 1" in outcome.said


GPU = {"name": "GPU", "error": 1e-7, "bfloat16": True, "bfloat16_error": 3e-3, "free": 8e10, "total": 9e10}


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
    outcome = checks.cuda(lambda: 2, answers([GPU, {**GPU, **change}]))
    assert outcome.status is status
    assert "cuda:1 GPU" in outcome.said
    assert bool(outcome.remedy) == (status is Health.WARNING)


def test_a_gpu_that_gets_lost_on_the_way_to_a_process_is_caught():
    outcome = checks.cuda(lambda: 2, answers([GPU]))
    assert outcome.status is Health.BROKEN
    assert "counts 2 GPUs here and 1" in outcome.said


def test_without_a_gpu_there_is_nothing_to_mend_unless_there_is_a_driver(tmp_path):
    for outcome in (checks.cuda(lambda: 0, driver=tmp_path / "none"), checks.nccl(lambda: 0)):
        assert (outcome.status, outcome.remedy) == (Health.ABSENT, "")
    outcome = checks.cuda(lambda: 0, driver=tmp_path)
    assert outcome.status is Health.WARNING
    assert "build of torch for CUDA" in outcome.remedy


def test_nccl_without_its_library_is_missing_and_a_failure_is_broken(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert checks.nccl(lambda: 1).status is Health.MISSING
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert checks.nccl(lambda: 2, answers(ProbeError("unhandled system error"))).status is Health.BROKEN
    outcome = checks.nccl(lambda: 2, answers(SUMS))
    assert outcome.status is Health.OK
    assert outcome.said.startswith("processes, one for each GPU (2), summed 1 MB at 1,000 MB/s")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_broken():
    """A machine that counts a GPU which does not answer."""
    assert checks.cuda(lambda: 1).status is Health.BROKEN
    assert checks.nccl(lambda: 1).status in (Health.BROKEN, Health.MISSING)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_the_gpus_work_here():
    assert checks.cuda().status is Health.OK
    assert checks.nccl().status is Health.OK


def test_probes_need_torch_alone():
    program = f"import runpy, sys; runpy.run_path({probes.__file__!r}); assert 'stobatch' not in sys.modules; print(1)"
    assert ask(["-c", program]) == 1
