"""A real Flower deployment on this machine alone: one SuperLink, a SuperNode for each party, all on 127.0.0.1.

It is what several machines would run, with the same commands; Flower starts a process for every message, so a round
takes seconds. Nothing leaves the machine: telemetry, update checks and the installation of packages are switched off.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from stobatch.errors import SettingError
from stobatch.federated.server import Federation, FederationError
from stobatch.files import open_private
from stobatch.interrupts import finish_first
from stobatch.loading import TrainedModel, load

HERE = "127.0.0.1"
LOG = "flower.log"
PATIENCE = 60.0
"""Seconds for a process to listen."""

_PROJECT = """\
[project]
name = "stobatch-federation"
version = "0.1.0"
description = "Parties train one model with differential privacy"
license = "MIT"
dependencies = []

[tool.flwr.app]
publisher = "stobatch"

[tool.flwr.app.components]
serverapp = "stobatch_federation:server"
clientapp = "stobatch_federation:client"

[tool.flwr.app.config]
run = ""
"""
_MODULE = "from stobatch.federated.flower import client, server\n\n__all__ = ['client', 'server']\n"


def write_app(folder: Path) -> Path:
    """The Flower app to hand to `flwr run`: two lines, because all code is installed with the parties already."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(_PROJECT)
    (folder / "stobatch_federation.py").write_text(_MODULE)
    return folder


def quiet_environment(home: Path) -> dict[str, str]:
    """For Flower's processes: no telemetry, no update checks, no packages from elsewhere, settings of their own."""
    binaries = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }


def deployed(federation: Federation, directories: Mapping[str, Path], *, quiet: bool = True) -> TrainedModel:
    """Run a federation through Flower's own processes; each party's log stays in that party's directory."""
    if not Path(sys.executable).with_name("flower-superlink").exists():
        raise SettingError("Flower is not installed.", remedy="Install it: pip install 'stobatch[flower]'.")
    with tempfile.TemporaryDirectory(prefix="stobatch-flower-") as folder, ExitStack() as running:
        home = Path(folder)
        environment, server = quiet_environment(home), f"{HERE}:{_free_port()}"
        (home / "config.toml").write_text(f'[superlink.loopback]\naddress = "{server}"\ninsecure = true\n')
        log = federation.run.path / LOG
        host, port = server.split(":")
        link = ("flower-superlink", "--insecure", "--host", host, "--port", port)
        running.enter_context(_process((*link, "--disable-runtime-dependency-installation"), log, environment))
        _wait_for(int(port), log)
        for path in directories.values():
            own = ("--host", HERE, "--port", str(_free_port()), "--node-config", f"party={json.dumps(str(path))}")
            node = ("flower-supernode", "--insecure", "--superlink", server, *own)
            running.enter_context(_process(node, path / LOG, environment))
        where = f"run={json.dumps(str(federation.run.path.resolve()))}"
        command = ("flwr", "run", str(write_app(home / "app")), "loopback", "--stream", "--run-config", where)
        with _appended(log) as out:
            subprocess.run(command, env=environment, stdout=out, stderr=out, check=False)
    if not federation.run.is_trained:
        raise FederationError(
            f"the federation ended at step {Federation.open(federation.run.path).step}.",
            why=_last_words(log),
            remedy=f"See {log}, then continue with --resume.",
        )
    return load(federation.run.path, threads=federation.terms.machine.threads)


def _last_words(log: Path) -> str:
    """The line of a log that names the error, if one does."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Error:" in line]
    return lines[-1].partition("Error:")[2].strip() if lines else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int, log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((HERE, port), timeout=1):
            return
        time.sleep(0.1)
    raise FederationError(f"the SuperLink does not listen after {PATIENCE:g} s.", remedy=f"See {log}.")


def _appended(log: Path) -> IO[bytes]:
    """For the owner alone: a party's log tells when it answered, and how long it took."""
    return os.fdopen(open_private(log, os.O_WRONLY | os.O_APPEND), "ab")


@contextmanager
def _process(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """A process and all that it starts, for as long as the block runs."""
    with _appended(log) as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        yield
    finally:
        # A stop waits for this: what is left behind would go on answering.
        with finish_first():
            for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(seconds)
