"""What torchrun tells a process about itself. Imports no torch."""

from __future__ import annotations

import os


def started_by_torchrun() -> bool:
    """Return whether this process is one of a group. One that torchrun started alone is a group of one."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def attempt() -> int:
    """Return how many times torchrun has replaced processes that failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def one_of_several() -> bool:
    return started_by_torchrun() and int(os.environ["WORLD_SIZE"]) > 1


def leads() -> bool:
    """Return whether this is the process that writes and talks."""
    return not started_by_torchrun() or os.environ["RANK"] == "0"


def first_on_its_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
