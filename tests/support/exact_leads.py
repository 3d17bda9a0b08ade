"""The smallest lead of a tiny network over a ball, by enumeration in rational arithmetic."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, product

import torch
from torch import Tensor, nn

from stobatch.models.layered import Squash

Line = tuple[Fraction, Fraction, Fraction]
"""a, b, c of the line ax + by + c = 0."""


def small_network(seed: int, slope: float = 1.5) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Squash(slope), nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3)).requires_grad_(False)


def examples(count: int = 6) -> Tensor:
    return torch.rand(count, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1


def exact_minimum(layers: nn.Sequential, centre: Tensor, radius: float, label: int) -> Fraction:
    """The smallest lead over the ball, in rational arithmetic.

    The lead is linear on each cell that the ReLUs' lines cut out of the squashed box, so it is smallest at a corner of
    a cell: where two lines, or a line and a side of the box, meet.
    """
    squash, first, _, last = layers
    assert isinstance(squash, Squash)
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    one, slope, size = Fraction(1), Fraction(squash.slope), Fraction(radius)

    def squashed(value: Fraction) -> Fraction:
        return max(-one, min(one, slope * max(-one, min(one, value))))

    ends = [(squashed(Fraction(x) - size), squashed(Fraction(x) + size)) for x in centre.tolist()]
    weights = [[Fraction(w) for w in row] for row in first.weight.tolist()]
    neurons: list[Line] = [(w[0], w[1], Fraction(b)) for w, b in zip(weights, first.bias.tolist(), strict=True)]
    sides: list[Line] = [(one, Fraction(0), -end) for end in ends[0]] + [(Fraction(0), one, -end) for end in ends[1]]
    corners: list[tuple[Fraction, Fraction]] = list(product(*ends))
    for (a, b, c), (d, e, f) in combinations(neurons + sides, 2):
        if a * e != b * d:
            corners.append(((b * f - c * e) / (a * e - b * d), (c * d - a * f) / (a * e - b * d)))
    inside = [p for p in corners if all(low <= v <= high for v, (low, high) in zip(p, ends, strict=True))]
    rows = [[Fraction(w) for w in row] for row in last.weight.tolist()]
    biases = [Fraction(b) for b in last.bias.tolist()]

    def lead(point: tuple[Fraction, Fraction]) -> Fraction:
        hidden = [max(Fraction(0), a * point[0] + b * point[1] + c) for a, b, c in neurons]
        scores = [
            bias + sum(w * h for w, h in zip(row, hidden, strict=True)) for row, bias in zip(rows, biases, strict=True)
        ]
        return scores[label] - max(score for j, score in enumerate(scores) if j != label)

    return min(lead(point) for point in inside)
