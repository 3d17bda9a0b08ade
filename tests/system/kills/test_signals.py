"""A stop at any moment, also in the last part of a table: 130, one line, at once, and the command can be continued."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stobatch.interrupts import Interrupted, finish_first, obey_stops

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "reliability"))

import signals
from common import TINY


@pytest.fixture(scope="module")
def measured(stobatch_process: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained, certified and evaluated. Read only."""
    out = tmp_path_factory.mktemp("measured") / "run"
    for words in (["train", "--out", out, *TINY], ["certify", out], ["evaluate", out]):
        ended = stobatch_process(*words, "--json")
        assert ended.code == 0, ended.err
    return out


SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Both go through one handler, so moments meet them in turn; the campaign of benchmarks/reliability tries both.
CASES = [(moment, SIGNALS[place % 2]) for place, moment in enumerate(signals.MOMENTS)]


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "number"), CASES)
def test_a_stop_is_obeyed(
    stobatch_process: Any, measured: Path, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    found = signals.tried(stobatch_process, tmp_path, measured, moment, number)
    assert found["obeyed"], found


def test_each_signal_meets_every_verb_that_can_be_continued() -> None:
    met = {(signals.MOMENTS[moment][0][0], number) for moment, number in CASES}
    assert met >= {(verb, number) for verb in ("train", "certify", "audit", "federate") for number in SIGNALS}


def stopped(work: Callable[[], object]) -> bool:
    """Whether a stop leaves the block that the command line is in."""
    try:
        with obey_stops():
            work()
    except Interrupted:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_raises_at_once_and_is_gone_afterwards(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    assert stopped(lambda: signal.raise_signal(number))
    assert signal.getsignal(number) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_stop_that_was_swallowed_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception cannot leave a destructor; Python prints it and goes on."""
    monkeypatch.setattr("stobatch.interrupts.AGAIN_S", 0.05)

    def swallow() -> None:
        with suppress(Interrupted):
            signal.raise_signal(signal.SIGTERM)
        threading.Event().wait(10)

    assert stopped(swallow)


def test_what_is_to_be_finished_is_finished() -> None:
    done = []

    def work() -> None:
        with finish_first() as stop:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            done.append(stop.asked)
        done.append("after it")

    assert stopped(work)
    assert done == [signal.SIGTERM]


def test_a_second_ctrl_c_does_not_wait() -> None:
    done = []

    def work() -> None:
        with finish_first():
            signal.raise_signal(signal.SIGINT)
            done.append("still at work")
            signal.raise_signal(signal.SIGINT)
            done.append("still at work")

    assert stopped(work)
    assert done == ["still at work"]


def test_work_beyond_its_grace_is_left() -> None:
    done = []

    def work() -> None:
        with finish_first(grace_s=0.05):
            signal.raise_signal(signal.SIGTERM)
            threading.Event().wait(10)
            done.append("to its end")

    assert stopped(work)
    assert done == []


def test_a_library_leaves_alarms_alone() -> None:
    """Outside of the command line a grace would take away the alarm of whoever uses the library."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with finish_first(grace_s=0.01) as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop.asked
            assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_except_exception_catches_a_stop() -> None:
    assert not issubclass(Interrupted, Exception)
