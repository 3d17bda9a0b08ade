"""Clipped sums by a slow loop: autograd is asked for one example at a time, and knows nothing of tapes or rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.bounds.boxes import TrainingBox, worst_case_scores
from stobatch.dp.clipping import (
    Batch,
    ClippedSum,
    Clipper,
    Losses,
    clipped_sum_by_example,
    clipped_sum_in_one_pass,
)
from stobatch.models.layered import Layered, build_layered

CLASSES = 3
EXACT, SINGLE = 1e-10, 1e-4
"""Largest relative difference allowed in float64, and in float32 where sums of some hundred terms are rounded."""


def natural(network: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(network(batch[0]), batch[1], reduction="none")


def views(network: nn.Module, batch: Batch) -> Tensor:
    """Several versions of each example, and the mean of their losses."""
    scores, count = network(batch[0].flatten(0, 1)), batch[0].shape[1]
    labels = batch[1].repeat_interleave(count)
    return F.cross_entropy(scores, labels, reduction="none").unflatten(0, (-1, count)).mean(1)


def unbounded(inputs: Tensor, radius: float) -> TrainingBox:
    """As `TrainingBox.around`, but huge inputs stay huge."""
    return TrainingBox.between(inputs - radius, inputs + radius)


def certified(network: nn.Module, batch: Batch, radius: float = 0.2) -> Tensor:
    assert isinstance(network, Layered)
    scores = worst_case_scores(network.layers, unbounded(batch[0], radius), batch[1])
    return F.cross_entropy(scores, batch[1], reduction="none")


def certified_views(network: nn.Module, batch: Batch) -> Tensor:
    count = batch[0].shape[1]
    return (
        certified(network, (batch[0].flatten(0, 1), batch[1].repeat_interleave(count))).unflatten(0, (-1, count)).sum(1)
    )


def natural_and_certified(network: nn.Module, batch: Batch) -> Tensor:
    return natural(network, batch) + 0.5 * certified(network, batch)


def views_and_certified(network: nn.Module, batch: Batch) -> Tensor:
    return views(network, batch) + certified(network, (batch[0][:, 0], batch[1]))


def two_radii(network: nn.Module, batch: Batch) -> Tensor:
    return certified(network, batch, 0.1) + 2 * certified(network, batch, 0.4)


VIEWED = (views, certified_views, views_and_certified)


def layered(description: str, shape: tuple[int, ...], seed: int = 0) -> Layered:
    network = build_layered(description, shape, CLASSES, torch.Generator().manual_seed(seed))
    stir(network, seed)
    return network


def stir(network: nn.Module, seed: int = 0) -> None:
    """Biases and scales away from where they start."""
    generator = torch.Generator().manual_seed(seed)
    for value in network.parameters():
        value.data += 0.3 * torch.randn(value.shape, generator=generator)


def examples(shape: tuple[int, ...], losses: Losses = natural, count: int = 5, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    size = (count, 3, *shape) if losses in VIEWED else (count, *shape)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return torch.randn(*size, generator=generator, dtype=torch.float64), labels


def single_gradients(network: nn.Module, losses: Losses, batch: Batch) -> list[dict[str, Tensor]]:
    """Each example's gradient, from a batch of its own."""
    trained = {name: value for name, value in network.named_parameters() if value.requires_grad}
    found = []
    for row in range(len(batch[0])):
        (value,) = losses(network, tuple(entry[row : row + 1] for entry in batch))
        parts = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        found.append(
            {
                name: torch.zeros_like(parameter) if part is None else part
                for (name, parameter), part in zip(trained.items(), parts, strict=True)
            }
        )
    return found


def length(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in gradients.values()))


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return length({name: first[name] - second[name] for name in first})


