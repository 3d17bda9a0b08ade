"""A process that has imported everything and forks a fresh `stobatch` for every request, in milliseconds.

Each request is one JSON line: the arguments of the command line, and how the child is to be disturbed. The reply says
how the child ended: an exit code, or minus the signal that killed it. Forking is safe here because this process never
runs a tensor operation on more than one thread.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any


def disturb(request: dict[str, Any]) -> None:
    """Arrange the accident in the child."""
    if (limit := request.get("largest_file")) is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    count, real = 0, os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal count
        if count == request.get("kill_at_fsync"):
            if request.get("torn"):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        if count == request.get("full_at_fsync"):
            count += 1
            raise OSError(28, "No space left on device")
        count += 1
        real(descriptor)

    os.fsync = fsync
    if (tile := request.get("tile")) is not None:
        from stobatch.evaluation import tables

        tables.CPU_TILE = tile
    if (file := request.get("releases")) is not None:
        from support.releases import keep_releases

        keep_releases(file)
    if (told := request.get("signal_in")) is not None:
        signal_in(*told)


def signal_in(place: str, call: int, number: int, file: str) -> None:
    """A signal to itself as a function is called for the n-th time; the file tells when, on the monotonic clock."""
    module, _, name = place.partition(":")
    holder: Any = importlib.import_module(module)
    *parts, last = name.split(".")
    for part in parts:
        holder = getattr(holder, part)
    real, calls = getattr(holder, last), [0]

    @functools.wraps(real)
    def called(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            with open(file, "w") as out:
                out.write(str(time.monotonic()))
            os.kill(os.getpid(), number)
        return real(*given, **named)

    setattr(holder, last, called)


def child(request: dict[str, Any]) -> int:
    from stobatch.cli.app import main

    for stream, number in (("out", 1), ("err", 2)):
        file = os.open(request[stream], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
    disturb(request)
    sys.argv = ["stobatch", *request["arguments"]]
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    return 0


def ended(process: int, request: dict[str, Any]) -> int:
    """Wait for the child, after sending it what the request asks for."""
    deadline = time.monotonic() + 60
    at = request.get("signal_after")
    started, sent = time.monotonic(), False
    while time.monotonic() < deadline:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if at is not None and not sent and time.monotonic() - started >= at:
            os.kill(process, request["signal"])
            sent = True
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return -999


def serve() -> None:
    sys.path.append(str(Path(__file__).parents[1]))
    from support.prepared_server import plan_before, prepare

    prepare("pyarrow.parquet")
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        plan_before(request["arguments"])
        process = os.fork()
        if process == 0:
            os._exit(child(request))
        print(json.dumps(ended(process, request)), flush=True)


if __name__ == "__main__":
    serve()
