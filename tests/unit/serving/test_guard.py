"""Who is let in: this machine, or a token; and what no client can do to another."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from http.client import HTTPSConnection
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from http_client import Client, outputs_of, request_of, serving

import stobatch
from stobatch.errors import RunError, SettingError
from stobatch.loading import TrainedModel
from stobatch.serving import Limits, Server
from stobatch_recipes import recipe

TOKEN = "a-token-of-many-letters"


def test_only_this_machine_without_a_token(model: TrainedModel, tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(SettingError, match="no token"):
            Server({"digits": model}, host=host, port=0)
    for text in ("", "short", "two words of a token", "ß" * 20):
        (tmp_path / "token").write_text(text)
        with pytest.raises(SettingError, match="no token of 16"):
            Server({"digits": model}, port=0, token_file=tmp_path / "token")


def test_a_token_opens_everything_but_health_and_the_empty_page(
    model: TrainedModel, inputs: torch.Tensor, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    with serving({"digits": model}, token_file=tmp_path / "token") as client:
        for path in ("/v2/health/live", "/v2/health/ready", "/", "/page.js", "/docs"):
            assert client.ask("GET", path)[0] == 200
        for path in ("/v2", "/v2/models", "/v2/models/digits", "/card", "/metrics", "/nothing"):
            code, answer, headers = client.ask("GET", path)
            assert (code, headers["www-authenticate"]) == (401, "Bearer")
            assert "token" in answer["error"]
        body = request_of(inputs[:1], radius=0.05)
        for given in (f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN, "Bearer", f"Bearer {TOKEN[:-1]}"):
            assert client.ask("POST", "/v2/models/digits/infer", body, authorization=given)[0] == 401
        assert client.ask("POST", "/v2/models/digits/infer", body, authorization=f"bearer {TOKEN}")[0] == 200


def test_pages_of_others_cannot_ask(client: Any) -> None:
    assert client.ask("GET", "/card", host="evil.example:80")[0] == 421
    for origin in ("http://evil.example", "null", "", "http://[", client.host):
        assert client.ask("GET", "/card", origin=origin)[0] == 403
    assert client.ask("GET", "/card", origin=f"http://{client.host}")[0] == 200


def test_every_answer_has_the_headers_of_security(client: Any) -> None:
    for path in ("/", "/card", "/nothing", "/v2/models/nothing"):
        _, _, headers = client.ask("GET", path)
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers


def test_too_many_requests_of_one_address(model: TrainedModel, inputs: torch.Tensor) -> None:
    with serving({"digits": model}, limits=Limits(per_client=1)) as client:
        first = socket.create_connection(client.host.split(":"))
        first.sendall(b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        sleep(0.3)
        code, answer, headers = client.ask("GET", "/v2/models")
        assert (code, headers["retry-after"]) == (429, "1")
        assert "too many requests" in answer["error"]
        first.close()
        sleep(0.3)
        assert client.ask("GET", "/v2/models")[0] == 200


def test_a_full_queue_says_when_to_come_back(model: TrainedModel, inputs: torch.Tensor) -> None:
    with serving({"digits": model}, limits=Limits(queue_rows=4)) as client:
        code, answer, headers = client.infer(inputs[:5])
        assert (code, headers["retry-after"]) == (503, "1")
        assert "more to do" in answer["error"]
        assert client.infer(inputs[:4], radius=0.05)[0] == 200


@pytest.mark.parametrize("rows", [20, 60], ids=["read by the loop", "read beside it"])
@pytest.mark.parametrize("leave", [socket.socket.close, lambda one: one.shutdown(socket.SHUT_WR)], ids=["all", "half"])
def test_a_client_that_goes_away_harms_nobody_and_costs_nothing(
    client: Any, inputs: torch.Tensor, leave: Callable[[socket.socket], None], rows: int
) -> None:
    """Whoever sends no more has gone: a closed connection looks the same."""
    content = inputs.repeat(2, 1, 1, 1)[:rows].numpy().tobytes()
    tensor = {"name": "pictures", "datatype": "FP32", "shape": [rows, 1, 28, 28]}
    tensor["parameters"] = {"binary_data_size": len(content)}
    asked = json.dumps({"inputs": [tensor]}).encode()
    head = (
        "POST /v2/models/votes/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Length: {len(asked + content)}\r\nInference-Header-Content-Length: {len(asked)}\r\n\r\n"
    )
    before = metrics_of(client)
    with ExitStack() as gone:
        for _ in range(5):
            one = gone.enter_context(socket.create_connection(client.host.split(":")))
            one.sendall(head.encode() + asked + content)
            leave(one)
        assert client.infer(inputs[:1], radius=0.05)[0] == 200
        deadline = monotonic() + 60
        while (now := metrics_of(client))["stobatch_waiting_pictures"] or now["stobatch_requests_in_flight"] > 1:
            assert monotonic() < deadline
            sleep(0.05)
    code = 'stobatch_requests_total{path="/v2/models/{name}/infer",code="499"}'
    assert now[code] == before.get(code, 0) + 5


def metrics_of(client: Client) -> dict[str, float]:
    lines = client.ask("GET", "/metrics")[1].decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


def test_slow_senders_are_sent_away(model: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stobatch.serving.server.HEAD_S", 0.5)
    with serving({"digits": model}, limits=Limits(body_s=0.5)) as client:
        slow = {
            b"GET /v2 HTTP/1.1\r\nHost: loc": b"",
            b"": b"",
            b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{": b"HTTP/1.1 408",
        }
        for begun, expected in slow.items():
            connection = socket.create_connection(client.host.split(":"), timeout=20)
            connection.sendall(begun)
            assert client.ask("GET", "/v2")[0] == 200
            assert connection.recv(12) == expected
            connection.close()


@pytest.mark.parametrize("before", [b"", b"GET /v2/models HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_endless_headers_are_cut_off(client: Any, before: bytes) -> None:
    connection = socket.create_connection(client.host.split(":"), timeout=20)
    connection.sendall(before + b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n")
    sent = 0
    with suppress(OSError):
        while sent < 2**24:
            sent += connection.send(b"x-more: " + b"a" * 4000 + b"\r\n")
    connection.close()
    assert sent < 2**24
    assert client.ask("GET", "/v2")[0] == 200


def test_a_void_run_is_served_only_when_asked_for_and_says_so(
    model: TrainedModel, inputs: torch.Tensor, tmp_path: Path
) -> None:
    small = {"data.train_limit": 100, "data.test_limit": 10, "method.batch_size": 50, "training.steps": 1}
    public = stobatch.train(recipe("demo").override_all({**small, "seed": 3}), tmp_path / "public", quiet=True)
    with pytest.raises(RunError, match="seed of this run is public"):
        Server({"public": public}, port=0)
    with serving({"public": public}, allow_void=True) as client:
        code, answer, _ = client.infer(inputs[:1], name="public", radius=0.05)
        assert code == 200
        assert answer["parameters"]["privacy_status"] == "void"
        assert "public" in answer["parameters"]["warning"]
        assert client.ask("GET", "/card")[1]["models"]["public"]["warning"]


def test_names_are_parts_of_addresses(model: TrainedModel) -> None:
    for name in ("", "a/b", "a b", "ü", "?"):
        with pytest.raises(SettingError, match="cannot be served as"):
            Server({name: model}, port=0)


def test_tls(model: TrainedModel, inputs: torch.Tensor, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(
        [*made, "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    with pytest.raises(SettingError, match="both files"):
        Server({"digits": model}, port=0, tls_certificate=certificate)
    with pytest.raises(SettingError, match="TLS files"):
        Server({"digits": model}, port=0, tls_certificate=certificate, tls_key=certificate)
    with serving({"digits": model}, tls_certificate=certificate, tls_key=key) as client:
        assert client.address.startswith("https://")
        trusting = ssl.create_default_context(cafile=certificate)
        connection = HTTPSConnection("localhost", int(client.host.split(":")[1]), context=trusting, timeout=30)
        connection.request("GET", "/v2/health/ready")
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.getheader("strict-transport-security")
        connection.close()


def test_a_stop_counts_what_it_cut_off(
    voting: TrainedModel, inputs: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vote that would take hours is not waited for, and nobody is told that it was answered."""
    monkeypatch.setattr("stobatch.serving.server.DRAIN_S", 1)
    endless = replace(voting, config=voting.config.override("certification.noise_draws", 10**8))
    server = Server({"v": endless}, port=0)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.run)
        under_way = pool.submit(Client(server.address).infer, inputs, name="v")
        until = monotonic() + 60
        while not server.service.in_flight and monotonic() < until:
            sleep(0.01)
        server.stop()
        running.result(timeout=60)
        with suppress(Exception):
            assert under_way.result(timeout=60)[0] == 500
    assert server.service.cut_off == 1


def test_a_stop_finishes_what_was_taken_on(model: TrainedModel, voting: TrainedModel, inputs: torch.Tensor) -> None:
    """As a process, by SIGTERM; a request that is under way is answered, and the process ends with 0."""
    command = [sys.executable, "-m", "stobatch", "serve", f"v={voting.run.path}", str(model.run.path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving v, digits at http://127.0.0.1:")
        client = Client(line.split(" at ")[1].strip())
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(client.infer, inputs[:32], name="v")
            sleep(0.5)
            process.terminate()
            code, answer, _ = under_way.result(timeout=100)
        assert code == 200
        assert len(outputs_of(answer)["label"]) == 32
        assert process.wait(60) == 0
        assert "what was taken on is answered" in process.stdout.read()
        with pytest.raises(OSError, match="refused"):
            client.ask("GET", "/v2")
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
