"""A process that has imported everything and forks the processes of a training as torchrun would start them.

Each request is one JSON line: for every process its arguments, its environment and its accident. The reply says how
each ended, as an exit code or minus the signal that killed it, and after how many seconds. Forking is safe here because
this process never runs a tensor operation on more than one thread. What torchrun itself does is tried with torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def child(process: dict[str, Any]) -> int:
    for stream, number in (("out", 1), ("err", 2)):
        file = os.open(process[stream], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
    os.environ.update(process["environment"])
    sys.argv = ["stobatch", *process["arguments"]]
    try:
        from stobatch.cli.app import main
        from support.accidents import arrange

        arrange(process["accident"])
        main()
    except SystemExit as left:
        return int(left.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def ended(started: list[int], patience_s: float, grace_s: float) -> list[tuple[int, float]]:
    """How each process ended. Whoever is left when the time is over is killed, and counts as -999."""
    begin, codes = time.monotonic(), dict[int, tuple[int, float]]()

    def time_left() -> bool:
        now = time.monotonic() - begin
        return now < patience_s and all(now < at + grace_s for _, at in codes.values())

    while len(codes) < len(started) and time_left():
        for process in [process for process in started if process not in codes]:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                codes[process] = os.waitstatus_to_exitcode(status), time.monotonic() - begin
        time.sleep(0.005)
    for process in [process for process in started if process not in codes]:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        codes[process] = -999, time.monotonic() - begin
    return [codes[process] for process in started]


def serve() -> None:
    sys.path.append(str(Path(__file__).parents[1]))
    from support.prepared_server import plan_before, prepare

    prepare("torch.distributed.device_mesh", "stobatch.training.engines.distributed")
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started = []
        for process in request["processes"]:
            plan_before(process["arguments"])
        for process in request["processes"]:
            number = os.fork()
            if number == 0:
                os._exit(child(process))
            started.append(number)
        print(json.dumps(ended(started, request["patience_s"], request["grace_s"])), flush=True)


if __name__ == "__main__":
    serve()
