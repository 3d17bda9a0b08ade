"""Starting trainings of several processes, and comparing what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import stobatch
from support import checkpoints, tiny

TIMEOUT_S = 90
"""After which a process gives the others up for lost: long, so that a busy machine is not taken for a fault."""
COMMON: dict[str, Any] = {
    "data.train_limit": 2000,
    "data.test_limit": 100,
    "training.monitor_every": 2,
    "training.monitor_examples": 100,
    "machine.checkpoint_every": 2,
    "machine.threads": 1,
    "machine.timeout_s": TIMEOUT_S,
    "seed": 4,
}
SOUND: dict[str, Any] = {
    **COMMON,
    "method.epsilon": 3.0,
    "method.delta": 1e-4,
    "method.expected_batch_size": 400,
    "method.momentum": 0.5,
    "model.architecture": "squash 3, conv 4 7/3, relu, linear",
    "training.steps": 6,
}
PUBLISHED: dict[str, Any] = {
    **COMMON,
    "method.batch_size": 300,
    "method.train_attack_steps": 2,
    "method.total_epsilon": 200.0,
    "model.architecture": "small_cnn",
    "model.last_hidden_size": 8,
    "training.steps": 4,
}
VANILLA: dict[str, Any] = {key: value for key, value in PUBLISHED.items() if key != "method.total_epsilon"}
METHODS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "sound": (["--recipe", "sound.mnist"], SOUND),
    "published": (["--recipe", "paper.mnist"], PUBLISHED),
    "vanilla": (["--config", str(Path(__file__).with_name("vanilla.toml"))], VANILLA),
}


def arguments(kind: str = "sound", **changes: Any) -> list[str]:
    """Of the command line; in the changes two underscores stand for a dot."""
    base, settings = METHODS[kind]
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    return [*base, *as_arguments(settings | changed)]


def as_arguments(settings: dict[str, Any]) -> list[str]:
    """A public seed has an option of its own, and no seed has none."""
    rest = {key: value for key, value in settings.items() if key != "seed"}
    seed = [] if settings.get("seed") is None else ["--seed", str(settings["seed"])]
    return [*tiny.as_arguments(rest), *seed]


@dataclass(frozen=True)
class Ended:
    """One process."""

    code: int
    out: str
    err: str
    seconds: float


@dataclass(frozen=True)
class Group:
    """All processes of a training, in the order of their ranks."""

    processes: tuple[Ended, ...]

    @property
    def codes(self) -> list[int]:
        return [process.code for process in self.processes]

    @property
    def err(self) -> str:
        return "".join(process.err for process in self.processes)

    @property
    def said(self) -> list[str]:
        """What stobatch tells the user on standard error, over all processes."""
        return said(self.err)

    @property
    def seconds(self) -> float:
        return max(process.seconds for process in self.processes)


def said(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("stobatch: ")]


class Server:
    """Ask the group server for the processes of one training.

    This process keeps their store, as the agent of torchrun does, so that it outlives any of them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        script = Path(__file__).with_name("group_server.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __call__(
        self,
        processes: int,
        *arguments: object,
        each: Mapping[int, Sequence[object]] | None = None,
        accidents: Mapping[int, Mapping[str, Any]] | None = None,
        everywhere: Mapping[str, Any] | None = None,
        patience_s: float = 120,
        grace_s: float = 120,
    ) -> Group:
        """`stobatch` with these arguments in so many processes, or in one without torchrun if there are 0.

        `each` are further arguments of some ranks; `accidents` happen to some, and `everywhere` to all. Processes are
        waited for so long, and so long after the first of them has ended of itself.
        """
        # A new store for each start, as torchrun has it.
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        asked = []
        for rank in range(max(processes, 1)):
            own = [str(argument) for argument in (*arguments, *(each or {}).get(rank, ()))]
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            asked.append(
                {
                    "arguments": own,
                    "environment": environment if processes else {},
                    "accident": {**(everywhere or {}), **(accidents or {}).get(rank, {})},
                    **{stream: str(self.folder / f"{stream}-{rank}") for stream in ("out", "err")},
                }
            )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"processes": asked, "patience_s": patience_s, "grace_s": grace_s}) + "\n")
        self.process.stdin.flush()
        ends = json.loads(self._line())
        del store
        texts = [[Path(one[stream]).read_text() for stream in ("out", "err")] for one in asked]
        return Group(tuple(Ended(code, *text, seconds) for (code, seconds), text in zip(ends, texts, strict=True)))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


