"""How cost grows: processor seconds and memory of one call against one size, everything else held fixed.

    python benchmarks/scaling.py              # about ten minutes
    python benchmarks/scaling.py --small      # the three smallest sizes of each curve, two minutes

Every point is measured in a process of its own, forked from one that has imported everything: the least processor time
of three calls on one thread, and the most resident memory beyond that of the process before the first call (in MiB; a
few are noise). The exponent is the slope of log seconds against log size, by least squares, over all sizes and over the
last three: a fixed cost bends a curve at its lower end. The last line is one JSON object, from which
docs/results/scaling.md is made.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch
from published_step import stepper
from torch import nn
from torch.nn import functional as F  # noqa: N812

from stobatch import attacks, auditing, bounds, dp, votes
from stobatch.dp.accounting import noise_for
from stobatch.models.affine import ConvEncoder
from stobatch.training.device import PeakMemory
from stobatch_recipes import published

Call = Callable[[], object]
CALLS = 3


@dataclass(frozen=True)
class Curve:
    """One call against one size. `why` says where the curve bends, or why it grows as it does."""

    call: str
    against: str
    sizes: tuple[int, ...]
    expected: float
    make: Callable[[int], Call]
    why: str


def images(count: int, side: int = 28) -> torch.Tensor:
    return torch.rand(count, 1, side, side, generator=torch.Generator().manual_seed(0)) * 2 - 1


def network(*, side: int = 28, width: int = 64, layers: int = 1, classes: int = 10) -> nn.Sequential:
    """A convolution with stride 2, dense layers, one score per class."""
    torch.manual_seed(0)
    size = 8 * (side // 2) ** 2
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), nn.ReLU())]
    first = (nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(size, width), nn.ReLU())
    return nn.Sequential(*first, *hidden, nn.Linear(width, classes)).eval()


def losses(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def published_step(batch: int = 300, steps: int = 3) -> Call:
    recipe = published.mnist()
    recipe = recipe.replace(method=recipe.method.replace(batch_size=batch, train_attack_steps=steps))
    return stepper(recipe, (1, 28, 28), rows=2 * batch)


def clipped_step(batch: int = 512, **shape: int) -> Call:
    model, inputs = network(**shape), images(batch, shape.get("side", 28))
    labels = torch.arange(batch) % 10
    return lambda: dp.add_noise(sums := dp.clipped_sum(model, losses, (inputs, labels), 1.0), sums.noise_stddev(1.0))


def certificate(count: int = 32, **shape: int) -> Call:
    model, inputs = network(**shape), images(count, shape.get("side", 28))
    return lambda: bounds.certify(model, inputs, 0.01, slope_steps=0)


def attack(count: int = 256, steps: int = 10, **shape: int) -> Call:
    model, inputs = network(**shape), images(count, shape.get("side", 28))
    away = model(inputs).argmin(1)
    return lambda: attacks.attack(model, inputs, away, 1e-3, name="madry", steps=steps, targeted=True)


def vote(count: int = 8, draws: int = 1000) -> Call:
    model, inputs = network(), images(count)
    return lambda: votes.certify(model, inputs, 0.25, draws=draws, generator=torch.Generator().manual_seed(0))


def accountant(steps: int, rate: float = 0.001) -> Call:
    """A noise of its own for every call: results are kept."""
    noise = iter(np.linspace(1.0, 1.01, 64))
    return lambda: dp.epsilon(noise_multiplier=float(next(noise)), poisson_sampling_rate=rate, steps=steps, delta=1e-5)


def noise_search(steps: int) -> Call:
    targets = iter(np.linspace(1.0, 1.01, 64))
    return lambda: noise_for(float(next(targets)), 1e-5, 0.001, steps)


def audit(canaries: int) -> Call:
    generator = np.random.default_rng(0)
    included = generator.random(canaries) < 0.5
    scores = included + generator.normal(size=canaries)
    return lambda: auditing.one_run_bound(scores, included, delta=1e-5)


def first_layer_norms(values: int) -> Call:
    side = round(values**0.5)
    encoder = ConvEncoder((1, side, side), 32, 5, stride=2, padding=2)
    return encoder.operator_norms


STEP, CLIPPED, BOUND, ATTACK = "published step", "clipped step", "certificate by bounds", "attack (PGD)"
CURVES = (
    Curve(STEP, "batch", (150, 300, 600, 1200), 1, lambda n: published_step(batch=n), "pieces of 357 rows"),
    Curve(STEP, "attack steps", (2, 4, 8, 16), 1, lambda n: published_step(steps=n), "the update itself does not grow"),
    Curve(CLIPPED, "batch", (512, 1024, 2048, 4096), 1, clipped_step, "noise does not grow"),
    Curve(CLIPPED, "image side", (14, 28, 56, 84), 2, lambda n: clipped_step(256, side=n), "pixels grow by 2"),
    Curve(CLIPPED, "layers", (2, 8, 32, 64), 1, lambda n: clipped_step(layers=n), "the convolution does not grow"),
    Curve(BOUND, "examples", (16, 32, 64, 128), 1, certificate, "bounds example by example"),
    Curve(
        BOUND, "image side", (14, 20, 28, 40), 2, lambda n: certificate(16, side=n),
        "back-substitution of a fixed number of dense neurons through pixels",
    ),
    Curve(
        BOUND, "layers", (2, 4, 8, 16), 1, lambda n: certificate(layers=n),
        "intervals between the layers, and one way back; the first layers weigh most",
    ),
    Curve(BOUND, "classes", (5, 10, 20, 40), 1, lambda n: certificate(classes=n), "one lead for each other class"),
    Curve(ATTACK, "examples", (256, 512, 1024, 2048), 1, attack, "pieces of 357 rows"),
    Curve(ATTACK, "steps", (10, 20, 40, 80), 1, lambda n: attack(steps=n), "points keep their size"),
    Curve("vote", "draws", (1000, 2000, 4000, 8000), 1, lambda n: vote(draws=n), "2,000 rows at once"),
    Curve("vote", "examples", (4, 8, 16, 32), 1, lambda n: vote(count=n), "2,000 rows at once"),
    Curve(
        "accountant, q = 0.001", "steps", (100, 1000, 10_000, 100_000), 0, accountant,
        "one transform of the composed law, whose width grows by the root of the steps, up to a million points",
    ),
    Curve(
        "search for the noise, q = 0.001, ε = 1", "steps", (100, 1000, 10_000), 0, noise_search,
        "some eight calls of the accountant",
    ),
    Curve("audit of one run", "canaries", (500, 1000, 2000, 4000), 1, audit, "a bisection over ε for each guess count"),
    Curve(
        "norms of a first layer", "input values", (196, 784, 1600, 2304), 3, first_layer_norms,
        "a Cholesky factor proves the largest eigenvalue; beyond 4,096 values a bound without it takes its place",
    ),
)  # fmt: skip


def measure_here(curve: Curve, size: int, answer: Connection) -> None:
    torch.set_num_threads(1)
    call = curve.make(size)
    peak = PeakMemory.begin(torch.device("cpu"))
    before, seconds = peak.mebibytes() or 0.0, []
    for _ in range(CALLS):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    answer.send((min(seconds), max(0.0, (peak.mebibytes() or 0.0) - before)))


def measure(curve: Curve, size: int) -> tuple[float, float]:
    """Seconds and MiB, from a process of its own."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=measure_here, args=(curve, size, there))
    process.start()
    there.close()
    found: tuple[float, float] = here.recv()
    process.join()
    return found


