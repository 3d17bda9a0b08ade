"""The process that serves: its address, its token, TLS, how it begins and how it ends."""

from __future__ import annotations

import gc
import ipaddress
import json
import signal
import socket
import threading
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stobatch.errors import RunError, SettingError
from stobatch.interrupts import NUMBERS
from stobatch.loading import TrainedModel
from stobatch.serving.application import CONNECTION, Application, Limits, Service
from stobatch.serving.batching import ServedModel

SHORTEST_TOKEN = 16
HEAD_BYTES = 2**15
"""Of a request's first lines."""
HEAD_S = 10.0
"""In which they have to have arrived."""
KEEP_S = 30
"""For which a connection may stand idle."""
DRAIN_S = 30
"""For requests under way once a stop was asked for."""
CONNECTIONS = 1024


def serve(models: Mapping[str, TrainedModel], *, on_start: Callable[[str], object] = print, **options: Any) -> int:
    """Serve models by name until SIGTERM or Ctrl-C, which finish what was taken on; `on_start` hears the address.

    Return how many requests were cut off because they took longer than a stop waits. Options are those of
    `serving.Server`.
    """
    server = Server(models, **options)
    # What was loaded stays. Looking through all of it for garbage took 0.2 s, and everybody waited.
    gc.collect()
    gc.freeze()
    try:
        on_start(server.address)
        server.run()
    finally:
        gc.unfreeze()
    return server.service.cut_off


class Server:
    """Models behind an address.

    Only this machine is served unless there is a token: the text of a file, which clients send as
    `Authorization: Bearer`. A run that is void or refuted is served with `allow_void` alone, and every answer says so.
    """

    def __init__(
        self,
        models: Mapping[str, TrainedModel],
        *,
        host: str = "127.0.0.1",
        port: int = 8080,
        token_file: str | Path | None = None,
        tls_certificate: str | Path | None = None,
        tls_key: str | Path | None = None,
        limits: Limits | None = None,
        allow_void: bool = False,
    ) -> None:
        token = None if token_file is None else _read_token(Path(token_file))
        _require_token(host, token)
        if (tls_certificate is None) != (tls_key is None):
            raise SettingError("TLS needs a certificate and its key.", remedy="Give both files, or neither.")
        served = {name: ServedModel(_require_name(name), model) for name, model in models.items()}
        for model in served.values():
            _require_unbroken(model, allow_void)
        tls = tls_certificate is not None
        self._listener = _listen(host, port)
        self.service = Service(served, limits or Limits())
        # Behind a token, or TLS, another name that points here gains nobody anything.
        hosts = frozenset({"localhost", "127.0.0.1", "::1", host.lower()}) if token is None else None
        config = uvicorn.Config(
            Application(self.service, token=token, hosts=hosts, tls=tls),
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_S,
            timeout_graceful_shutdown=DRAIN_S,
            ssl_certfile=tls_certificate,
            ssl_keyfile=tls_key,
        )
        try:
            config.load()
        except (OSError, ValueError) as error:
            self.close()
            raise SettingError(
                f"the TLS files cannot be used: {getattr(error, 'strerror', None) or error}.",
                remedy="Give a certificate and its key, both in PEM.",
            ) from None
        self._server = _Uvicorn(config, self.service)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{'https' if tls else 'http'}://{shown}:{self._listener.getsockname()[1]}/"

    def run(self) -> None:
        """Serve until a stop is asked for; then take nothing new on and finish what is under way."""
        try:
            self._server.run([self._listener])
        finally:
            self.close()

    def stop(self) -> None:
        """Ask for a stop, from any thread."""
        self._server.handle_exit(signal.SIGTERM, None)

    def close(self) -> None:
        self._listener.close()
        self.service.close()


class _Uvicorn(uvicorn.Server):
    """A server whose end by a signal is an ordinary end."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in NUMBERS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.draining = True
        super().handle_exit(sig, frame)


class _Protocol(HttpToolsProtocol):
    """HTTP whose first lines are short and come soon, from clients that are not too many."""

    on_lost: Callable[[], None] | None = None
    _taken = _head = 0
    _waiting: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        own = sum(_address(one) == _address(self) for one in self.connections)
        if len(self.connections) > CONNECTIONS or own > CONNECTIONS // 2:
            transport.close()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        # Everything but a body is a head: of the first request, of the next, or of one sent before its turn.
        head = self.cycle is None or self.cycle.response_complete or not self.cycle.more_body
        if head:
            self._taken += len(data)
            if self._waiting is None:
                self._await_head()
        try:
            super().data_received(data)
        except Exception:  # what cannot be parsed is refused, and is no failure of the server
            self.send_400_response("")
            return
        if head and self._waiting is not None and self._taken > HEAD_BYTES:
            self.send_400_response(f"the headers are larger than {HEAD_BYTES:,} bytes.")

    def send_400_response(self, msg: str) -> None:
        """Hang up on what is no HTTP, with an error as all others are."""
        if self.transport.is_closing():
            return
        said = msg if msg.startswith("the ") else "this is no HTTP."
        content = json.dumps({"error": said}).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head.encode() + content)
        self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Much may come at once, and is then never seen waiting.
        self._head += len(name) + len(value)
        if self._head > HEAD_BYTES:
            raise ValueError("the headers are too large")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._taken = self._head = 0
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._waiting = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def _address(connection: Any) -> str:
    return str((connection.client or ("",))[0])


def _require_unbroken(model: ServedModel, allow_void: bool) -> None:
    if model.warning is not None and not allow_void:
        raise RunError(
            f"{model.name} is not served: {model.warning}.",
            why="Who asks over a network does not see the run.",
            remedy="Serve another run, or say --allow-void: every answer will say so.",
        )


def _require_name(name: str) -> str:
    if not name or not all(letter.isascii() and (letter.isalnum() or letter in "-_.") for letter in name):
        raise SettingError(
            f"a model cannot be served as '{name}'.",
            why="Its name is part of addresses.",
            remedy="Name it with letters, digits, - _ and ., as in NAME=RUN.",
        )
    return name


def _read_token(file: Path) -> str:
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"cannot read {file}: {error}.", remedy="Give a file with the token alone.") from None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise SettingError(
            f"{file} holds no token of {SHORTEST_TOKEN} characters or more.",
            why="A short one can be guessed.",
            remedy="Make one: python3 -c 'import secrets; print(secrets.token_urlsafe())'.",
        )
    return token


def _require_token(host: str, token: str | None) -> None:
    """Raise unless only this machine can reach the address, or there is a token."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and token is None:
        raise SettingError(
            f"{host} can be reached from other machines, and there is no token.",
            remedy="Give --token-file, or serve this machine alone: --host 127.0.0.1.",
        )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingError(
            f"cannot listen at {host}, port {port}: {reason}.", remedy="Choose another --host or --port; 0 is any port."
        ) from None
    listener.setblocking(False)
    return listener
