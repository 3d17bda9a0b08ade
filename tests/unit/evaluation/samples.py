"""Small networks and made-up records whose answers are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import stobatch
from stobatch import RunConfig
from stobatch.evaluation.accuracy import AttackedTable
from stobatch.files import serialise_tensors, tensors_sha256, write_atomically
from stobatch.models import Classifier, ConvEncoder, DenseEncoder, ReferenceNorm
from stobatch.models.network import Head, Network
from stobatch.runs import Run
from stobatch.types import PAPER_RANGE, Norm, Radius

SIDE, CLASSES = 6, 3


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three classes of blurred patterns in [-1, 1], and their labels."""
    patterns = torch.randn(CLASSES, 1, SIDE, SIDE, generator=seeded(99)) * 0.4
    labels = torch.arange(count) % CLASSES
    noise = torch.randn(count, 1, SIDE, SIDE, generator=seeded(seed)) * 0.25
    return (patterns[labels] + noise).clamp(-1, 1), labels


def network(*, noise: float = 0.1, dtype: torch.dtype = torch.float32, normalised: bool = True) -> Network:
    """An encoder, two normalisations, fixed noise at both places; drawn, not trained."""
    torch.manual_seed(0)
    encoder = ConvEncoder((1, SIDE, SIDE), 4, 3, stride=2, padding=1)
    first, last = (ReferenceNorm((4, 3, 3)), ReferenceNorm((8,))) if normalised else (nn.Identity(), nn.Identity())
    body = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(36, 8), last)
    made = Network(encoder, Head(first, body, nn.Linear(8, CLASSES, bias=False)))
    made.set_noise(*(noise * torch.randn(shape, generator=seeded(7)) for shape in ((1, SIDE, SIDE), (4, 3, 3))))
    made.calibrate()
    return made.to(dtype).eval()


def trained(*, noise: float = 0.1) -> Network:
    """The same, trained until it is right on nearly all of `images`."""
    made = network(noise=noise)
    inputs, labels = images(150, seed=1)
    descent = torch.optim.Adam(made.parameters(), lr=0.02)
    for _ in range(60):
        descent.zero_grad()
        nn.functional.cross_entropy(3 * made(inputs), labels).backward()
        descent.step()
        made.calibrate()
    return made.requires_grad_(False)


class Formula(nn.Module):
    """A body that is a formula of the mean input, its only hidden value."""

    def __init__(self, formula: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.stack(list(self.formula(hidden[:, 0])), 1)


def of_the_mean(formula: Callable[[Tensor], Sequence[Tensor]], *, scale: float = 1.0) -> Network:
    """Two classes: logits are the formula of the mean input, cut to [-1, 1] and scaled."""
    encoder = DenseEncoder((1, 4, 4), 1)
    encoder.weight.data.fill_(1 / 16)
    output = nn.Linear(2, 2, bias=False)
    output.weight.data = scale * torch.eye(2)
    return Network(encoder, Head(nn.Identity(), Formula(formula), output)).eval().requires_grad_(False)


def with_mean(low: float, high: float, count: int = 60) -> Tensor:
    """Inputs whose means run from low to high."""
    return torch.linspace(low, high, count)[:, None, None, None].repeat(1, 1, 4, 4)


def radii(*sizes: float, norm: Norm = Norm.LINF) -> tuple[Radius, ...]:
    return tuple(Radius(size, norm, PAPER_RANGE) for size in sizes)


def table(
    columns: dict[str, Any],
    attacks: tuple[str, ...],
    sizes: tuple[float, ...],
    *,
    protocol: str = "adaptive",
    function: str = "single_pass",
) -> AttackedTable:
    plain = {name: np.asarray(column).tolist() for name, column in columns.items()}
    return AttackedTable(protocol, function, attacks, radii(*sizes), plain)


def evaluate_as(network: Classifier, config: RunConfig, out: Path) -> None:
    """Certify and evaluate as if training had ended with these weights: `certify` makes the manifest."""
    blob = serialise_tensors(network.state_dict(), {"config_hash": config.training_hash})
    write_atomically(out / "model.safetensors", lambda file: file.write(blob))
    Run(out).write("training", Run(out).read("training") | {"weights_sha256": tensors_sha256(blob)})
    (out / "manifest.json").unlink()
    stobatch.certify(out, quiet=True)
    stobatch.evaluate(out, quiet=True)
