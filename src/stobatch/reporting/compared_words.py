"""The rows of a comparison in words, the same ones in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stobatch.reporting.tables import guarantee_line
from stobatch.reporting.words import unit

Row = dict[str, Any]
Spread = dict[str, Any]
PROTOCOLS = ("published", "adaptive")


def radius_unit(document: dict[str, Any]) -> str:
    return unit(document["norm"], document["input_range"])


def over_seeds(document: dict[str, Any]) -> str:
    """What the ± of the numbers means."""
    seeds = document["seeds"]
    named = named_seeds(document, seeds)
    kind = "public" if is_public(document) else "secret"
    spread = named if len(seeds) == 1 else f"mean ± standard deviation over {named}"
    return f"{spread} ({kind} seeds)"


def is_public(document: dict[str, Any]) -> bool:
    """Whether the seeds are public; all were before this was written down."""
    return bool(document.get("public_seeds", True))


def named_seeds(document: dict[str, Any], seeds: Sequence[int]) -> str:
    word = "seed" if is_public(document) else "training"
    return f"{word}{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def share(spread: Spread | None) -> str:
    """An accuracy over seeds.

    >>> share({"mean": 0.9012, "stddev": 0.0044}), share({"mean": 0.9012, "stddev": None}), share(None)
    ('90.1 ± 0.4%', '90.1%', '–')
    """
    return amount(spread, 100, "%")


def amount(spread: Spread | None, factor: float, unit_name: str) -> str:
    if spread is None:
        return "–"
    more = "" if spread["stddev"] is None else f" ± {factor * spread['stddev']:,.1f}"
    return f"{factor * spread['mean']:,.1f}{more}{unit_name}"


def budgets(document: dict[str, Any], row: Row) -> list[tuple[str, str]]:
    """Status and words of each guarantee that a seed of the row has; the budget never without its status."""
    found = []
    for guarantee in row["guarantees"]:
        words = "no privacy" if guarantee["status"] == "none" else guarantee_line(guarantee)
        some = f" ({named_seeds(document, guarantee['seeds'])})" if len(row["guarantees"]) > 1 else ""
        found.append((guarantee["status"], words + some))
    return found


def flagged(document: dict[str, Any], flag: Row) -> str:
    return f"{flag['row']}, {named_seeds(document, [flag['seed']])}"


def attacked(row: Row, protocol: str, radius: float) -> Spread | None:
    wanted = (protocol, radius)
    return next((entry for entry in row["attacked"] if (entry["protocol"], entry["radius"]) == wanted), None)


def certified(row: Row, radius: float) -> list[Row]:
    return [entry for entry in row["certified"] if entry["radius"] == radius]


def memory(row: Row) -> str:
    return f"{amount(row['peak_memory_mb'], 1, ' MiB')} ({' / '.join(row['peak_memory_of']) or 'not measured'})"


def by_chance(document: dict[str, Any]) -> str:
    """How many t-tests there are, how many look like findings, and how many would if there were none."""
    count = len(document["t_tests"])
    if not count:
        return "No t-tests: they need two seeds of each method or more."
    return (
        f"{count} two-tailed t-tests over seeds: {document['t_tests_below_0.05']} have p < 0.05, where "
        f"{document['t_tests_below_0.05_by_chance']:g} would by chance if nothing differed."
    )