# The real torchrun.

AGENT_S = 240
"""Within which an agent has to end: far more than it takes, because every process of it imports everything."""


def torchrun_command(
    arguments: Sequence[object], *, processes: int, options: Sequence[str] = ("--standalone",)
) -> list[str]:
    script = Path(__file__).with_name("under_torchrun.py")
    return [
        *(sys.executable, "-m", "torch.distributed.run", *options, f"--nproc-per-node={processes}"),
        *(str(script), *map(str, arguments)),
    ]


@contextmanager
def torchrun(
    arguments: Sequence[object],
    folder: Path,
    *,
    processes: int = 2,
    options: Sequence[str] = ("--standalone",),
    accidents: Mapping[str, Mapping[str, Any]] | None = None,
    name: str = "agent",
) -> Iterator[subprocess.Popen[str]]:
    """An agent of torchrun, of which nothing is left in the end.

    Accidents happen to "rank/attempt". Its output is in `folder / name.out` and `.err`.
    """
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "STARTED_FOR": str(folder),
        "ACCIDENTS": json.dumps(accidents or {}),
    }
    command = torchrun_command(arguments, processes=processes, options=options)
    with (folder / f"{name}.out").open("w") as out, (folder / f"{name}.err").open("w") as err:
        agent = subprocess.Popen(command, stdout=out, stderr=err, text=True, env=environment)
        try:
            yield agent
        finally:
            agent.kill()
            agent.wait(timeout=30)
            kill_all(folder)


def started_for(folder: Path) -> list[int]:
    """The agent of this folder, its workers and whatever those have started, as far as they are running.

    Workers have sessions of their own, so what tells them is the environment that all inherit.
    """
    found, mark = [], f"STARTED_FOR={folder}\0".encode()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                environment = (process / "environ").read_bytes()
            except OSError:
                continue
            if mark in environment + b"\0":
                found.append(int(process.name))
    return found


def kill_all(folder: Path) -> None:
    for process in started_for(folder):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def finished(agent: subprocess.Popen[str], folder: Path, *, within_s: float, name: str = "agent") -> Ended:
    """Wait for an agent, and see that it leaves no process behind."""
    started = time.monotonic()
    code = agent.wait(timeout=within_s)
    left = started_for(folder)
    assert not left, f"processes {left} were left behind"
    texts = [(folder / f"{name}.{stream}").read_text() for stream in ("out", "err")]
    return Ended(code, *texts, time.monotonic() - started)


def wait_for(condition: Any, *, within_s: float = AGENT_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


# Comparing.


def differences(one: Path, other: Path) -> list[str]:
    """Names of what differs in a bit: the last checkpoint (parameters, optimiser, history), the model, the plan."""
    found = []
    for read in (checkpoints.tensors, lambda run: load_file(run / "model.safetensors")):
        ours, theirs = read(one), read(other)
        found += [*(ours.keys() ^ theirs.keys())]
        found += [name for name in ours.keys() & theirs.keys() if not same_tensor(ours[name], theirs[name])]
    if checkpoints.last_step(one) != checkpoints.last_step(other):
        found.append("step")
    if (one / "plan.json").read_bytes() != (other / "plan.json").read_bytes():
        found.append("plan")
    histories = [json.loads((run / "training.json").read_text())["history"] for run in (one, other)]
    if histories[0] != histories[1]:
        found.append("history in training.json")
    return sorted(found)


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def same_guarantee(one: Path, other: Path) -> bool:
    return stobatch.load(one).guarantee == stobatch.load(other).guarantee


def written(folder: Path) -> list[str]:
    """Every file under a folder, of a run that was to write none."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*")) if folder.exists() else []
