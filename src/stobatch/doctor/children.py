"""Probes in processes of their own: what may crash, hang or need several processes happens where it harms nobody.

A probe is a script run by its path. It needs torch alone, so it starts in half the time that the whole package takes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent
RANKS, GPUS = HERE / "probe_ranks.py", HERE / "probe_gpus.py"

LIMIT = 45
"""Seconds after which a probe ends itself: a cold start from a slow disk takes a good part of it."""

Command = Sequence[str]


class ProbeError(Exception):
    """A probe crashed, hung or said nothing that could be read."""


def python(*arguments: object) -> list[str]:
    """A command for this very interpreter."""
    return [sys.executable, *map(str, arguments)]


def environment() -> dict[str, str]:
    """This process's own, without what a launcher may have put there, and one thread for each probe."""
    launcher = re.compile(
        r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|TORCH_NCCL_.*"
    )
    kept = {name: value for name, value in os.environ.items() if not launcher.fullmatch(name)}
    # Other files of this folder must not hide modules of the same name.
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def ask(commands: Sequence[Command], *, seconds: float = LIMIT + 5, changes: Mapping[str, str] | None = None) -> Any:
    """Run all commands side by side and give back the JSON document that the first one printed as its last line.

    The first to fail speaks for all, and the others are ended at once. Nothing is left running.
    """
    deadline = time.monotonic() + seconds
    with ExitStack() as stack:
        children = []
        for command in commands:
            out, err = (stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(2))
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment() | dict(changes or {})
            )  # fmt: skip
            stack.callback(_end, process)
            children.append((process, out, err))
        while any(process.poll() is None for process, _, _ in children):
            for process, _, err in children:
                if process.poll():
                    raise ProbeError(_reason(process.returncode, _read(err)))
            if time.monotonic() > deadline:
                raise ProbeError(f"no answer within {seconds:g} s")
            time.sleep(0.02)
        for process, _, err in children:
            if process.returncode:
                raise ProbeError(_reason(process.returncode, _read(err)))
        lines = _read(children[0][1]).splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        raise ProbeError("the probe ended without an answer") from None


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask first: a launcher takes its own children along, which live in sessions of their own."""
    for stop in (process.terminate, process.kill):
        if process.poll() is None:
            stop()
            with suppress(subprocess.TimeoutExpired):
                process.wait(3)


_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", re.M)


def _reason(code: int, errors: str) -> str:
    """One line: the exception if there was one, else the last thing said, else how the process ended."""
    if named := _ERROR.findall(errors):
        return str(named[0])
    if code == -signal.SIGALRM:
        return "a probe hung and ended itself"
    ended = f"a probe was killed by {signal.Signals(-code).name}" if code < 0 else f"a probe ended with code {code}"
    last = [line for line in errors.splitlines() if line.strip()][-1:]
    return ": ".join([ended, *last])
