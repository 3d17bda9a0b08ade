"""A private step of a residual network with several views of each example, on a GPU, part by part.

Goal: at batch 4,096 with four views in bfloat16, a network of 1.9 million parameters on 32 x 32 pictures takes at most
0.15 s a step, and at most 2.5 times a plain step; on 14 x 14 means a quarter. Missed so far: docs/results/speed.md.

Before anything is timed, norms and sums are compared with gradients formed one by one in float64, contributions of
single examples with C, and sums of bfloat16 numbers with float64 sums. "Plain" is the same passes, with the gradient of
the mean loss. A row "layer" is what clipping takes for it beside the passes: forming or norms, then the weighted sum.

    python benchmarks/dp/views_step.py --device cuda [--batch 4096] [--views 4]
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.grad import conv2d_weight

from stobatch.config import DataConfig, MachineConfig
from stobatch.data import from_tensors
from stobatch.dp.clipping import Batch, _in_full, clipped_sum_by_example, clipped_sum_in_one_pass, perturbed_weights
from stobatch.dp.layer_gradients import LAYER_GRADIENTS, ConvGradients, LayerUse, Tape, _gram, weighted_rows
from stobatch.dp.noise import add_noise
from stobatch.loading import make_network, make_plan
from stobatch.methods import method_of
from stobatch.models import build_layered
from stobatch.models.layered import Layered
from stobatch.seeds import Seeds
from stobatch.training.device import use_device
from stobatch.training.engines import InProcessEngine
from stobatch.training.trainable import working_precision
from stobatch_recipes import sound

LARGE = "centred 64 3+1, residual 80 16, residual 160 16/2, residual 320 16/2, groupnorm 16, relu, avgpool 8, linear"
MEANS = (
    "avgpool 2, centred 64 3+1, residual 64 16, residual 128 16/2, residual 256 16/2, groupnorm 16, relu, avgpool 4, "
    "linear"
)
NETWORKS = {
    "14 x 14 means of 28 x 28, recipe": (sound.cifar10_smoothed().model.architecture, 28),
    "14 x 14 means of 28 x 28": (MEANS, 28),
    "32 x 32": (LARGE, 32),
}
CLIP = 1.0


def losses(network: nn.Module, batch: Batch) -> Tensor:
    views, labels = batch
    scores = network(views.flatten(0, 1)).float()
    each = F.cross_entropy(scores, labels.repeat_interleave(views.shape[1]), reduction="none")
    return each.view(len(labels), -1).mean(1)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The median of some rounds, after two that do not count."""
    spent = []
    for _ in range(rounds + 2):
        wait(device)
        started = time.perf_counter()
        work()
        wait(device)
        spent.append(time.perf_counter() - started)
    return sorted(spent[2:])[rounds // 2]


def row(name: str, spent: float, note: str = "") -> None:
    print(f"{name:58s} {1000 * spent:9.2f} ms  {note}", flush=True)


def length(gradients: dict[str, Tensor]) -> float:
    return float(torch.cat([value.flatten() for value in gradients.values()]).double().norm())


def compare(network: Layered, batch: Batch, precision: str) -> None:
    """Print how far the fast way is from float64, and the longest contribution over C."""
    device = network.device
    exact = copy.deepcopy(network).double()
    with perturbed_weights(network), perturbed_weights(exact):
        slow = clipped_sum_by_example(exact, losses, (batch[0].double(), batch[1]), 0.01)
        with working_precision(precision, device):
            fast = clipped_sum_in_one_pass(network, losses, batch, 0.01)
            alone = [
                clipped_sum_in_one_pass(network, losses, tuple(entry[i : i + 1] for entry in batch), 0.01)
                for i in range(len(batch[0]))
            ]
    apart = max(
        float((fast.gradients[name] - value).norm() / value.norm().clamp(min=1e-12))
        for name, value in slow.gradients.items()
    )
    norms = float((fast.norms / slow.norms - 1).abs().max())
    longest = max(length(one.gradients) for one in alone) / 0.01
    print(
        f"{precision}: norms off by {norms:.1e}, sums by {apart:.1e}; longest contribution {longest:.7f} C", flush=True
    )
    assert longest <= 1 + 1e-5
    assert norms < (0.1 if precision == "bfloat16" else 1e-3)


def compare_sums(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randn(4096, 20_000, device=device, generator=generator).bfloat16()
    weights = torch.rand(4096, device=device, generator=generator)
    exact = weights.double() @ values.double()
    found = weighted_rows(weights, values)
    print(f"sums of bfloat16: off by {float((found - exact).norm() / exact.norm()):.1e} of their length", flush=True)


@contextmanager
def recorded(network: Layered, batch: Batch) -> Iterator[dict[str, tuple[nn.Module, list[LayerUse]]]]:
    """The uses of each layer with their gradients, as clipping form them."""
    with Tape(network) as tape, torch.enable_grad():
        total = losses(network, batch).sum()
    uses = [(layer, use) for layer, all_uses in tape.uses.items() for use in all_uses]
    gradients = torch.autograd.grad(total, [use.at for _, use in uses])
    names = {module: name for name, module in network.named_modules()}
    yield {
        f"{names[layer]} {type(layer).__name__} {tuple(use.inputs.shape[1:])}": (
            layer,
            [_in_full(LayerUse(use, gradient), layer)],
        )
        for (layer, use), gradient in zip(uses, gradients, strict=True)
    }


def by_layer(network: Layered, batch: Batch, rounds: int) -> None:
    device, count = network.device, len(batch[0])
    weights = torch.rand(count, device=device)
    with working_precision("bfloat16", device), recorded(network, batch) as met:
        for name, (layer, uses) in met.items():
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                kind = LAYER_GRADIENTS[type(layer)]
                made = kind(layer, uses, count)
                norms = seconds(lambda k=kind, one=layer, u=uses: k(one, u, count).squared_norms(), device, rounds)
                sums = seconds(lambda m=made: m.weighted_sum(weights), device, rounds)
                note = ""
                if isinstance(made, ConvGradients) and not name.startswith("layers.1 "):
                    note = variants(made, uses[0], layer, device, count, rounds)
                del made
            row(f"layer {name}", norms + sums, f"forming and norms {1e3 * norms:.2f}, sum {1e3 * sums:.2f}{note}")


def variants(
    made: ConvGradients, met: LayerUse, layer: nn.Module, device: torch.device, count: int, rounds: int
) -> str:
    """Norms alone by other ways: inner products of rows, and a grouped convolution; on an eighth of the examples."""
    few = max(1, count // 8)
    per = len(met.gradient) // count
    a, g = met.use.inputs[: few * per], met.gradient[: few * per]
    assert isinstance(layer, nn.Conv2d)
    window = made.window

    def gram() -> object:
        rows = F.unfold(a, layer.kernel_size, window.dilation, window.padding, window.stride).mT
        return _gram(rows.reshape(few, -1, rows.shape[-1]), g.flatten(2).mT.reshape(few, -1, g.shape[1]))

    def grouped() -> object:
        inputs = a.reshape(few, per, *a.shape[1:]).transpose(0, 1).reshape(per, -1, *a.shape[2:])
        outputs = g.reshape(few, per, *g.shape[1:]).transpose(0, 1).reshape(per, -1, *g.shape[2:])
        size = (few * g.shape[1], a.shape[1], *layer.kernel_size)
        return conv2d_weight(inputs, size, outputs, window.stride, window.padding, window.dilation, groups=few)

    found = []
    for name, way in (("rows", gram), ("grouped", grouped)):
        try:
            found.append(f"{name} {8e3 * seconds(way, device, 1):.1f}")
        except RuntimeError as error:
            found.append(f"{name}: {str(error).splitlines()[0][:40]}")
    return "; norms by " + ", by ".join(found)


def passes(network: Layered, batch: Batch, rounds: int) -> None:
    device = network.device
    parameters = list(network.parameters())

    def plain() -> None:
        torch.autograd.grad(losses(network, batch).mean(), parameters)

    def forward() -> None:
        losses(network, batch)

    def clipped() -> None:
        clipped_sum_in_one_pass(network, losses, batch, CLIP)

    def at_outputs() -> None:
        with recorded(network, batch):
            pass

    with working_precision("bfloat16", device):
        base = seconds(plain, device, rounds)
        row("plain step, bfloat16", base)
        row("forward", seconds(forward, device, rounds))
        row("forward, and backward to outputs", seconds(at_outputs, device, rounds))
        ours = seconds(clipped, device, rounds)
        row("clipped sum, bfloat16", ours, f"{ours / base:.2f} of plain")
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


def channels_last(network: Layered, batch: Batch, rounds: int) -> None:
    """A plain step with the other layout of pictures, which clipping does not use."""
    views, labels = batch
    last = copy.deepcopy(network).to(memory_format=torch.channels_last)
    moved = views.flatten(0, 1).to(memory_format=torch.channels_last).view_as(views), labels
    with working_precision("bfloat16", network.device):
        spent = seconds(
            lambda: torch.autograd.grad(losses(last, moved).mean(), list(last.parameters())), network.device, rounds
        )
    row("plain step, channels last", spent)


def whole_step(batch_size: int, views: int, device: torch.device, steps: int) -> None:
    """Steps of the library itself, with samples, views, noise and sums, on made-up records."""
    count = 12 * batch_size
    inputs = torch.rand(count, 3, 28, 28) * 2 - 1
    labels = torch.arange(count) % 10
    dataset = from_tensors(inputs, labels, inputs[:10], labels[:10], num_classes=10)
    config = (
        sound.cifar10_smoothed()
        .override_all(
            {
                "method.batch_size": batch_size,
                "method.augmented_views": views,
                "machine.device": str(device),
                "machine.precision": "bfloat16",
                "machine.memory_mb": 90_000 if device.type == "cuda" else 512,
                "training.steps": 1000,
            }
        )
        .replace(data=DataConfig(name="tensors"))
    )
    seeds = Seeds.reproducible(0)
    network = make_network(config, dataset.info, seeds, None, None).to(device)
    plan = make_plan(config, dataset.info, None)
    started = time.perf_counter()
    trainable = method_of(config).prepare(config, plan, network, dataset.train, seeds)
    print(
        f"prepared in {time.perf_counter() - started:.1f} s; {trainable.clip.__name__}, {trainable.chunk} rows at once"
    )
    engine, step = InProcessEngine(), iter(range(10**6))
    with working_precision("bfloat16", device):
        row("step of the library, recipe", seconds(lambda: trainable.release(next(step), engine), device, steps))
    zeros = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in network.named_parameters()}
    row("of it: privacy noise", seconds(lambda: add_noise(zeros, 1.0, seeds.stream("n")), device, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--views", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = use_device(MachineConfig(device=options.device))
    print(torch.__version__, torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", flush=True)
    compare_sums(device)
    for name, (layers, side) in NETWORKS.items():
        torch.cuda.empty_cache()
        network = build_layered(layers, (3, side, side), 10, torch.Generator().manual_seed(0)).to(device)
        assert isinstance(network, Layered)
        print(f"\n{name}: {sum(p.numel() for p in network.parameters()):,} parameters", flush=True)
        generator = torch.Generator(device).manual_seed(1)
        views = torch.rand(options.batch, options.views, 3, side, side, device=device, generator=generator) * 2 - 1
        labels = torch.arange(options.batch, device=device) % 10
        for precision in ("float32", "bfloat16"):
            compare(network, (views[:4], labels[:4]), precision)
        passes(network, (views, labels), options.rounds)
        by_layer(network, (views, labels), 1)
        if name == next(iter(NETWORKS)):
            whole_step(options.batch, options.views, device, 2 * options.rounds)
    channels_last(network, (views, labels), options.rounds)


if __name__ == "__main__":
    main()
