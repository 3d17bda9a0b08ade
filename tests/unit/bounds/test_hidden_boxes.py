"""Boxes of hidden values: no deployed pass leaves them, CROWN's are no better, and nothing that was proved is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from stobatch.bounds import propagation as module
from stobatch.bounds.branching import Effort
from stobatch.bounds.certifier import BoxCertifier
from stobatch.bounds.linear import Box
from stobatch.bounds.propagation import hidden_boxes, nodes_of

SIZE = 0.05
SHAPE = (1, 6, 6)


def dense(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    hidden = [part for a, b in ((36, 24), (24, 16), (16, 12)) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(12, 4)).eval().requires_grad_(False)


def convolutional(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    first, second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 5, 3, stride=2)
    layers = (first, nn.ReLU(), second, nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(5, 8), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(8, 4)).eval().requires_grad_(False)


class Residual(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.flat, self.relu = nn.Flatten(), nn.ReLU()
        self.first, self.second, self.third, self.last = (
            nn.Linear(a, b) for a, b in ((36, 16), (16, 16), (16, 16), (16, 4))
        )

    def forward(self, inputs: Tensor) -> Tensor:
        start = self.first(self.flat(inputs))
        return self.last(self.relu(start + self.third(self.relu(self.second(self.relu(start))))))


def inputs_of(seed: int, count: int = 3) -> Tensor:
    return torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(seed)) * 1.8 - 0.9


def ball(inputs: Tensor) -> Box:
    return Box((inputs.double() - SIZE).clamp(-1, 1), (inputs.double() + SIZE).clamp(-1, 1))


def largest_escape(model: nn.Sequential, seed: int, points: int = 400) -> float:
    """Return how far hidden values of deployed passes leave their boxes, relative to the boxes; below 0: not at all."""
    inputs, generator = inputs_of(seed), torch.Generator().manual_seed(seed + 1)
    found = hidden_boxes(nodes_of(model), ball(inputs), memory_mb=64)
    assert found
    worst = -1.0
    for _ in range(points):
        # Corners, where linear functions are largest, and points between.
        shift = torch.randn(inputs.shape, generator=generator).sign() * torch.rand(1, generator=generator).sqrt()
        inside = torch.minimum(torch.maximum((inputs + SIZE * shift).double(), ball(inputs).low), ball(inputs).high)
        for place, box in found.items():
            values = model[: place + 1](inside.float()).double()
            width = (box.high - box.low).clamp(min=1e-12)
            outside = torch.maximum(box.low - values, values - box.high) / width
            worst = max(worst, float(outside.max()))
    return worst


@pytest.mark.parametrize("make", [dense, convolutional])
@pytest.mark.parametrize("seed", range(3))
def test_no_deployed_pass_leaves_them(make: object, seed: int) -> None:
    assert largest_escape(make(seed), seed) <= 0  # type: ignore[operator]


def test_upper_ends_from_the_wrong_sign_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = module._lower_bounds_of
    monkeypatch.setattr(module, "_lower_bounds_of", lambda rows, *rest: right(rows.abs(), *rest))
    assert largest_escape(dense(0), 0) > 0


def test_forgetting_half_of_the_ball_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = module.propagate

    def narrow(steps: object, box: Box, **known: object) -> object:
        return right(steps, Box(box.centre - box.radius / 2, box.centre + box.radius / 2), **known)

    monkeypatch.setattr(module, "propagate", narrow)
    assert largest_escape(dense(0), 0) > 0


def crown_boxes(model: nn.Sequential, box: Box) -> list[Box]:
    """CROWN in float64 as one would write it for dense layers: the inputs of all ReLUs, each followed back."""
    layers = [layer for layer in model if isinstance(layer, nn.Linear)][:-1]
    low, high = box.low.flatten(1), box.high.flatten(1)
    found: list[Box] = []

    def least(coefficients: Tensor, depth: int) -> Tensor:
        constant = coefficients.new_zeros(coefficients.shape[:2])
        for number in range(depth, -1, -1):
            constant = constant + coefficients @ layers[number].bias.double()
            coefficients = coefficients @ layers[number].weight.double()
            if number:
                below, above = found[number - 1].low, found[number - 1].high
                is_open = (below < 0) & (above > 0)
                chord = torch.where(is_open, above / (above - below), (below >= 0).double())
                lower = torch.where(is_open, (above > -below).double(), chord)
                lift = torch.where(is_open, -chord * below, 0.0)
                harms = coefficients.clamp(max=0)
                constant = constant + (harms * lift[:, None]).sum(2)
                coefficients = coefficients.clamp(min=0) * lower[:, None] + harms * chord[:, None]
        ends = coefficients.clamp(min=0) * low[:, None] + coefficients.clamp(max=0) * high[:, None]
        return constant + ends.sum(2)

    for depth, layer in enumerate(layers):
        unit = torch.eye(layer.out_features, dtype=torch.float64).expand(len(low), -1, -1)
        found.append(Box(least(unit, depth), -least(-unit, depth)))
    return found


def test_they_are_at_least_as_tight_as_crown_where_signs_are_open() -> None:
    model, inputs = dense(1), inputs_of(1)
    ours, theirs = hidden_boxes(nodes_of(model), ball(inputs), memory_mb=64), crown_boxes(model, ball(inputs))
    for box, oracle in zip(ours.values(), theirs[1:], strict=True):
        is_open = (oracle.low < 0) & (oracle.high > 0)
        assert bool(is_open.any())
        allowance = 1e-5 * (1 + oracle.magnitude)  # for rounding, which only ours pays for
        assert bool((box.low >= oracle.low - allowance)[is_open].all())
        assert bool((box.high <= oracle.high + allowance)[is_open].all())


def test_little_memory_gives_the_same_boxes() -> None:
    steps, around = nodes_of(convolutional(0)), ball(inputs_of(0))
    many, few = hidden_boxes(steps, around, memory_mb=64), hidden_boxes(steps, around, memory_mb=0)
    for place, box in many.items():
        assert torch.allclose(box.low, few[place].low, rtol=1e-12, atol=1e-12)
        assert torch.allclose(box.high, few[place].high, rtol=1e-12, atol=1e-12)


def test_one_hidden_layer_has_nothing_to_gain() -> None:
    shallow = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)).requires_grad_(False)
    assert not hidden_boxes(nodes_of(shallow), ball(inputs_of(0)), memory_mb=64)


@pytest.mark.parametrize("make", [dense, convolutional, Residual])
def test_more_is_proved_and_nothing_is_lost(make: object) -> None:
    model = make(2).eval().requires_grad_(False)  # type: ignore[operator]
    plain, inputs = BoxCertifier(model), inputs_of(5, 12)
    strong = replace(plain, effort=Effort(slope_steps=1))
    before, after = plain.margins(inputs, 0.1), strong.margins(inputs, 0.1)
    assert bool((after >= before).all())
    assert float((after - before).max()) > 0
    held = strong.certified_at(inputs, [0.02, 0.05, 0.1])
    assert not bool((plain.certified_at(inputs, [0.02, 0.05, 0.1]) & ~held).any())
    # What is proved holds at corners of the ball.
    labels, generator = plain.predict(inputs), torch.Generator().manual_seed(3)
    for _ in range(200):
        corner = (inputs + 0.1 * torch.randn(inputs.shape, generator=generator).sign()).clamp(-1, 1)
        assert bool((model(corner).argmax(1) == labels)[held[:, 2]].all())
