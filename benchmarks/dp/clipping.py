"""Clipped gradients side by side with plain SGD, Opacus and torch.func, on the paper's MNIST network.

Claim: on a CPU, at batch 2,499, a step of DP-SGD takes at most twice the time and 1.5 times the memory of a step of
plain SGD, and does at least 2.4 times the steps of Opacus' ghost clipping and 7 times those of its default.

Everyone is handed the same whole batch and left to its own defaults; ours cuts it by `clipped_sum_in_chunks`. "Cut"
shows what the others would gain from the same: compare with those as well, since plain SGD on the whole batch spends
a good part of its time on fresh memory. A step is everything from the batch to the new parameters: losses, clipping,
zero noise, and an update by SGD with rate zero, so that every step does the same. Before anything is timed, all of
them have to find the same clipped gradient.

Memory is what a process needs at its peak beyond what it needs for a step on a batch of 8, each in a process of its
own, since a process seldom hands memory back.

    python benchmarks/dp/clipping.py                    # needs opacus (pip install --no-deps opacus opt_einsum)
    python benchmarks/dp/clipping.py --rounds 15
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812

from stobatch.config import MachineConfig
from stobatch.dp.clipping import clipped_sum_in_chunks
from stobatch.training.device import use_device

sys.path.insert(0, str(Path(__file__).parent.parent))
from side_by_side import alternate, report

BATCH, CUT = 2499, 357
OURS, PLAIN = "stobatch", "plain SGD, whole batch"
Step = Callable[[Tensor, Tensor], None]
"""Leaves the mean gradient, clipped or plain, in the parameters of the network it was made for."""
Maker = Callable[[nn.Sequential, float], Step]


def mnist_network(seed: int = 0) -> nn.Sequential:
    """stobatch's mnist_cnn without normalisation, as plain PyTorch layers that everyone understands."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, stride=2, padding=2, bias=False),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(32, 64, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 256),
        nn.Hardtanh(),
        nn.Linear(256, 10, bias=False),
    )


def losses(network: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(network(images), labels, reduction="none")


def sgd(network: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(network.parameters(), lr=0.0)


def ours(network: nn.Sequential, clip: float) -> Step:
    optimizer = sgd(network)

    def step(images: Tensor, labels: Tensor) -> None:
        total = clipped_sum_in_chunks(network, losses, (images, labels), clip, CUT)
        for name, parameter in network.named_parameters():
            parameter.grad = total.gradients[name] / len(images)
        optimizer.step()

    return step


def plain(network: nn.Sequential, _clip: float, *, cut: int = BATCH) -> Step:
    optimizer = sgd(network)

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        for part, of_part in zip(images.split(cut), labels.split(cut), strict=True):
            (F.cross_entropy(network(part), of_part, reduction="sum") / len(images)).backward()
        optimizer.step()

    return step


def opacus(network: nn.Sequential, clip: float, *, mode: str, cut: int = BATCH) -> Step:
    """Set up by its own engine; cut batches are its virtual steps, as its BatchMemoryManager takes them."""
    from opacus import PrivacyEngine

    unused = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(BATCH, 1)), batch_size=BATCH)
    made = PrivacyEngine().make_private(
        module=network.train(),
        optimizer=sgd(network),
        criterion=nn.CrossEntropyLoss(),
        data_loader=unused,
        noise_multiplier=0.0,
        max_grad_norm=clip,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    module, optimizer = made[:2]
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.expected_batch_size = len(images)
        for start in range(0, len(images), cut):
            optimizer.signal_skip_step(do_skip=start + cut < len(images))
            optimizer.zero_grad()
            criterion(module(images[start : start + cut]), labels[start : start + cut]).backward()
            optimizer.step()

    return step


def torch_func(network: nn.Sequential, clip: float, *, cut: int = BATCH) -> Step:
    optimizer = sgd(network)
    names = [name for name, _ in network.named_parameters()]

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network, parameters, image[None]), label[None])

    formed = vmap(grad(loss), in_dims=(None, 0, 0))

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        parameters = {name: p.detach() for name, p in network.named_parameters()}
        for part, of_part in zip(images.split(cut), labels.split(cut), strict=True):
            each = formed(parameters, part, of_part)
            norms = torch.stack([each[name].flatten(1).norm(dim=1) for name in names]).norm(dim=0)
            weights = (clip / norms).clamp(max=1) / len(images)
            for name, p in network.named_parameters():
                total = torch.tensordot(weights, each[name], 1)
                p.grad = total if p.grad is None else p.grad + total
        optimizer.step()

    return step


