"""Several processes: do they find each other, is their sum right and how fast, and does a lost peer go unnoticed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stobatch.doctor.check import Outcome
from stobatch.doctor.children import LIMIT, RANKS, ProbeError, ask, python
from stobatch.results import Health

Ask = Callable[..., Any]

INTERFACE = "GLOO_SOCKET_IFNAME"
ABSENT_SECONDS = 2.0
NOT_BUILT = Outcome(Health.ABSENT, "this torch is built without torch.distributed")


@contextmanager
def meeting_point() -> Iterator[int]:
    """A store on the loopback interface, on a port that the system chooses; it is gone afterwards."""
    patience = timedelta(seconds=LIMIT)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)  # type: ignore[attr-defined]
    yield store.port


Meet = Callable[[], Any]


def ranks(
    what: str, port: int, world: int, *more: object, backend: str = "gloo", limit: int = LIMIT
) -> list[list[str]]:
    """One command for each rank of a probe."""
    said = ("--backend", backend, "--port", port, "--world", world, "--limit", limit)
    return [python(RANKS, what, *said, *more, "--rank", rank) for rank in range(world)]


def _loopback() -> dict[str, str]:
    """Gloo otherwise looks up the host's name, and where that fails everything fails: `torchrun` tries it so."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return {INTERFACE: os.environ.get(INTERFACE) or names[0]} if names else {}


def spoken(answer: dict[str, Any]) -> str:
    """What the sums took."""
    speeds = (f"{size} MB at {float(size) / seconds:,.0f} MB/s" for size, seconds in answer["sums"].items())
    return f"summed {', '.join(speeds)}; {1e6 * answer['latency']:,.0f} µs for one number"


def available() -> Outcome:
    if not dist.is_available():
        return Outcome(
            Health.MISSING, NOT_BUILT.said, "Install a build of torch that has it; one process trains without."
        )
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return Outcome(Health.OK, f"built with {', '.join(name for name, here in backends.items() if here) or 'nothing'}")


def gloo(meet: Meet = meeting_point, limit: int = LIMIT) -> Outcome:
    """Two processes on this machine add 1 and 16 MB of float64; both check the sum."""
    if not dist.is_available():
        return NOT_BUILT
    with meet() as port:
        try:
            answer = ask(ranks("sum", port, 2, limit=limit), seconds=limit + 5, changes=_loopback())
        except ProbeError as error:
            return Outcome(Health.BROKEN, f"two processes on 127.0.0.1 could not add up: {error}")
    return Outcome(Health.OK, f"two processes on 127.0.0.1 {spoken(answer)}")


def absent_peer(asking: Ask = ask, meet: Meet = meeting_point) -> Outcome:
    """A peer that does not come must become an error in time, or a dead process makes a training wait for ever."""
    if not dist.is_available():
        return NOT_BUILT
    with meet() as port:
        try:
            answer = asking(ranks("absent", port, 2, "--absent", ABSENT_SECONDS), changes=_loopback())
        except ProbeError as error:
            return Outcome(Health.BROKEN, f"waiting for a peer that does not come: {error}")
    said = f"a sum with a limit of {ABSENT_SECONDS:g} s and a peer that does not come"
    if not answer["raised"]:
        return Outcome(Health.BROKEN, f"{said} ended as if the peer had been there")
    in_time = 0.5 * ABSENT_SECONDS <= answer["seconds"] <= 2.5 * ABSENT_SECONDS
    return Outcome(
        Health.OK if in_time else Health.BROKEN, f"{said} raised {answer['raised']} after {answer['seconds']:.1f} s"
    )


def torchrun(asking: Ask = ask, probe: Path = RANKS, limit: int = LIMIT) -> Outcome:
    """The launcher itself, as one would start a training with it."""
    if not dist.is_available():
        return NOT_BUILT
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    try:
        answer = asking([python(*launch, probe, "launched", "--limit", limit)], seconds=limit + 5)
    except ProbeError as error:
        return Outcome(Health.BROKEN, f"torchrun could not start two processes that add up: {error}")
    if answer["world"] != 2:
        return Outcome(Health.BROKEN, f"torchrun was asked for two processes and started {answer['world']}")
    return Outcome(Health.OK, f"started {answer['world']} processes, which {spoken(answer)}")