def exponent(sizes: tuple[int, ...], values: list[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-9)), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", help="curves whose names begin so")
    options = parser.parse_args()
    torch.set_num_threads(1)  # before anything runs in parallel: a fork inherits no threads
    found = []
    for curve in (curve for curve in CURVES if curve.call.startswith(options.only)):
        sizes = curve.sizes[: 3 if options.small else None]
        points = [measure(curve, size) for size in sizes]
        seconds, mebibytes = ([round(point[i], 6) for point in points] for i in (0, 1))
        slopes = {"all": exponent(sizes, seconds), "last three": exponent(sizes[-3:], seconds[-3:])}
        print(
            f"{curve.call} against {curve.against} {sizes}: seconds {[f'{value:.3g}' for value in seconds]}, "
            f"MiB {[round(value) for value in mebibytes]}, exponent {slopes['last three']:.2f}, "
            f"expected {curve.expected:g}",
            flush=True,
        )
        found.append(
            {
                "call": curve.call, "against": curve.against, "sizes": sizes, "seconds": seconds,
                "mebibytes": [round(value, 1) for value in mebibytes], "expected": curve.expected,
                "exponents": {name: round(value, 2) for name, value in slopes.items()}, "why": curve.why,
            }
        )  # fmt: skip
    print(json.dumps({"benchmark": "scaling", "torch": torch.__version__, "curves": found}))


if __name__ == "__main__":
    main()
