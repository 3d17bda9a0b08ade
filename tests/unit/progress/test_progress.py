"""Progress without a terminal: a line now and then, with what is done, how fast, and how long it still takes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from PIL import Image

from stobatch import progress as module
from stobatch.config import DataConfig
from stobatch.data import load
from stobatch.progress import Progress, elapsed, progress, running


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module.time, "monotonic", made)
    monkeypatch.setattr(module._Lines.__init__, "__defaults__", (made,))
    return made


def test_a_line_every_thirty_seconds_and_none_before(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("train", 100) as advance:
        for _ in range(29):
            clock.now += 1
            advance(1, note="accuracy 0.9")
        assert capsys.readouterr().err == ""
        clock.now += 1
        advance()
        assert capsys.readouterr().err == "train: 30 of 100, 1 a second, 70 s left accuracy 0.9\n"
        for _ in range(30):
            clock.now += 1
            advance()
        assert capsys.readouterr().err.count("\n") == 1
    assert capsys.readouterr().err == "train: 60 of 100 in 60 s\n"


def test_slow_steps_are_told_by_their_length_and_a_resumed_start_does_not_count(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("train", 100, start=40) as advance:
        clock.now += 60
        advance(2)
    assert capsys.readouterr().err == "train: 42 of 100, 30 s each, 29 min left\ntrain: 42 of 100 in 60 s\n"


def test_nobody_who_does_not_want_it_gets_it(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("train", 100, quiet=True) as advance:
        clock.now += 1000
        advance(50)
    assert capsys.readouterr().err == ""


def test_work_deep_inside_tells_its_own_size(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("read data", 1):
        running().expect(4)
        clock.now += 40
        running()(2)
    assert capsys.readouterr().err == "read data: 2 of 4, 20 s each, 40 s left\nread data: 2 of 4 in 40 s\n"
    running()(1)  # and outside of a block nothing happens


def test_a_folder_of_images_advances_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("L", (4, 4), len(part + name)).save(tmp_path / part / name / "0.png")
    told: list[object] = []

    class Heard(Progress):
        def advance(self, count: float, note: str | None) -> None:
            told.append(count)

        def expect(self, total: int) -> None:
            told.append(f"of {total}")

    token = module._running.set(Heard())
    try:
        load(DataConfig(name="image_folder"), root=tmp_path)
    finally:
        module._running.reset(token)
    assert told == ["of 2", 1, 1, "of 2", 1, 1]


def test_a_secret_size_leaves_the_time_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.05)
    with elapsed("searching"):
        running()(1)
        running().expect(7)
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert set(lines) == {"searching, 0 s"}
    with elapsed("searching", quiet=True):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""