def makers() -> dict[str, Maker]:
    found: dict[str, Maker] = {
        OURS: ours,
        PLAIN: plain,
        f"plain SGD, cut to {CUT}": lambda n, c: plain(n, c, cut=CUT),
        "torch.func, whole batch": torch_func,
        f"torch.func, cut to {CUT}": lambda n, c: torch_func(n, c, cut=CUT),
    }
    if importlib.util.find_spec("opacus"):
        for mode, name in (("ghost", "Opacus ghost"), ("hooks", "Opacus default")):
            found[f"{name}, whole batch"] = lambda n, c, m=mode: opacus(n, c, mode=m)
            found[f"{name}, cut to {CUT}"] = lambda n, c, m=mode: opacus(n, c, mode=m, cut=CUT)
    return found


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(BATCH, 1, 28, 28, generator=generator) * 2 - 1
    return images, torch.randint(10, (BATCH,), generator=generator)


def median_norm(images: Tensor, labels: Tensor) -> float:
    """So that half of the examples are clipped and half are not."""
    norms = clipped_sum_in_chunks(mnist_network(), losses, (images, labels), 1.0, CUT).norms
    return float(norms.median())


def require_agreement(networks: dict[str, nn.Sequential], steps: dict[str, Step], clip: float) -> float:
    """The largest relative distance between a library's clipped gradient and the one of torch.func.

    Ours is the largest, about 1e-4, on purpose: norms are told with a margin for what rounding may hide.
    """
    images, labels = batch()
    flat = {}
    for name, step in steps.items():
        step(images, labels)
        flat[name] = torch.cat([p.grad.flatten() for p in networks[name].parameters()])
    slow = flat["torch.func, whole batch"]
    distances = {name: float((g - slow).norm() / slow.norm()) for name, g in flat.items() if "plain" not in name}
    assert max(distances.values()) < 1e-3, distances
    assert float((flat[PLAIN] - slow).norm() / slow.norm()) > 0.1, "nothing was clipped"
    assert float(slow.norm()) <= clip
    return max(distances.values())


def prepare() -> None:
    warnings.simplefilter("ignore")
    use_device(MachineConfig(device="cpu"))


def high_water() -> int:
    """Bytes this process has had in memory at most, since the mark was last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def measure_memory(name: str) -> None:
    """In a process of its own: print the peak of two whole steps beyond that of a step on 8 examples."""
    prepare()
    step, (images, labels) = makers()[name](mnist_network(), 1.0), batch()
    step(images[:8], labels[:8])
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water()
    for _ in range(2):
        step(images, labels)
    print(high_water() - before)


def memory(name: str) -> int:
    """Bytes; see `measure_memory`."""
    command = [sys.executable, __file__, "--memory-of", name]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        measure_memory(arguments.memory_of)
        return
    prepare()
    images, labels = batch()
    clip = median_norm(images, labels)
    found = makers()
    networks = {name: mnist_network() for name in found}
    steps = {name: make(networks[name], clip) for name, make in found.items()}
    if "Opacus ghost, whole batch" not in steps:
        print("Opacus is not installed and is left out: pip install --no-deps opacus opt_einsum")
    print(f"clipped gradients agree to {require_agreement(networks, steps, clip):.1e}")
    mebibytes = {name: memory(name) / 2**20 for name in found}
    candidates: dict[str, Callable[[], object]] = {
        name: lambda step=step: step(images, labels) for name, step in steps.items()
    }
    measured = alternate(candidates, rounds=arguments.rounds)
    ratios = {
        "time_ours_over_plain": measured.ratio(OURS, PLAIN),
        "time_ours_over_plain_cut": measured.ratio(OURS, f"plain SGD, cut to {CUT}"),
        "memory_ours_over_plain": mebibytes[OURS] / mebibytes[PLAIN],
        "memory_ours_over_plain_cut": mebibytes[OURS] / mebibytes[f"plain SGD, cut to {CUT}"],
    }
    for peer in ("Opacus ghost", "Opacus default", "torch.func"):
        for kind, key in (("whole batch", ""), (f"cut to {CUT}", "_cut")):
            if f"{peer}, {kind}" in candidates:
                ratio = measured.ratio(f"{peer}, {kind}", OURS)
                ratios[f"{peer.lower().replace(' ', '_')}{key}_over_ours"] = ratio
    for name, value in mebibytes.items():
        print(f"  {name:<44} {value:8.0f} MiB at the peak of a step")
    report(f"clipped training, {BATCH} images", measured, BATCH, ratios)


if __name__ == "__main__":
    main()
