"""A real Flower deployment on this machine alone: one SuperLink, a SuperNode for each party, all on 127.0.0.1.

It is what several machines would run, with the same commands: encrypted, the server known by its certificate, each
party by its key. Flower starts a process for every message, so a round takes seconds. Nothing leaves the machine:
telemetry, update checks and the installation of packages are switched off.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stobatch.errors import SettingError
from stobatch.federated.server import Federation, FederationError
from stobatch.files import PRIVATE, open_private
from stobatch.interrupts import finish_first
from stobatch.loading import TrainedModel, load

HERE = "127.0.0.1"
LOG = "flower.log"
CONNECTION = "ours"
NODE_KEY = Path(PRIVATE) / "node.key"
"""Of a party: it says who its messages are from, and nothing about its records."""
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
nodes = ""
"""
_MODULE = "from stobatch.federated.flower import client, server\n\n__all__ = ['client', 'server']\n"


def write_app(folder: Path) -> Path:
    """Write the Flower app for `flwr run`: two lines, because all code is installed with the parties already."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(_PROJECT)
    (folder / "stobatch_federation.py").write_text(_MODULE)
    return folder


def quiet_environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: no telemetry, no update checks, no packages from elsewhere."""
    binaries = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }


def require_flower() -> None:
    """Raise if Flower's programs are not installed next to this Python."""
    if not Path(sys.executable).with_name("flower-superlink").exists():
        raise SettingError("Flower is not installed.", remedy="Install it: pip install 'stobatch[flower]'.")


def through_flower(federation: Federation, directories: Mapping[str, Path], *, quiet: bool = True) -> TrainedModel:
    """Run a federation through Flower's own processes; each party's log stays in that party's directory."""
    require_flower()
    with tempfile.TemporaryDirectory(prefix="stobatch-flower-") as folder, ExitStack() as running:
        home = Path(folder)
        environment, port, log = quiet_environment(home), _free_port(), federation.run.path / LOG
        certificates = make_certificates(home, HERE)
        write_connection(home, f"{HERE}:{port}", certificates.authority)
        running.enter_context(_running(superlink_command(HERE, port, certificates), log, environment))
        _wait_for(port, log)
        nodes = {}
        for name, path in directories.items():
            key = path / NODE_KEY
            nodes[name] = register(make_party_key(key), environment)
            node = supernode_command(f"{HERE}:{port}", _free_port(), certificates.authority, key, path)
            running.enter_context(_running(node, path / LOG, environment))
        settings = f"run={json.dumps(str(federation.run.path.resolve()))} nodes={json.dumps(nodes_setting(nodes))}"
        command = ("flwr", "run", str(write_app(home / "app")), CONNECTION, "--stream", "--run-config", settings)
        with _open_log(log) as out:
            subprocess.run(command, env=environment, stdout=out, stderr=out, check=False)
    if not federation.run.is_trained:
        raise FederationError(
            f"the federation ended at step {Federation.open(federation.run.path).step}.",
            why=_last_lines(log),
            remedy=f"See {log}, then continue with --resume.",
        )
    return load(federation.run.path, threads=federation.terms.machine.threads)


def superlink_command(host: str, port: int, certificates: TlsCertificates) -> tuple[str, ...]:
    """Return the server's process: encrypted, and for nodes only whose key is registered."""
    return (
        *("flower-superlink", "--host", host, "--port", str(port), "--enable-supernode-auth"),
        *("--ssl-ca-certfile", str(certificates.authority), "--ssl-certfile", str(certificates.certificate)),
        *("--ssl-keyfile", str(certificates.key), "--disable-runtime-dependency-installation"),
    )


def supernode_command(server: str, port: int, authority: Path, key: Path, party: Path) -> tuple[str, ...]:
    """Return a party's process: it believes the authority alone, and signs with its own key."""
    return (
        *("flower-supernode", "--superlink", server, "--root-certificates", str(authority)),
        *("--auth-supernode-private-key", str(key), "--host", HERE, "--port", str(port)),
        *("--node-config", f"party={json.dumps(str(party))}"),
    )


def write_connection(home: Path, server: str, authority: Path) -> None:
    """Write how `flwr` finds the server, into the settings that `quiet_environment` gives it."""
    text = (
        f"[superlink.{CONNECTION}]\naddress = {json.dumps(server)}\nroot-certificates = {json.dumps(str(authority))}\n"
    )
    (home / "config.toml").write_text(text)


def register(public_key: Path, environment: Mapping[str, str]) -> int:
    """Tell the server which key is whose; returns the node that this key alone can be."""
    command = ("flwr", "supernode", "register", str(public_key), CONNECTION, "--format", "json")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        return int(json.loads(done.stdout)["node-id"])
    except (ValueError, KeyError, TypeError):
        raise FederationError(
            f"{public_key} cannot be registered.", why=" ".join(done.stdout.split())[:200], remedy="Make a new one."
        ) from None


def nodes_setting(nodes: Mapping[str, int]) -> str:
    """Return which node is whose, as the server app reads it."""
    return " ".join(f"{name}={node}" for name, node in nodes.items())


def _last_lines(log: Path) -> str:
    """Return the line of a log that names the error, if one does."""
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


def _open_log(log: Path) -> IO[bytes]:
    """Open a log for the owner alone: a party's log tells when it answered, and how long it took."""
    return os.fdopen(open_private(log, os.O_WRONLY | os.O_APPEND), "ab")


@contextmanager
def _running(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Run a process and all that it starts, for as long as the block runs."""
    with _open_log(log) as out:
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


DAYS = "30"
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-384", "-nodes")


@dataclass(frozen=True)
class TlsCertificates:
    """A server's certificate and key, and the authority that vouches for it; parties need the authority's alone."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path, host: str) -> TlsCertificates:
    """Make an authority for one federation and a certificate for the address of its server."""
    authority, authority_key = folder / "ca.pem", folder / "ca.key"
    certificate, key, request, names = (folder / f"server.{end}" for end in ("pem", "key", "csr", "names"))
    kind = "IP" if host.replace(".", "").isdecimal() else "DNS"
    names.write_text(f"subjectAltName={kind}:{host}\n")
    _run("openssl", "req", "-x509", *_CURVE, "-days", DAYS, "-subj", "/CN=our federation",
         "-keyout", str(authority_key), "-out", str(authority))  # fmt: skip
    _run("openssl", "req", *_CURVE, "-subj", f"/CN={host}", "-keyout", str(key), "-out", str(request))
    _run("openssl", "x509", "-req", "-in", str(request), "-CA", str(authority), "-CAkey", str(authority_key),
         "-CAcreateserial", "-days", DAYS, "-extfile", str(names), "-out", str(certificate))  # fmt: skip
    return TlsCertificates(authority, certificate, key)


def make_party_key(path: Path) -> Path:
    """Make a party's key where there is none yet; returns the public one, which the server registers."""
    if not path.exists():
        _run("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", "", "-f", str(path))
    return path.with_name(f"{path.name}.pub")


def _run(program: str, *arguments: str) -> None:
    executable = shutil.which(program)
    if executable is None:
        raise SettingError(f"{program} is not installed.", remedy="Install OpenSSL and OpenSSH, for keys.")
    done = subprocess.run([executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise SettingError(f"{program} failed: {last}", remedy="See that the folder can be written to.")
