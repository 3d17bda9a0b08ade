"""An export that is killed or has no room left: no folder of its name is there unless it is whole."""

from __future__ import annotations

import hashlib
import os
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.command_line import call

# At every flush: two files, their folder, the folder around it.


@pytest.mark.slow
def test_a_kill_leaves_no_folder_of_the_name(stobatch_process: Any, undisturbed: Path, tmp_path: Path) -> None:
    command = ("export", undisturbed, "--to", "pt2", "--out")
    for number in range(3):
        out = tmp_path / f"killed-{number}"
        assert stobatch_process(*command, out, kill_at_fsync=number).code < 0
        assert not out.exists()
    whole = tmp_path / "killed-3"
    assert stobatch_process(*command, whole, kill_at_fsync=3).code < 0
    assert {file.name for file in whole.iterdir()} == {"model.pt2", "README.md"}
    assert hashlib.sha256((whole / "model.pt2").read_bytes()).hexdigest() in (whole / "README.md").read_text()
    assert call(*command, tmp_path / "killed-0").code == 0, "and the name is free again"


@pytest.mark.parametrize("number", range(3))
def test_nor_does_a_full_disk(undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    flushes, real = count(), os.fsync

    def fsync(descriptor: int) -> None:
        if next(flushes) == number:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert "No space left on device" in call("export", undisturbed, "--to", "pt2", "--out", tmp_path / "out").refusal()
    assert not list(tmp_path.iterdir())
