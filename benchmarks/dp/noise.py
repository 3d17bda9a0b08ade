"""What exact noise from a cryptographic stream costs, beside Philox and beside a whole step of the sound method.

Claim: on one core, noise and samples from SHAKE-256, rounded exactly to the grid, are below 5% of a step of
`sound.mnist`; a draw takes a few times as long as NumPy's Philox, which is neither cryptographic nor exact.

Images are random, of MNIST's shape and number: a step does the same arithmetic on any. The same step shows how far the
float32 sum of its clipped contributions is from the exact sum, in clipping norms: the one rounding that the proof
leaves out.

    python benchmarks/dp/noise.py
    python benchmarks/dp/noise.py --rounds 9
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import stobatch
from stobatch.config import MachineConfig
from stobatch.data.partition import poisson_sample
from stobatch.dp import clipping as per_example
from stobatch.dp.layer_gradients import LayerUse
from stobatch.dp.noise import Grid, add_noise, rounded_normal
from stobatch.loading import make_network, make_plan
from stobatch.seeds import Seeds
from stobatch.sound.method import Sound
from stobatch.sound.step import DpSgdTrainable
from stobatch.training.device import use_device
from stobatch_recipes import sound

NUM_EXAMPLES, STEP = 60_000, 400
SEEDS = Seeds.reproducible(1)


def trainable() -> DpSgdTrainable:
    """`sound.mnist` on random images."""
    config, generator = sound.mnist(), torch.Generator().manual_seed(0)
    inputs = torch.rand(NUM_EXAMPLES, 1, 28, 28, generator=generator) * 2 - 1
    labels = torch.arange(NUM_EXAMPLES) % 10
    dataset = stobatch.from_tensors(inputs, labels, inputs[:10], labels[:10], num_classes=10)
    network = make_network(config, dataset.info, SEEDS, None)
    made = Sound().prepare(config, make_plan(config, dataset.info, network), network, dataset.train, SEEDS)
    assert isinstance(made, DpSgdTrainable)
    return made


def seconds(work: Callable[[], object], rounds: int) -> float:
    """The median time of some rounds."""
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def in_double(part: Any) -> Any:
    """The same recorded rows of a layer, in float64."""
    made = copy.copy(part)
    for name, value in vars(part).items():
        if isinstance(value, Tensor):
            setattr(made, name, value.double())
    made.uses = {
        kind: [LayerUse(replace(m.use, inputs=m.use.inputs.double()), m.gradient.double()) for m in all_met]
        for kind, all_met in part.uses.items()
    }
    return made


def rounding(method: DpSgdTrainable, count: int) -> float:
    """How far float32 sums of `count` examples in all are from float64 sums of the same numbers, over C."""
    real, missed = per_example._weighted_sums, dict[str, Any]()

    def both(network: Any, layers: Any, weights: Tensor) -> Any:
        small = real(network, layers, weights)
        wide = {layer: in_double(part) for layer, part in layers.items()}
        for prefix, layer in network.named_modules():
            for name, exact in wide[layer].weighted_sum(weights.double()).items() if layer in wide else ():
                missed[f"{prefix}.{name}"] = missed.get(f"{prefix}.{name}", 0) + small[f"{prefix}.{name}"] - exact
        return small

    per_example._weighted_sums = both  # type: ignore[assignment]
    try:
        inputs, labels = method.reader.fetch(torch.arange(count))
        method.contributions(inputs, labels, STEP)
    finally:
        per_example._weighted_sums = real
    return float(torch.cat([value.flatten() for value in missed.values()]).norm()) / method.plan.clip_norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    use_device(MachineConfig(threads=1))
    method = trainable()
    (task,), size = method.tasks(STEP), method.largest_release
    rate = method.plan.sampling_rate
    step = seconds(lambda: method.gradients(task, STEP), rounds)
    nothing = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in method.targets(STEP).items()}
    stddev, grid = method.noise_stddev * method.shrink, method.grid(STEP)
    noise = seconds(lambda: add_noise(nothing, stddev, SEEDS.stream("noise"), grid), 10 * rounds)
    sample = seconds(lambda: poisson_sample(NUM_EXAMPLES, rate, SEEDS.stream("sample")), 10 * rounds)
    print(f"a step of sound.mnist, one thread: {step:.2f} s, of about {method.plan.expected_batch_size} examples")
    print(f"  noise for {size:,} values: {1e3 * noise:.2f} ms, {noise / step:.2%} of the step")
    print(f"  a sample of {NUM_EXAMPLES:,} examples: {1e3 * sample:.2f} ms, {sample / step:.2%} of the step")
    unit_grid = Grid.for_noise(1.0).step
    for count in (1_000, size, 1_000_000):
        ours = seconds(lambda n=count: rounded_normal(SEEDS.stream("draws"), n, 1.0, unit_grid), 3 * rounds)  # type: ignore[misc]
        philox = np.random.Generator(np.random.Philox(key=1))
        theirs = seconds(lambda n=count, p=philox: p.standard_normal(n), 3 * rounds)  # type: ignore[misc]
        print(f"  {count:>9,} draws: {1e9 * ours / count:6.1f} ns each; Philox {1e9 * theirs / count:5.1f} ns")
    print(f"float32 sums of 2,000 clipped contributions miss the exact ones by {rounding(method, 2000):.1e} C")


if __name__ == "__main__":
    main()
