"""Certified images per second by linear bounds, beside a plain vectorised CROWN.

Claim: more certified images per second than CROWN as one would write it in PyTorch (below: without a bound on memory,
and rounding as it likes). Ours begins with cheaper, looser bounds (intervals between the layers); where they fail it
follows hidden values back, then improves slopes; rounding is part of what it proves. Both counts are shown.
auto_LiRPA's CROWN runs beside them where it is installed (`pip install --no-deps auto_LiRPA`).

    python benchmarks/bounds.py --rounds 5
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from itertools import pairwise

import torch
from side_by_side import alternate, report
from torch import Tensor, nn

from stobatch import bounds

IMAGES, SIZE = 32, 0.0005


def network() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = (784, 256, 128, 64)
    hidden = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], 10)).eval().requires_grad_(False)


@torch.no_grad()
def crown(model: nn.Sequential, inputs: Tensor, size: float) -> Tensor:
    """Return which images keep their label: every layer bounded by going back through all before it."""
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    rows = inputs.flatten(1)
    low, high = (rows - size).clamp(-1, 1), (rows + size).clamp(-1, 1)
    relaxed: list[tuple[Tensor, Tensor, Tensor]] = []

    def back(coefficients: Tensor, depth: int) -> Tensor:
        """Return the lower bound of coefficients times the values before layer `depth`'s ReLU."""
        constant = torch.zeros(coefficients.shape[:2])
        for number in range(depth, -1, -1):
            constant = constant + coefficients @ layers[number].bias
            coefficients = coefficients @ layers[number].weight
            if number:
                lower, upper, offset = relaxed[number - 1]
                constant = constant + (coefficients.clamp(max=0) * offset[:, None]).sum(2)
                coefficients = coefficients.clamp(min=0) * lower[:, None] + coefficients.clamp(max=0) * upper[:, None]
        at_low, at_high = coefficients.clamp(min=0), coefficients.clamp(max=0)
        return constant + (at_low * low[:, None]).sum(2) + (at_high * high[:, None]).sum(2)

    for depth, layer in enumerate(layers[:-1]):
        identity = torch.eye(layer.out_features).expand(len(rows), -1, -1)
        least, most = back(identity, depth), -back(-identity, depth)
        slope = most.clamp(min=0) / (most.clamp(min=0) - least.clamp(max=0)).clamp(min=1e-12)
        slope = torch.where(least >= 0, 1.0, slope)
        lower = torch.where(least >= 0, 1.0, (most > -least).float() * (most > 0))
        relaxed.append((lower, slope, torch.where((least < 0) & (most > 0), -slope * least, 0.0)))
    label = model(inputs).argmax(1)
    leads = torch.eye(10)[label][:, None] - torch.eye(10)[None]
    others = torch.ones(len(rows), 10, dtype=torch.bool).scatter(1, label[:, None], value=False)
    return (back(leads, len(layers) - 1) > 0).logical_or(~others).all(1)


def lirpa(model: nn.Sequential, inputs: Tensor, size: float) -> Callable[[], Tensor] | None:
    if importlib.util.find_spec("auto_LiRPA") is None:
        return None
    try:
        from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm
    except ImportError as error:  # it asks for packages of its own, and for older ones of PyTorch
        print(f"auto_LiRPA cannot be imported: {error}")
        return None
    bounded = BoundedModule(model, inputs, device="cpu")
    label = model(inputs).argmax(1)
    leads = torch.eye(10)[label][:, None] - torch.eye(10)[None]
    leads = torch.stack([lead[torch.arange(10) != own] for lead, own in zip(leads, label, strict=True)])
    ends = {"x_L": (inputs - size).clamp(-1, 1), "x_U": (inputs + size).clamp(-1, 1)}

    def run() -> Tensor:
        ball = BoundedTensor(inputs, PerturbationLpNorm(norm=float("inf"), eps=size, **ends))
        lower, _ = bounded.compute_bounds(x=(ball,), C=leads, method="CROWN", bound_upper=False)
        return (lower > 0).all(1)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    model = network()
    inputs = torch.rand(IMAGES, 1, 28, 28, generator=torch.Generator().manual_seed(1)) * 2 - 1
    candidates: dict[str, Callable[[], Tensor]] = {
        "stobatch": lambda: torch.as_tensor(bounds.certify(model, inputs, SIZE).certified(SIZE)),
        "stobatch, no slopes": lambda: torch.as_tensor(
            bounds.certify(model, inputs, SIZE, slope_steps=0).certified(SIZE)
        ),
        "plain CROWN": lambda: crown(model, inputs, SIZE),
    }
    if (other := lirpa(model, inputs, SIZE)) is not None:
        candidates["auto_LiRPA CROWN"] = other
    certified = {name: int(run().sum()) for name, run in candidates.items()}
    for name, count in certified.items():
        print(f"  {name:<44} {count:4d} of {IMAGES} certified at linf {SIZE}")
    measured = alternate(dict(candidates), rounds=rounds)

    def per_second(name: str, other: str) -> float:
        return measured.ratio(other, name) * certified[name] / max(1, certified[other])

    ratios = {
        "certified_per_second_over_plain_crown": per_second("stobatch", "plain CROWN"),
        "certified_per_second_without_slopes_over_plain_crown": per_second("stobatch, no slopes", "plain CROWN"),
        "certified_ours_over_plain_crown": certified["stobatch"] / max(1, certified["plain CROWN"]),
    }
    if other is not None:
        ratios["certified_per_second_over_auto_lirpa"] = per_second("stobatch", "auto_LiRPA CROWN")
    report(f"linear bounds, {IMAGES} images", measured, IMAGES, ratios)


if __name__ == "__main__":
    main()
