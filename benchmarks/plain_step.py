"""One step of the published method on MNIST beside the same step as one would write it in PyTorch.

Claim: at least three times as fast, in at most a third of the memory. A step of `published.mnist` has a batch of 2,499
benign examples and 2,499 to attack, a third each by I-FGSM, MIM and PGD in 10 steps, then one update of the network.
The plain step has the same network as stock layers (attacks.py), the same attacks written out, one cross-entropy, SGD,
and the whole batch at a time. It has no privacy noise and no reconstruction loss: it does less.

    python benchmarks/plain_step.py --rounds 5
    python benchmarks/plain_step.py --threads 1 --batch 834     # the work alone, on a machine that others fill

"Crafting passes alone" is what no step can do without: the forward and backward passes of the 10 steps, for every
example to attack, through the folded network, in a thread for each piece, and nothing else. Where the plain step takes
less than three times as long as they do, the claim cannot be met with these layers.

Memory is the most resident memory of three steps beyond that before the first, each side in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable

import torch
from attacks import stock
from published_step import stepper
from side_by_side import alternate, report
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.attacks.loop import map_chunks
from stobatch.config import MachineConfig, ModelConfig
from stobatch.models import build
from stobatch.models.folded import fold
from stobatch.training.device import PeakMemory, use_device
from stobatch_recipes import published

STEPS, SIZE = 10, 0.3


def ours(batch: int) -> Callable[[], None]:
    recipe = published.mnist()
    return stepper(recipe.replace(method=recipe.method.replace(batch_size=batch)), (1, 28, 28), rows=2 * batch)


def plain(batch: int) -> Callable[[], None]:
    network = build(ModelConfig(), (1, 28, 28), 10, torch.Generator().manual_seed(0))
    network.calibrate()
    model = stock(network).requires_grad_(True)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.rand(2 * batch, 1, 28, 28) * 2 - 1
    labels = torch.arange(2 * batch) % 10

    def gradient(points: Tensor) -> Tensor:
        leaf = points.detach().requires_grad_()
        logits = model(leaf)
        return torch.autograd.grad(F.cross_entropy(logits, logits.argmax(1)), leaf)[0]

    def attacked(inputs: Tensor, *, start: bool, momentum: bool) -> Tensor:
        points = inputs + SIZE * (2 * torch.rand_like(inputs) - 1) if start else inputs.clone()
        velocity = torch.zeros_like(inputs)
        for _ in range(STEPS):
            slope = gradient(points)
            if momentum:
                velocity = velocity + slope / slope.abs().mean((1, 2, 3), keepdim=True)
                slope = velocity
            points = points + SIZE / STEPS * slope.sign()
            points = torch.max(torch.min(points, inputs + SIZE), inputs - SIZE).clamp(-1, 1)
        return points

    def step() -> None:
        benign, third = images[:batch], batch // 3
        kinds = (
            {"start": False, "momentum": False},
            {"start": False, "momentum": True},
            {"start": True, "momentum": False},
        )
        parts = zip(images[batch:].split(third), kinds, strict=True)
        crafted = torch.cat([attacked(part, **kind) for part, kind in parts])
        optimiser.zero_grad()
        F.cross_entropy(model(torch.cat([benign, crafted])), labels).backward()
        optimiser.step()

    return step


def passes(batch: int) -> Callable[[], None]:
    network = build(ModelConfig(), (1, 28, 28), 10, torch.Generator().manual_seed(0))
    network.calibrate()
    folded, images = fold(network), torch.rand(batch, 1, 28, 28) * 2 - 1
    assert folded is not None

    def every_step(piece: slice) -> Tensor:
        for _ in range(STEPS):
            leaf = images[piece].requires_grad_()
            with torch.enable_grad():
                logits = folded(leaf)
                total = F.cross_entropy(logits, logits.argmax(1), reduction="sum")
            (slope,) = torch.autograd.grad(total, leaf)
        return slope

    return lambda: map_chunks(every_step, images, 300, concurrent=True)


SIDES = {"stobatch": ours, "plain PyTorch": plain}
FLOOR = "crafting passes alone"


def mebibytes(side: str, batch: int) -> float:
    command = [sys.executable, __file__, "--batch", str(batch), "--memory-of", side]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=2499)
    parser.add_argument("--threads", type=int, help="for everyone; with one, processor time is compared")
    parser.add_argument("--memory-of", choices=tuple(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    use_device(MachineConfig(device="cpu", threads=options.threads))
    if options.memory_of:
        step = SIDES[options.memory_of](options.batch)
        peak = PeakMemory.begin(torch.device("cpu"))
        before = peak.mebibytes() or 0.0
        for _ in range(3):
            step()
        print((peak.mebibytes() or 0.0) - before)
        return
    memory = {} if options.threads == 1 else {side: mebibytes(side, options.batch) for side in SIDES}
    for side, value in memory.items():
        print(f"  {side:<44} {value:8.0f} MiB at the peak of a step")
    sides = SIDES | {FLOOR: passes}
    measured = alternate({side: make(options.batch) for side, make in sides.items()}, rounds=options.rounds)
    alone = options.threads == 1
    ratios = {
        "plain_step_over_ours": measured.ratio("plain PyTorch", "stobatch", of_processor=alone),
        "plain_step_over_its_passes": measured.ratio("plain PyTorch", FLOOR, of_processor=alone),
    }
    if alone:
        ratios = {f"{key}_on_one_thread": value for key, value in ratios.items()}
    else:
        ratios["plain_step_over_ours_processor"] = measured.ratio("plain PyTorch", "stobatch", of_processor=True)
        ratios["memory_ours_over_plain_step"] = memory["stobatch"] / memory["plain PyTorch"]
    report(f"a published step, batch {options.batch}, three attacks of {STEPS} steps", measured, options.batch, ratios)
    if memory:
        print(json.dumps({"benchmark": "memory of a step", "ratios": {}, "mebibytes": memory}))


if __name__ == "__main__":
    main()
