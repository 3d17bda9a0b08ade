"""Time several things alternately in one process, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable


def alternate(candidates: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """Median seconds of each candidate; every round runs all of them, after one unmeasured round."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if round_number:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def report(title: str, seconds: dict[str, float], units: dict[str, int], ratios: dict[str, float]) -> None:
    """A table for people, and last one JSON line with the ratios."""
    print(title)
    for name, value in seconds.items():
        print(f"  {name:<44} {value:8.3f} s  {1e6 * value / units[name]:9.1f} µs per row")
    print(json.dumps({"benchmark": title, "ratios": {name: round(value, 2) for name, value in ratios.items()}}))