def oracle(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedSum:
    """Σ min(1, C/‖g_i‖) g_i, written out."""
    singles = single_gradients(network, losses, batch)
    norms = [length(single) for single in singles]
    total = {name: torch.zeros_like(value) for name, value in singles[0].items()}
    for single, norm in zip(singles, norms, strict=True):
        for name, value in single.items():
            total[name] += min(1.0, clip_norm / max(norm, 1e-300)) * value
    return ClippedSum(total, torch.tensor(norms, dtype=torch.float64))


def agrees(one: ClippedSum, other: ClippedSum, tolerance: float) -> bool:
    scale = max(length(other.gradients), float(other.norms.max()))
    return (
        difference(one.gradients, other.gradients) <= tolerance * scale
        and float((one.norms - other.norms).abs().max()) <= tolerance * scale
    )


def assert_right(network: nn.Module, losses: Losses, batch: Batch, *, by: Clipper = clipped_sum_in_one_pass) -> None:
    """In both precisions, where nothing, something and everything is clipped."""
    for dtype, tolerance in ((torch.float64, EXACT), (torch.float32, SINGLE)):
        network, batch = network.to(dtype), (batch[0].to(dtype), *batch[1:])
        typical = float(oracle(network, losses, batch, 1.0).norms.median()) or 1.0
        for clip_norm in (1e6 * typical, typical, 0.1 * typical):
            slow = oracle(network, losses, batch, clip_norm)
            assert agrees(by(network, losses, batch, clip_norm), slow, tolerance)
            assert agrees(clipped_sum_by_example(network, losses, batch, clip_norm), slow, tolerance)


def flat(*layers: nn.Module) -> nn.Module:
    """Layers on pictures of 2 x 6 x 6, closed by scores."""
    body = nn.Sequential(*layers, nn.Flatten())
    with torch.no_grad():
        size = body(torch.zeros(1, 2, 6, 6)).shape[1]
    network = nn.Sequential(body, nn.Linear(size, CLASSES))
    stir(network)
    return network


def twice(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), layer)


PICTURE = (2, 6, 6)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": flat,
    "linear without bias": lambda: flat(nn.Flatten(), nn.Linear(72, 4, bias=False), nn.Tanh()),
    "linear on the last dimension": lambda: flat(nn.Linear(6, 4), nn.ReLU()),
    "conv": lambda: flat(nn.Conv2d(2, 3, 3), nn.ReLU()),
    "conv without bias": lambda: flat(nn.Conv2d(2, 3, 3, bias=False), nn.ReLU()),
    "conv with stride and padding": lambda: flat(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU()),
    "conv with oblong everything": lambda: flat(
        nn.Conv2d(2, 4, (3, 2), stride=(2, 3), padding=(2, 1), dilation=(2, 1)), nn.Tanh()
    ),
    "conv that leaves a border out": lambda: flat(nn.Conv2d(2, 3, 3, stride=2), nn.ReLU()),
    "wide conv": lambda: flat(nn.Conv2d(2, 24, 5), nn.ReLU(), nn.Conv2d(24, 20, 2), nn.Tanh()),
    "wide conv with padding, without bias": lambda: flat(
        nn.Conv2d(2, 32, 6, stride=(2, 3), padding=(1, 2), bias=False), nn.ReLU()
    ),
    "two convs": lambda: flat(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.Tanh()),
    "group norm": lambda: flat(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()),
    "group norm of vectors": lambda: flat(nn.Flatten(), nn.Linear(72, 6), nn.GroupNorm(2, 6), nn.Tanh()),
    "group norm without scales": lambda: flat(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4, affine=False), nn.ReLU()),
    "linear twice": lambda: flat(nn.Flatten(), nn.Linear(72, 5), twice(nn.Linear(5, 5))),
    "conv twice": lambda: flat(twice(nn.Conv2d(2, 2, 3, padding=1))),
    "wide conv twice": lambda: flat(nn.AvgPool2d(3), twice(nn.Conv2d(2, 2, 3, padding=1))),
    "group norm twice": lambda: flat(twice(nn.GroupNorm(2, 2))),
}


STACKS = {
    "linear": ("linear", (4,)),
    "two linear": ("linear 5, relu, linear", (4,)),
    "three linear": ("linear 5, tanh, linear 4, relu, linear", (4,)),
    "conv": ("conv 3 3, relu, linear", PICTURE),
    "conv with stride and padding": ("conv 3 3/2+1, relu, linear 5, tanh, linear", PICTURE),
    "two convs": ("squash 2 -0.5 0.5, conv 3 3+1, relu, maxpool 2, conv 4 2, relu, avgpool 2, linear", PICTURE),
    "wide conv": ("conv 32 5, relu, linear", PICTURE),
}
BOXED = (natural_and_certified, certified, certified_views, views_and_certified, two_radii)


def largest_change(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float, by: Clipper) -> float:
    """max ‖sum(D) - sum(D minus i)‖ over the examples i."""
    whole = by(network, losses, batch, clip_norm).gradients
    changes = []
    for row in range(len(batch[0])):
        rest = torch.arange(len(batch[0])) != row
        less = by(network, losses, tuple(entry[rest] for entry in batch), clip_norm).gradients
        changes.append(difference(whole, less))
    return max(changes)
