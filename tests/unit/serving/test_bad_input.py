"""Whatever is sent: a sentence that a person understands, in the protocol's form, and the next client is served."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from http_client import request_of
from PIL import Image

PATH = "/v2/models/digits/infer"
FLAT = [0.0] * 784


def tensor(**changes: Any) -> dict[str, Any]:
    plain = {"name": "pictures", "datatype": "FP32", "shape": [1, 1, 28, 28], "data": FLAT}
    return {"inputs": [{key: value for key, value in (plain | changes).items() if value is not None}]}


def as_file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def upload(content: bytes, **parameters: Any) -> dict[str, Any]:
    one = {"name": "pictures", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(content).decode()]}
    return {"inputs": [one], "parameters": parameters}


def huge_png(side: int) -> bytes:
    """A file of a few kilobytes that would be gigabytes of pixels."""
    small = as_file(Image.new("L", (1, 1)))
    head = small[16:24]
    header = b"IHDR" + side.to_bytes(4, "big") * 2 + small[24:29]
    return small[:12] + header + zlib.crc32(header).to_bytes(4, "big") + small[33:].replace(head, head)


FRAMES = [Image.new("L", (28, 28), shade) for shade in (0, 200)]
PLAIN = as_file(Image.fromarray(np.arange(784, dtype=np.uint8).reshape(28, 28)))
LARGE = base64.b64encode(huge_png(2048)).decode()
BODIES: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "no JSON"),
    "not an object": (b"[1]", "no JSON object"),
    "not UTF-8": (b'{"a": "\xff"}', "no JSON"),
    "deep": (b"[" * 100_000, "no JSON"),
    "NaN": (json.dumps(tensor(data=[float("nan")] * 784)).encode(), "no JSON"),
    "overflow": (json.dumps(tensor()).replace("0.0", "1e999", 1).encode(), "1 of 784 values are NaN or infinite"),
    "a key twice": (b'{"inputs": [], "inputs": []}', "no JSON"),
    "a long number": (b'{"inputs": ' + b"9" * 10_000 + b"}", "no JSON"),
    "a radius beyond floats": (tensor() | {"parameters": {"radius": 10**400}}, "radius is not a number"),
    "large files together": (
        {
            "inputs": [{"name": "pictures", "datatype": "BYTES", "shape": [5], "data": [LARGE] * 5}],
            "parameters": {"fit": "resize"},
        },
        "pixels together",
    ),
    "no input": ({}, "exactly one input"),
    "two inputs": ({"inputs": tensor()["inputs"] * 2}, "exactly one input"),
    "another name": (tensor(name="x"), 'named "pictures"'),
    "another type": (tensor(datatype="FP16"), "datatype is unknown"),
    "another shape": (tensor(shape=[1, 28, 28, 1]), "permute"),
    "another size": (tensor(shape=[1, 1, 10, 10], data=[0] * 100), "pictures of shape"),
    "too few values": (tensor(data=[0]), "1 values are not of shape"),
    "a shape of nothing": (tensor(shape=[0, 1, 28, 28], data=[]), "whole numbers above 0"),
    "a vast shape": (tensor(shape=[1, 2**30, 2**30]), "values are not of shape"),
    "a negative shape": (tensor(shape=[-1, 1, 28, 28]), "whole numbers above 0"),
    "too many pictures": (tensor(shape=[513, 1, 28, 28]), "at most 512"),
    "texts": (tensor(data=["0"] * 784), "not all numbers"),
    "ragged": (tensor(data=[[0, 1], [2]]), "different lengths"),
    "nothing as a number": (tensor(data=[None] * 784), "not all numbers"),
    "truth as a number": (tensor(data=[True] * 784), "not all numbers"),
    "out of range": (tensor(data=[2.0] * 784), "values span"),
    "bytes out of range": (tensor(datatype="UINT8", data=[256] * 784), "from 0 to 255"),
    "bytes with a point": (tensor(datatype="UINT8", data=[0.5] * 784), "from 0 to 255"),
    "no data": (tensor(data=None), "no list"),
    "a binary size without bytes": (tensor(data=None, parameters={"binary_data_size": 9}), "binary_data_size"),
    "unknown parameter": ({**tensor(), "parameters": {"sudo": 1}}, "'sudo' is unknown"),
    "no radius": ({**tensor(), "parameters": {"radius": 0}}, "radius is not a number above 0"),
    "a radius in words": ({**tensor(), "parameters": {"radius": "big"}}, "radius is not a number"),
    "half a draw": ({**tensor(), "parameters": {"max_draws": 1.5}}, "max_draws is not a whole number"),
    "a past deadline": ({**tensor(), "parameters": {"deadline_ms": -1}}, "deadline_ms is not a number above 0"),
    "parameters in a list": ({**tensor(), "parameters": []}, "no JSON object"),
    "a long id": ({**tensor(), "id": "x" * 1000}, "the id"),
    "outputs in a list of texts": ({**tensor(), "outputs": ["label"]}, "no list of objects"),
    "no picture": (upload(b"no picture"), "no picture"),
    "a script": (upload(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\n"), "no picture"),
    "not base64": ({"inputs": [{**upload(b"")["inputs"][0], "data": ["?"]}]}, "base64"),
    "truncated": (upload(PLAIN[:-30]), "not a whole image"),
    "a large picture": (upload(as_file(Image.new("L", (3000, 3000)))), "At most"),
    "a bomb": (upload(huge_png(10_000)), "far too large|At most"),
    "a larger bomb": (upload(huge_png(60_000)), "far too large|At most"),
    "animated": (upload(as_file(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:])), "is animated"),
    "another size of file": (upload(as_file(Image.new("L", (30, 40)))), "is 40x30"),
    "colour": (upload(as_file(Image.new("RGB", (28, 28), "red"))), "in colour"),
    "transparent": (upload(as_file(Image.new("LA", (28, 28), (9, 9)))), "transparent"),
    "an unknown fit": (upload(PLAIN, fit="squeeze"), "fit is unknown"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_wrong_gets_a_sentence(client: Any, name: str) -> None:
    body, expected = BODIES[name]
    code, answer, _ = client.ask("POST", PATH, body)
    assert code == 400, answer
    assert set(answer) == {"error"}
    assert re.search(expected, answer["error"]), answer
    assert "/" not in answer["error"].replace("127.5", ""), "no path"


def test_fit_brings_a_picture_to_size(client: Any) -> None:
    picture = as_file(Image.new("RGB", (60, 40), "white"))
    for fit in ("resize", "crop"):
        assert client.ask("POST", PATH, upload(picture, fit=fit))[0] == 200


def test_bodies_that_are_too_large(client: Any) -> None:
    code, answer, _ = client.ask("POST", PATH, b" " * (100 * 2**20))
    assert code == 413
    assert "larger than 8,388,608 bytes" in answer["error"]
    # In pieces, without saying how much.
    connection = socket.create_connection(client.host.split(":"), timeout=30)
    connection.sendall(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    piece = b" " * 2**20
    for _ in range(12):
        connection.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
    connection.sendall(b"0\r\n\r\n")
    assert connection.recv(12) == b"HTTP/1.1 413"
    connection.close()
    assert client.ask("POST", PATH, b"x", content_encoding="gzip")[0] == 415


def test_the_length_of_the_json_is_checked(client: Any) -> None:
    for length in ("9999999", "-1", "1e3", "²", ""):
        code, answer, _ = client.ask(
            "POST", PATH, tensor(), inference_header_content_length=length.encode().decode("latin-1")
        )
        assert code == 400, length
        assert "length of the JSON" in answer["error"]


def test_addresses_and_methods_that_are_not_there(client: Any) -> None:
    for method, path, expected in (
        ("GET", "/nothing", 404),
        ("GET", "/v2/models/nothing", 404),
        ("POST", "/v2/models/nothing/infer", 404),
        ("POST", "/v2/models/digits/versions/9/infer", 404),
        ("GET", "/v2/models/digits/infer", 405),
        ("DELETE", "/v2/models/digits", 405),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/page.js/..%2f..%2fpyproject.toml", 404),
    ):
        code, answer, _ = client.ask(method, path)
        assert code == expected
        assert isinstance(answer["error"], str)


@pytest.mark.parametrize(
    "sent",
    [
        b"\0" * 100,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(client: Any, sent: bytes) -> None:
    connection = socket.create_connection(client.host.split(":"), timeout=20)
    connection.sendall(sent)
    connection.shutdown(socket.SHUT_WR)
    answer = connection.recv(100)
    assert answer.startswith(b"HTTP/1.1 4") or not answer
    connection.close()
    assert client.ask("GET", "/v2/health/live")[0] == 200


def test_large_headers_are_refused_though_they_come_at_once(client: Any) -> None:
    connection = socket.create_connection(client.host.split(":"), timeout=20)
    connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000 + b"\r\n\r\n")
    assert connection.recv(12) == b"HTTP/1.1 400"
    connection.close()


def test_an_attack_needs_one_picture_and_a_radius(client: Any, inputs: torch.Tensor) -> None:
    for body in (request_of(inputs[:1]), request_of(inputs[:2], radius=0.1)):
        code, answer, _ = client.ask("POST", "/v2/models/digits/attack", body)
        assert code == 400
        assert "one picture and a radius" in answer["error"]


def test_nothing_failed_inside(client: Any) -> None:
    """After everything above: no answer of 500, no failure counted."""
    text = client.ask("GET", "/metrics")[1].decode()
    assert 'code="500"' not in text
