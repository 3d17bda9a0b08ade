"""Clients of a server on this machine: many connections in one loop, each asking one thing after the other."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from torch import Tensor


@dataclass
class Load:
    """What clients saw."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def share(self, part: float) -> float:
        """Return the latency, in seconds, that this share of the requests stayed below."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")

    def summary(self) -> dict[str, object]:
        done = self.counts["200"]
        return {
            "requests": done,
            "per_second": round(done / self.seconds, 1),
            "p50_ms": round(1000 * self.share(0.5), 1),
            "p99_ms": round(1000 * self.share(0.99), 1),
            "wrong": len(self.wrong),
            "counts": dict(self.counts),
        }


@dataclass(frozen=True)
class Asked:
    """Requests, each ready to be sent, and what is wrong with an answer to it."""

    contents: list[bytes]
    judge: Callable[[int, bytes], str]


def http(path: str, body: bytes, **headers: str) -> bytes:
    sent = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body))} | headers
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in sent.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def run(host: str, asked: Asked, clients: int, seconds: float, *, killed: float = 0.0, seed: int = 1) -> Load:
    """Ask for so long; `killed` of the requests are hung up on before their answer."""
    load = Load()
    started = time.monotonic()
    asyncio.run(_all(host, asked, clients, started + seconds, killed, seed, load))
    load.seconds = time.monotonic() - started
    return load


async def _all(host: str, asked: Asked, clients: int, until: float, killed: float, seed: int, load: Load) -> None:
    await asyncio.gather(
        *(_client(host, asked, until, killed, Random(f"{seed}/{one}"), load) for one in range(clients))
    )


async def _client(host: str, asked: Asked, until: float, killed: float, rng: Random, load: Load) -> None:
    name, _, port = host.rpartition(":")
    reader, writer = await asyncio.open_connection(name, int(port))
    while time.monotonic() < until:
        place = rng.randrange(len(asked.contents))
        started = time.monotonic()
        writer.write(asked.contents[place])
        if rng.random() < killed:
            await asyncio.sleep(rng.random() * 0.05)
            writer.transport.abort()
            load.counts["killed"] += 1
            reader, writer = await asyncio.open_connection(name, int(port))
            continue
        try:
            code, content = await asyncio.wait_for(_answer(reader), 120)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            load.wrong.append(f"no answer: {type(error).__name__}")
            reader, writer = await asyncio.open_connection(name, int(port))
            continue
        load.latencies.append(time.monotonic() - started)
        load.counts[str(code)] += 1
        if code == 503:
            await asyncio.sleep(0.05)
        elif wrong := asked.judge(place, content) if code == 200 else f"{code}: {content[:200]!r}":
            load.wrong.append(wrong)
    writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    return int(head[9:12]), await reader.readexactly(length)


def labels_and_radii(right: list[tuple[int, float]]) -> Callable[[int, bytes], str]:
    """Judge an answer of the Open Inference Protocol by what `predict` says."""

    def judge(place: int, content: bytes) -> str:
        found = {one["name"]: one["data"] for one in json.loads(content)["outputs"]}
        told = (found["label"][0], found["radius"][0])
        return "" if told == right[place] else f"{told}, not {right[place]}"

    return judge


def requests_of(pictures: Tensor, rows: Any, radius: float | None, *, binary: bool) -> Asked:
    """One picture in each request."""
    contents = []
    for picture in pictures:
        tensor: dict[str, Any] = {"name": "pictures", "datatype": "FP32", "shape": [1, *picture.shape]}
        asked: dict[str, Any] = {"inputs": [tensor]} | ({"parameters": {"radius": radius}} if radius else {})
        rest, headers = b"", {}
        if binary:
            rest = picture.numpy().astype("<f4").tobytes()
            tensor["parameters"] = {"binary_data_size": len(rest)}
        else:
            tensor["data"] = picture.flatten().tolist()
        content = json.dumps(asked).encode()
        if binary:
            headers["Inference_Header_Content_Length"] = str(len(content))
        contents.append(http("/v2/models/digits/infer", content + rest, **headers))
    return Asked(contents, labels_and_radii([(int(row.label or 0), float(row.radius or 0)) for row in rows]))
