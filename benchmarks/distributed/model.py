"""How training scales, from what was measured: steps and all-reduces on 16 cores, and one GPU by batch size.

    python benchmarks/distributed/model.py            # reads measured.json beside it

A step of W devices takes

    T(W) = compute(B / W) + once + 2 (W - 1) (latency + bytes / (W · bandwidth)),

with `once` what every process repeats (the descent, the reference statistics), and a ring for the all-reduce. The model
is first held against steps that were measured with 1 to 16 processes, and then carried on to 128 devices, the paper's
reference recipe: 128 x 32 images.

`measured.json` was put together from these, on one machine (with W = 1 without torchrun, on a core of its own):

    torchrun --standalone --nproc-per-node=W steps.py --batch 768 --pieces 16 --steps 2        # strong
    torchrun --standalone --nproc-per-node=W steps.py --batch $((96 * W)) --pieces W --steps 2 # weak
    torchrun --standalone --nproc-per-node=W all_reduce.py
    python steps.py --device cuda --precision float32 bfloat16 --batch 33 66 129 258 516 1029 1851 4098 --steps 4
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MEASURED = Path(__file__).with_name("measured.json")
TOTAL, EACH = 4096, 32
"""The reference recipe's whole batch, and the images of each of its 128 devices."""


@dataclass(frozen=True)
class Wire:
    """What an all-reduce around a ring costs."""

    latency_s: float
    bandwidth: float

    def seconds(self, size: int, devices: int) -> float:
        return 2 * (devices - 1) * (self.latency_s + size / (devices * self.bandwidth)) if devices > 1 else 0.0

    @classmethod
    def fitted(cls, measured: dict[str, list[dict[str, float]]]) -> Wire:
        """Least squares on relative errors, over all sizes and numbers of processes."""
        rows = [
            (int(w), row["bytes"], row["seconds"]) for w, found in measured.items() for row in found if row["bytes"] > 8
        ]
        design = np.array([[2 * (w - 1) / s, 2 * (w - 1) / w * size / s] for w, size, s in rows])
        latency, inverse = np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)[0]
        return cls(float(latency), 1 / float(inverse))


def once(found: dict[str, object]) -> float:
    """What a step takes beside computing and waiting."""
    return statistics.mean(found["seconds"]) - float(found["computing_s"]) - float(found["waiting_s"])  # type: ignore[arg-type]


def held_against(record: dict[str, dict], wire: Wire) -> None:
    strong = record["strong"]
    alone, size = statistics.median(strong["1"]["seconds"]), strong["2"]["message_bytes"]
    repeated = statistics.median(once(strong[w]) for w in strong if w != "1")
    print(f"all-reduce, gloo on one machine: {wire.latency_s * 1e6:.0f} µs and {wire.bandwidth / 1e9:.2f} GB/s")
    print(f"one step of {strong['1']['batch']} + {strong['1']['batch']} images on one core: {alone:.1f} s, "
          f"of which every process repeats {repeated:.2f} s")  # fmt: skip
    print(f"message {size / 1e6:.1f} MB a step, gradients {strong['2']['gradient_bytes'] / 1e6:.1f} MB\n")
    print("processes   measured   model   efficiency   waiting      weak: measured   efficiency")
    for w in strong:
        n, weak = int(w), record["weak"][w]
        seconds, base = statistics.median(strong[w]["seconds"]), statistics.median(record["weak"]["1"]["seconds"])
        model = (alone - repeated) / n + repeated + wire.seconds(size, n)
        waiting = strong[w]["waiting_s"] or 0.0
        each = statistics.median(weak["seconds"])
        print(f"{n:9d} {seconds:9.2f} s {model:6.2f} s {alone / n / seconds:11.0%} {waiting:8.2f} s {each:17.2f} s "
              f"{base / each:11.0%}")  # fmt: skip


def carried_on(record: dict[str, list], precision: str, size: int, wire: Wire, what: str) -> None:
    rows = sorted(
        (row["batch"], statistics.median(row["seconds"])) for row in record["gpu"] if row["precision"] == precision
    )
    batches, taken = (np.array(column) for column in zip(*rows, strict=True))

    def compute(batch: float) -> float:
        return float(np.interp(batch, batches, taken))

    print(f"\nH200, {precision}, {size / 1e6:.1f} MB a step; all-reduce {what}")
    print("devices   images each   strong: step   speed-up   of it communication      weak: step   images/s")
    for devices in (1, 2, 4, 8, 16, 32, 64, 128):
        on_wire = wire.seconds(size, devices)
        strong = compute(TOTAL / devices) + on_wire
        weak = compute(EACH) + on_wire
        print(f"{devices:7d} {TOTAL // devices:13d} {strong * 1e3:11.0f} ms {compute(TOTAL) / strong:9.1f}x "
              f"{on_wire / strong:20.0%} {weak * 1e3:15.0f} ms {EACH * devices / weak:10.0f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, default=MEASURED)
    parser.add_argument(
        "--bandwidth", type=float, default=20e9, help="of your network, bytes a second; not measured here"
    )
    parser.add_argument("--latency", type=float, default=20e-6, help="of a hop, seconds; not measured here")
    given = parser.parse_args()
    record = json.loads(given.measured.read_text())
    wire = Wire.fitted(record["all_reduce"])
    held_against(record, wire)
    exact, rounded = record["strong"]["2"]["message_bytes"], record["strong"]["2"]["gradient_bytes"]
    yours = Wire(given.latency, given.bandwidth)
    assumed = f"assumed: {given.bandwidth / 1e9:.0f} GB/s, {given.latency * 1e6:.0f} µs"
    carried_on(record, "float32", exact, wire, "as measured with gloo")
    carried_on(record, "float32", exact, yours, assumed)
    carried_on(record, "bfloat16", rounded, yours, f"{assumed}, machine.exact_sums=false")


if __name__ == "__main__":
    main()
