"""Hostile requests, each from a seed and a number: broken JSON, tensors, files, headers, HTTP, and whole ones between.

What is wanted of the server: never 500, never silence, and the right answer to every request that is whole.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from PIL import Image

LIMIT_S = 60.0
Parts = tuple[str, str, dict[str, str], bytes]
"""Method, path, headers, body."""
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, 1e308, -1e308, 1e-320, "", "x", "\ud800", "\0", [],
    [[]], {}, {"a": {}}, "FP32", "BYTES", "pictures", [1, 1, 28, 28], [0], [-1], [2**40], ["1"], [None], [[1], [1, 2]],
)  # fmt: skip


@dataclass
class Fuzz:
    """Requests to one server, whose right answers to whole requests are known."""

    host: str
    pictures: np.ndarray[Any, Any]
    """In [-1, 1]."""
    right: list[tuple[int, float]]
    """Their labels and radii at `radius`."""
    radius: float
    seed: int = 1
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def run(self, numbers: range) -> None:
        for number in numbers:
            self.one(number)

    def one(self, number: int) -> None:
        rng = Random(f"{self.seed}/{number}")
        kind = rng.choices(list(KINDS), weights=[weight for _, weight in KINDS.values()])[0]
        started = time.monotonic()
        try:
            found = KINDS[kind][0](self, rng)
        except OSError as error:
            found = f"{type(error).__name__}: {error}"
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        self.counts[kind] += 1
        if found:
            self.findings.append(f"{number} ({kind}): {found}")

    # One request.

    def send(self, content: bytes, *, closing: bool) -> bytes:
        name, _, port = self.host.rpartition(":")
        with socket.create_connection((name, int(port)), timeout=LIMIT_S) as connection:
            answer = b""
            try:
                connection.sendall(content)
                if closing:
                    connection.shutdown(socket.SHUT_WR)
                while more := connection.recv(1 << 16):
                    answer += more
            except (ConnectionResetError, BrokenPipeError):
                pass
            return answer

    def ask(self, parts: Parts) -> tuple[int, bytes]:
        method, path, headers, body = parts
        sent = {"Host": "localhost", "Connection": "close", "Content-Length": str(len(body))} | headers
        head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        answer = self.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1", "replace") + body, closing=False)
        head_found, _, content = answer.partition(b"\r\n\r\n")
        code = head_found[9:12]
        self.counts[f"code {code.decode('latin-1')}"] += 1
        return int(code) if code.isdigit() else 0, content

    def judge(self, parts: Parts) -> str:
        """Return what is wrong with the answer to a request that may be broken."""
        code, content = self.ask(parts)
        if code == 0:
            return "no answer"
        if code >= 500 and code != 503:
            return f"{code}: {content[:200]!r}"
        if code >= 400 and not isinstance(json.loads(content).get("error"), str):
            return f"{code} without a sentence"
        return ""

    # Whole requests.

    def whole(self, rng: Random) -> tuple[Parts, list[int]]:
        rows = [rng.randrange(len(self.right)) for _ in range(rng.randint(1, 3))]
        values = self.pictures[rows]
        tensor: dict[str, Any] = {"name": "pictures", "datatype": "FP32", "shape": list(values.shape)}
        body: dict[str, Any] = {"inputs": [tensor], "parameters": {"radius": self.radius}}
        headers, rest = {}, b""
        if rng.random() < 0.7:
            rest = values.astype("<f4").tobytes()
            tensor["parameters"] = {"binary_data_size": len(rest)}
        else:
            tensor["data"] = values.ravel().tolist()
        content = json.dumps(body).encode()
        if rest:
            headers["Inference-Header-Content-Length"] = str(len(content))
        return ("POST", "/v2/models/digits/infer", headers, content + rest), rows


def answer_right(fuzz: Fuzz, rng: Random) -> str:
    parts, rows = fuzz.whole(rng)
    code, content = fuzz.ask(parts)
    if code != 200:
        return f"{code} for a whole request: {content[:200]!r}"
    found = {one["name"]: one["data"] for one in json.loads(content)["outputs"]}
    right = [fuzz.right[row] for row in rows]
    if list(zip(found["label"], found["radius"], strict=True)) != right:
        return f"wrong answer: {found['label']} {found['radius']}, not {right}"
    return ""


def broken_json(fuzz: Fuzz, rng: Random) -> str:
    """Some value of a whole request is replaced, removed, or doubled."""
    (method, path, _, body), _ = fuzz.whole(rng)
    document = json.loads(body[: body.rfind(b"}") + 1]) if body.rstrip().endswith(b"}") else {"inputs": [{}]}
    for _ in range(rng.randint(1, 3)):
        holders = [one for one in _containers(document) if one]
        if not holders:
            break
        holder = rng.choice(holders)
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        if rng.random() < 0.2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD))
    return fuzz.judge((method, path, {}, json.dumps(document).encode()))


def _containers(value: Any, depth: int = 0) -> list[Any]:
    if not isinstance(value, dict | list) or depth > 5:
        return []
    inner = value.values() if isinstance(value, dict) else value[:3]
    return [value, *(one for part in inner for one in _containers(part, depth + 1))]


def broken_bytes(fuzz: Fuzz, rng: Random) -> str:
    """Bytes of a whole body are changed, cut off or inserted."""
    (method, path, headers, body), _ = fuzz.whole(rng)
    if rng.random() < 0.2:
        headers["Inference-Header-Content-Length"] = str(rng.choice((-1, 0, 1, len(body), len(body) + 1, 2**40, "x")))
    return fuzz.judge((method, path, headers, _mutate(body, rng)))


def _mutate(content: bytes, rng: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        place = rng.randrange(len(changed) + 1)
        choice = rng.random()
        if choice < 0.5 and place < len(changed):
            changed[place] = rng.randrange(256)
        elif choice < 0.75:
            changed[place:place] = rng.randbytes(rng.randint(1, 20))
        else:
            del changed[place : place + rng.randint(1, 200)]
    return bytes(changed)


def broken_file(fuzz: Fuzz, rng: Random) -> str:
    """A picture file with changed bytes; one that is still whole may be answered."""
    kind = rng.choice(("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"))
    mode = rng.choice(("L", "L", "RGB", "P", "1", "RGBA"))
    size = rng.choice(((28, 28), (28, 28), (1, 1), (3, 500), (64, 64)))
    file = io.BytesIO()
    Image.new(mode if (mode, kind) != ("RGBA", "JPEG") else "RGB", size, rng.randrange(2)).convert(
        "RGB" if kind in ("JPEG", "WEBP") else mode
    ).save(file, kind)
    content = _mutate(file.getvalue(), rng) if rng.random() < 0.9 else file.getvalue()
    tensor = {"name": "pictures", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(content).decode()]}
    parameters = {"radius": fuzz.radius} | ({"fit": rng.choice(("resize", "crop"))} if rng.random() < 0.3 else {})
    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    return fuzz.judge(("POST", "/v2/models/digits/infer", {}, body))


def odd_address(fuzz: Fuzz, rng: Random) -> str:
    """Another method, path or header than there is."""
    method = rng.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"))
    pieces = ("v2", "models", "digits", "infer", "attack", "..", "%2e%2e", "%00", "a" * 300, "health", "ready", "", "é")
    path = "/" + "/".join(rng.choice(pieces) for _ in range(rng.randint(0, 6)))
    names = ("Authorization", "Origin", "X-Forwarded-For", "Content-Encoding", "Accept", "Expect", "Content-Type")
    headers = {rng.choice(names): rng.choice(("", "x", "Bearer", "gzip", "null", "a" * 2000, "\xff")) for _ in range(2)}
    return fuzz.judge((method, path, headers, b"" if method == "GET" else rng.randbytes(rng.randint(0, 50))))


def broken_http(fuzz: Fuzz, rng: Random) -> str:
    """What is no HTTP any more may be hung up on, and the next request is answered."""
    (method, path, _, body), _ = fuzz.whole(rng)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    content = _mutate(head, rng) + (body if rng.random() < 0.5 else b"")
    answer = fuzz.send(content, closing=True)
    if answer.startswith(b"HTTP/1.1 5") and not answer.startswith(b"HTTP/1.1 503"):
        return repr(answer[:300])
    return fuzz.judge(("GET", "/v2/health/live", {}, b""))


KINDS: dict[str, tuple[Callable[[Fuzz, Random], str], float]] = {
    "whole": (answer_right, 5),
    "broken JSON": (broken_json, 30),
    "broken bytes": (broken_bytes, 25),
    "broken files": (broken_file, 20),
    "odd addresses": (odd_address, 10),
    "broken HTTP": (broken_http, 10),
}
