"""What the server counts, in the text format of Prometheus; no picture, no address and no token is in it."""

from __future__ import annotations

import os
import resource
import threading
from bisect import bisect_left
from collections import Counter
from pathlib import Path

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (1, 2, 4, 8, 16, 32)


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: str) -> list[str]:
        total, lines = 0, []
        for bound, number in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += number
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
        return [*lines, f"{name}_sum{{{labels}}} {self.sum:.6f}", f"{name}_count{{{labels}}} {total}"]


class Metrics:
    """Counters of one server."""

    def __init__(self, models: dict[str, str]) -> None:
        """Models are named with their digests."""
        self.models, self._lock = models, threading.Lock()
        self.requests: Counter[tuple[str, int]] = Counter()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.seconds = {name: Histogram(SECONDS) for name in models}
        self.batches = {name: Histogram(ROWS) for name in models}

    def count_request(self, path: str, code: int) -> None:
        with self._lock:
            self.requests[path, code] += 1

    def add_batch(self, model: str, rows: int) -> None:
        with self._lock:
            self.batches[model].add(rows)

    def add_answer(self, model: str, seconds: float, **counts: int) -> None:
        with self._lock:
            self.seconds[model].add(seconds)
            for name, number in counts.items():
                self.counts[name, model] += number

    def text(self, gauges: dict[str, int]) -> str:
        with self._lock:
            lines = ["# TYPE stobatch_requests_total counter"]
            lines += [
                f'stobatch_requests_total{{path="{path}",code="{code}"}} {number}'
                for (path, code), number in sorted(self.requests.items())
            ]
            for name in sorted({name for name, _ in self.counts}):
                lines.append(f"# TYPE stobatch_{name}_total counter")
                lines += [
                    f'stobatch_{name}_total{{model="{model}"}} {number}'
                    for (counted, model), number in sorted(self.counts.items())
                    if counted == name
                ]
            for name, histograms in (("request_seconds", self.seconds), ("batch_pictures", self.batches)):
                lines.append(f"# TYPE stobatch_{name} histogram")
                for model, histogram in sorted(histograms.items()):
                    lines += histogram.lines(f"stobatch_{name}", f'model="{model}"')
        lines.append("# TYPE stobatch_model_info gauge")
        lines += [f'stobatch_model_info{{model="{name}",weights="{digest}"}} 1' for name, digest in self.models.items()]
        for name, number in gauges.items():
            lines += [f"# TYPE stobatch_{name} gauge", f"stobatch_{name} {number}"]
        used = resource.getrusage(resource.RUSAGE_SELF)
        lines += [
            "# TYPE process_cpu_seconds_total counter",
            f"process_cpu_seconds_total {used.ru_utime + used.ru_stime:.2f}",
        ]
        lines += ["# TYPE process_resident_memory_bytes gauge", f"process_resident_memory_bytes {_resident_bytes()}"]
        return "\n".join(lines) + "\n"


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
