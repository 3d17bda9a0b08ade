"""Time several things alternately in one process, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """Seconds of every candidate in every round."""

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]
    """Processor time of the whole process, all its threads."""

    @property
    def seconds(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.wall.items()}

    def ratio(self, first: str, second: str, *, of_processor: bool = False) -> float:
        """Return the median over rounds of the first's time over the second's: what loads both in a round cancels."""
        times = self.cpu if of_processor else self.wall
        return statistics.median(a / b for a, b in zip(times[first], times[second], strict=True))

    def fastest(self, candidates: Iterable[str], ours: str, *, of_processor: bool = False) -> float:
        """Return the least of those ratios: the fastest of several over ours."""
        return min(self.ratio(name, ours, of_processor=of_processor) for name in candidates)


def alternate(candidates: dict[str, Callable[[], object]], *, rounds: int) -> Measured:
    """Every round runs all candidates, after one unmeasured round; every other round runs them backwards."""
    measured = Measured({name: [] for name in candidates}, {name: [] for name in candidates})
    for round_number in range(rounds + 1):
        for name in list(candidates) if round_number % 2 else list(candidates)[::-1]:
            wall, cpu = time.perf_counter(), time.process_time()
            candidates[name]()
            if round_number:
                measured.wall[name].append(time.perf_counter() - wall)
                measured.cpu[name].append(time.process_time() - cpu)
    return measured


def report(title: str, measured: Measured, units: int, ratios: dict[str, float]) -> None:
    """A table for people, and last one JSON line with the ratios."""
    print(title)
    for name, value in measured.seconds.items():
        cpu = statistics.median(measured.cpu[name])
        print(f"  {name:<44} {value:8.3f} s  {1e6 * value / units:9.1f} µs per row {1e6 * cpu / units:9.1f} of a core")
    rounded = {name: round(value, 2) for name, value in ratios.items()}
    print(json.dumps({"benchmark": title, "rounds": len(next(iter(measured.wall.values()))), "ratios": rounded}))
