"""The processes that torchrun started: how this one finds the others, compares itself with them, and ends with them.

Only short texts pass through here, by the key-value store that torchrun keeps; gradients go through the collectives of
`torch.distributed`. The first to fail says so in the store and to the user; the others end without a word.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from stobatch.errors import EndedElsewhere, RunError, StobatchError
from stobatch.interrupts import Interrupted

_PAUSE_S = 0.02
_CLOCKS_S = 60.0
"""Clocks further apart than this belong to neglected machines; logs could not be compared."""
_OLD_S = 90.0
"""Seconds after which another may speak for processes that have not joined; more than their clocks may differ."""
_FAILURE = "failure"
"""Where the first process that fails says why."""
_STOPPED = "interrupted"


class Group:
    """This process among the others."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        patience = timedelta(seconds=timeout_s)
        try:
            store, self.rank, self.processes = next(iter(rendezvous("env://", timeout=patience)))
            self.store = PrefixStore(f"group {meet(store, self.rank, self.processes, timeout_s)}", store)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("collectives", self.store),
                rank=self.rank,
                world_size=self.processes,
                timeout=patience,
            )
        except (RuntimeError, ValueError) as error:
            raise RunError(
                f"the processes did not find each other: {str(error).splitlines()[0]}",
                remedy="Try `stobatch doctor`, and look whether all nodes were started with the same rendezvous.",
            ) from None

    def exchange(self, topic: str, text: str) -> list[str]:
        """Return what each process says about a topic. A topic is used once."""
        keys = [f"{topic}/{rank}" for rank in range(self.processes)]
        deadline = time.monotonic() + self.timeout_s
        with self.contact(topic):
            self.store.set(keys[self.rank], text)
            while not self.store.check(keys):
                if self.store.check([_FAILURE]):
                    raise self._ended_error()
                if time.monotonic() > deadline:
                    missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                    raise lost(f"process {', '.join(map(str, missing))} was not heard of for {self.timeout_s:g} s")
                time.sleep(_PAUSE_S)
            return [self.store.get(key).decode() for key in keys]

    @contextmanager
    def contact(self, during: str) -> Iterator[None]:
        """Turn what the transport says of vanished or silent processes into one sentence."""
        try:
            yield
        except RuntimeError as error:
            raise lost(f"process {self.rank} lost contact with the others ({during})") from error

    def _ended_error(self) -> EndedElsewhere:
        why = str(self.store.get(_FAILURE).decode())
        return EndedElsewhere(why, code=130 if why.endswith(_STOPPED) else 2)

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """Let one process tell what went wrong; tidy up where all went well."""
        try:
            yield
        except EndedElsewhere:
            raise
        except StobatchError as error:
            error.told = say_first(self.store, self.rank, str(error))
            if error.told:
                raise
            raise self._ended_error() from error
        except Interrupted:
            if say_first(self.store, self.rank, _STOPPED):
                raise
            raise EndedElsewhere(_STOPPED, code=130) from None
        dist.destroy_process_group()

    def require_equal(self, topic: str, own: Mapping[str, str], remedies: Mapping[str, str]) -> None:
        """Raise unless every process has the same value of everything here; name the first that differs."""
        for name, value in own.items():
            values = self.exchange(f"{topic}: {name}", value)
            for rank, other in enumerate(values):
                if other != values[0]:
                    raise RunError(
                        f"processes 0 and {rank} differ in their {name}: {values[0]} and {other}.",
                        why="All processes must do the same work on the same parameters.",
                        remedy=remedies[name],
                    )

    def require_clocks_agree(self) -> None:
        """Raise unless the clocks of all processes, read at about the same time, agree."""
        self.exchange("clocks: ready", "")
        times = [float(text) for text in self.exchange("clocks", repr(time.time()))]
        if max(times) - min(times) > _CLOCKS_S:
            ahead, behind = times.index(max(times)), times.index(min(times))
            raise RunError(
                f"the clocks of processes {ahead} and {behind} are {max(times) - min(times):.0f} s apart.",
                why="Logs, file times and time limits of such machines cannot be compared.",
                remedy="Set the clocks, by NTP for instance.",
            )


def meet(store: Store, rank: int, processes: int, timeout_s: float) -> str:
    """Return a name for this very set of processes, which they agree on.

    torchrun may keep its store for processes that replace these, and its agents count replacements each for itself; so
    what lies in the store may have been said by the dead. The leader proposes a fresh name, the others repeat it with a
    mark of their own, and the leader confirms it with all marks: who finds its own mark there is in.
    """
    mark, deadline = secrets.token_hex(16), time.monotonic() + timeout_s
    others = [f"joins/{other}" for other in range(1, processes)]
    if rank == 0:
        store.set("name", mark)
    while time.monotonic() < deadline:
        if rank == 0:
            replies = [store.get(key).decode().split() if store.check([key]) else [] for key in others]
            if all(words[:1] == [mark] for words in replies):
                store.set("joined", " ".join([mark, *(words[1] for words in replies)]))
                return mark
        elif store.check(["name"]):
            name = store.get("name").decode()
            store.set(f"joins/{rank}", f"{name} {mark}")
            joined = store.get("joined").decode().split() if store.check(["joined"]) else []
            if joined[:1] == [name] and mark in joined:
                return name
        time.sleep(_PAUSE_S)
    raise lost(f"process {rank} waited {timeout_s:g} s for all {processes} processes to join")


def say_first(store: Store, rank: int, message: str) -> bool:
    """Return whether no other process has failed before: the first may speak."""
    try:
        own = f"process {rank}: {message}"
        return bool(store.compare_set(_FAILURE, "", own).decode() == own)
    except RuntimeError:
        # The store is gone with the node that kept it: who is left cannot be known.
        return True


def speaks(error: StobatchError) -> bool:
    """Return whether this process tells the user, if it fails before it has joined the others."""
    if error.told:
        return True
    try:
        store, rank, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=10))))
    except (RuntimeError, ValueError):
        return True
    return _claim(store, rank)


def _claim(store: Store, rank: int) -> bool:
    """Claim the right to speak for processes that have not joined; one that was replaced has lost it."""
    key, own = "speaks before joining", f"{time.time()} {rank} {secrets.token_hex(8)}"
    try:
        before = store.compare_set(key, "", own).decode()
        if before != own and abs(time.time() - float(before.split()[0])) > _OLD_S:
            before = store.compare_set(key, before, own).decode()
        return bool(before == own)
    except RuntimeError:
        return True


def lost(what: str) -> RunError:
    return RunError(
        f"{what}.",
        why="It was killed, it hangs, or the network failed; what was reported done is saved.",
        remedy="Run the same command with --resume, or let torchrun do so: --max-restarts=3.",
    )
