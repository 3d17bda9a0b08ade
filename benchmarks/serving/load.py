"""Served answers beside a plain loop, beside the library's own batches, and beside LitServe without certificates.

python benchmarks/serving/load.py RUN --seconds 10            # rates at 1, 16 and 100 clients
python benchmarks/serving/load.py RUN --soak 600              # 100 clients for ten minutes, some of them killed
python benchmarks/serving/load.py RUN --votes                 # a run by votes: draws per second

Processor seconds for a picture are compared beside the rates: other work on the machine does not change them much.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from load_clients import Asked, Load, http, requests_of, run
from serving_process import cpu_seconds, resident_mb, server, write_record

import stobatch
from stobatch import data
from stobatch.config import DataConfig
from stobatch.loading import TrainedModel

CLIENTS = (1, 16, 100)
PICTURES = 256
ROUNDS = 9


def family(pid: int) -> list[int]:
    """Return a process and those that it started."""
    found, children = [pid], dict[int, list[int]]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(folder.name))
    for one in found:
        found += children.get(one, [])
    return found


def library(
    model: TrainedModel, pictures: torch.Tensor, radius: float | None, size: int, seconds: float
) -> dict[str, Any]:
    """`predict` on batches of a size, one after the other, of pictures at random, as clients choose them."""
    generator = torch.Generator().manual_seed(1)
    done, started, used = 0, time.monotonic(), time.process_time()
    while time.monotonic() - started < seconds:
        model.predict(pictures[torch.randint(len(pictures), (size,), generator=generator)], radius=radius)
        done += size
    wall, cpu = time.monotonic() - started, time.process_time() - used
    return {"per_second": round(done / wall, 1), "cpu_ms": round(1000 * cpu / done, 3)}


def network_alone(model: TrainedModel, pictures: torch.Tensor, seconds: float) -> dict[str, Any]:
    done, started, used = 0, time.monotonic(), time.process_time()
    with torch.no_grad():
        while time.monotonic() - started < seconds:
            model.network(pictures[:32])
            done += 32
    return {
        "per_second": round(done / (time.monotonic() - started), 1),
        "cpu_ms": round(1000 * (time.process_time() - used) / done, 4),
    }


def served(host: str, pid: int, asked: Asked, clients: int, seconds: float) -> dict[str, Any]:
    before = sum(cpu_seconds(one) for one in family(pid))
    load = run(host, asked, clients, seconds)
    used = sum(cpu_seconds(one) for one in family(pid)) - before
    return load.summary() | {"cpu_ms": round(1000 * used / max(1, load.counts["200"]), 3)}


@contextmanager
def litserve(path: Path) -> Iterator[tuple[str, int]]:
    """LitServe in a group of processes of its own, which ends with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("litserve_server.py")
    command = [sys.executable, str(script), str(path), str(port)]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "LitServe did not start"
                time.sleep(0.5)
        time.sleep(8)  # its worker loads the model after the port is open
        yield f"127.0.0.1:{port}", process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def compare(given: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    model = stobatch.load(given.run, threads=1)
    pictures = data.load(DataConfig(name="mnist", train_limit=1, test_limit=PICTURES)).test.inputs
    found: dict[str, Any] = {"pictures": PICTURES, "seconds_each": given.seconds, "rounds": ROUNDS}
    found["network_alone"] = network_alone(model, pictures, 2)
    found["one radius, 0.2"] = compare_one_radius(given, model, pictures, 0.2)
    found["largest radius"] = compare_largest(given, model, pictures)
    found["LitServe, no certificate"] = compare_litserve(given, model, pictures)
    write_record("load", found)
    return int(bool(re.search('"wrong": [1-9]', json.dumps(found))))


def compare_one_radius(
    given: argparse.Namespace, model: TrainedModel, pictures: torch.Tensor, radius: float
) -> dict[str, Any]:
    """One picture in a request, a proof at one radius: the question that HTTP weighs most in."""
    rows = model.predict(pictures, radius=radius).rows
    asked, as_json = (requests_of(pictures, rows, radius, binary=binary) for binary in (True, False))
    part: dict[str, Any] = {"plain loop": library(model, pictures, radius, 1, given.seconds)}
    with server(given.run, "--per-client", "1000") as (host, pid):
        run(host, asked, 32, 1.0)
        for clients in CLIENTS[:-1]:
            part[f"served, bytes, {clients} clients"] = served(host, pid, asked, clients, given.seconds)
        part["served, json, 100 clients"] = served(host, pid, as_json, 100, given.seconds)
        # In turns, so that what else the machine does meets both.
        pairs = [
            (library(model, pictures, radius, 32, given.seconds), served(host, pid, asked, 100, given.seconds))
            for _ in range(ROUNDS)
        ]
    own, theirs = ([pair[place] for pair in pairs] for place in (0, 1))
    part |= {"batches of 32": own, "served, bytes, 100 clients": theirs}
    part["share of the library's batches, by processor time"] = round(
        middle(own, "cpu_ms") / middle(theirs, "cpu_ms"), 3
    )
    part["share of the library's batches, by rate"] = round(middle(theirs, "per_second") / middle(own, "per_second"), 3)
    return part


def compare_largest(given: argparse.Namespace, model: TrainedModel, pictures: torch.Tensor) -> dict[str, Any]:
    """The largest radius takes a tenth of a second of bounds, beside which HTTP is nothing: once is enough."""
    few = pictures[:32]
    asked = requests_of(few, model.predict(few).rows, None, binary=True)
    own = library(model, few, None, 32, given.seconds)
    with server(given.run) as (host, pid):
        theirs = served(host, pid, asked, 100, given.seconds)
    share = round(own["cpu_ms"] / theirs["cpu_ms"], 3)
    return {"batches of 32": own, "served, bytes, 100 clients": theirs, "share, by processor time": share}


def middle(rounds: list[dict[str, Any]], key: str) -> float:
    return float(median(one[key] for one in rounds))


def compare_litserve(given: argparse.Namespace, model: TrainedModel, pictures: torch.Tensor) -> Any:
    from importlib.metadata import PackageNotFoundError, version

    try:
        number = version("litserve")
    except PackageNotFoundError:
        return "not installed"
    rows = model.predict(pictures, radius=0.2).rows
    contents = [http("/predict", json.dumps({"data": one.flatten().tolist()}).encode()) for one in pictures]

    def judge(place: int, content: bytes) -> str:
        return "" if json.loads(content)["label"] == rows[place].label else "another label"

    with litserve(given.run) as (host, pid):
        asked = Asked(contents, judge)
        run(host, asked, 8, 1.0)
        loads = {f"{clients} clients": served(host, pid, asked, clients, given.seconds) for clients in CLIENTS}
    return {"version": number, **loads}


def soak(given: argparse.Namespace) -> int:
    """A hundred clients for long, some killed: no wrong answer, no growth."""
    model = stobatch.load(given.run, threads=1)
    pictures = data.load(DataConfig(name="mnist", train_limit=1, test_limit=PICTURES)).test.inputs
    asked = requests_of(pictures, model.predict(pictures, radius=0.2).rows, 0.2, binary=True)
    memory: list[float] = []
    stopped = threading.Event()
    with server(given.run, "--per-client", "1000") as (host, pid):
        run(host, asked, 100, 10.0)

        def watch() -> None:
            while not stopped.wait(5):
                memory.append(resident_mb(pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        load: Load = run(host, asked, 100, given.soak, killed=0.002)
        stopped.set()
        watcher.join()
    third = max(1, len(memory) // 3)
    ratio = load.share(0.99) / load.share(0.5)
    found = {
        "clients": 100,
        **load.summary(),
        "p99_over_p50": round(ratio, 2),
        "memory_mb": {
            "first": round(memory[0]),
            "first third": round(max(memory[:third]), 1),
            "last third": round(max(memory[-third:]), 1),
        },
        "findings": load.wrong[:20],
    }
    write_record("soak", found)
    return int(bool(load.wrong))


def compare_votes(given: argparse.Namespace) -> int:
    """Draws for each processor second: of `predict` on one picture after the other, and served to 16 clients."""
    torch.set_num_threads(1)
    model = stobatch.load(given.run, threads=1)
    draws = model.config.certification.noise_draws
    pictures = data.load(DataConfig(name="mnist", train_limit=1, test_limit=16)).test.inputs
    asked = requests_of(pictures, model.predict(pictures[:1]).rows * 16, None, binary=True)
    # Votes are drawn anew in every answer, so that two of them need not agree.
    asked = Asked(asked.contents, lambda place, content: "")
    with server(given.run) as (host, pid):
        pairs = [
            (library(model, pictures, None, 1, given.seconds), served(host, pid, asked, 16, given.seconds))
            for _ in range(3)
        ]
    rates = [tuple(round(1000 * draws / one["cpu_ms"]) for one in pair) for pair in pairs]
    shares = [theirs / own for own, theirs in rates]
    found = {
        "draws_of_an_answer": draws,
        "draws_per_processor_second": {"predict": [own for own, _ in rates], "served": [one for _, one in rates]},
        "share of the library's draws, by processor time": round(median(shares), 2),
        "served": [theirs for _, theirs in pairs],
    }
    write_record("votes", found)
    return int(any(theirs["wrong"] for _, theirs in pairs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run on MNIST with certificates by bounds, as of the recipe demo")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--soak", type=float, help="seconds with 100 clients, instead of the comparison")
    parser.add_argument("--votes", action="store_true", help="a run by votes, instead of the comparison")
    given = parser.parse_args()
    if given.votes:
        return compare_votes(given)
    return soak(given) if given.soak else compare(given)


if __name__ == "__main__":
    sys.exit(main())
