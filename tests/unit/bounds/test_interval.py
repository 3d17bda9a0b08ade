"""Boxes through networks: against exact arithmetic, against search, and against what float32 really returns."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise, permutations, product
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from stobatch.bounds import certifier as interval
from stobatch.bounds import linear as linear_bounds
from stobatch.bounds.branching import Effort
from stobatch.bounds.certifier import BoxCertifier
from stobatch.errors import DataError, ModelError, StobatchError, UnitError
from stobatch.models.layered import Squash

METHODS: tuple[Literal["interval", "linear"], ...] = ("interval", "linear")
NETWORKS = {
    "dense": lambda: (Squash(1.5), nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)),
    "padded": lambda: (
        nn.Conv2d(1, 3, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(3, 2, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 3),
    ),
    "pooled": lambda: (nn.Conv2d(1, 2, 2), nn.ReLU(), nn.AvgPool2d((2, 1), 2), nn.Flatten(), nn.Linear(8, 3)),
    "maximum": lambda: (nn.Conv2d(1, 2, 2), nn.MaxPool2d(3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
    "tanh": lambda: (
        nn.Flatten(),
        nn.Linear(25, 6),
        nn.Tanh(),
        nn.Linear(6, 4, bias=False),
        nn.ReLU(),
        nn.Linear(4, 3),
    ),
    "linear": lambda: (nn.Flatten(), nn.Identity(), nn.Linear(25, 3)),
}


def network(name: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*NETWORKS[name]()).requires_grad_(False)


def examples(name: str, count: int = 8, seed: int = 1) -> Tensor:
    shape = (3,) if name == "dense" else (1, 5, 5)
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def lead(layers: nn.Sequential, inputs: Tensor, label: int) -> Tensor:
    """How far the label really leads, from the float32 scores."""
    scores = layers(inputs).double()
    others = scores.index_fill(1, torch.tensor([label], device=inputs.device), -torch.inf)
    return scores[:, label] - others.amax(1)


def smallest_lead(layers: nn.Sequential, centre: Tensor, radius: float, label: int, tries: int = 250) -> float:
    """The smallest lead that search finds in the ball: corners, random points, and signed gradient steps."""
    low, high = (centre - radius).clamp(-1, 1), (centre + radius).clamp(-1, 1)
    draws = torch.rand(tries, *centre.shape, generator=torch.Generator().manual_seed(2))
    points = torch.cat([centre[None], low + (high - low) * draws, torch.where(draws < 0.5, low, high)])
    found = math.inf
    for _ in range(10):
        points = points.detach().requires_grad_()
        leads = lead(layers, points, label)
        found = min(found, leads.min().item())
        (gradient,) = torch.autograd.grad(leads.sum(), points)
        points = torch.minimum(torch.maximum(points - radius / 4 * gradient.sign(), low), high)
    return min(found, lead(layers, points.detach(), label).min().item())


def violated(inputs: Tensor, radius: float, *certifiers: BoxCertifier) -> bool:
    """Whether search gets below a bound of one of these certifiers, all of them of one network."""
    labels = certifiers[0].predict(inputs).tolist()
    layers = certifiers[0].layers
    found = [smallest_lead(layers, centre, radius, label) for centre, label in zip(inputs, labels, strict=True)]
    return any(
        lead < margin
        for certifier in certifiers
        for lead, margin in zip(found, certifier.margins(inputs, radius).tolist(), strict=True)
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_no_search_gets_below_the_bound(name: str) -> None:
    for seed, radius in product(range(3), (0.0, 0.05, 0.3, 1.5)):
        layers = network(name, seed)
        certifiers = [BoxCertifier(layers, method) for method in METHODS] + [BoxCertifier(layers, effort=Effort(4, 16))]
        assert not violated(examples(name), radius, *certifiers)


def exact_interval_margin(layers: nn.Sequential, centre: Tensor, radius: float, label: int) -> Fraction:
    """Interval bounds of a dense network in rational arithmetic, written out term by term."""
    one, size = Fraction(1), Fraction(radius)
    box = [(max(Fraction(x) - size, -one), min(Fraction(x) + size, one)) for x in centre.tolist()]

    def affine(weights: list[Fraction], bias: Fraction) -> tuple[Fraction, Fraction]:
        ends = [sorted((w * low, w * high)) for w, (low, high) in zip(weights, box, strict=True)]
        return bias + sum(low for low, _ in ends), bias + sum(high for _, high in ends)

    for layer in layers[:-1]:
        if isinstance(layer, Squash):
            slope = Fraction(layer.slope)
            box = [(max(-one, min(one, slope * low)), max(-one, min(one, slope * high))) for low, high in box]
        elif isinstance(layer, nn.ReLU):
            box = [(max(low, Fraction(0)), max(high, Fraction(0))) for low, high in box]
        else:
            assert isinstance(layer, nn.Linear)
            weights = [[Fraction(w) for w in row] for row in layer.weight.tolist()]
            box = [affine(row, Fraction(b)) for row, b in zip(weights, layer.bias.tolist(), strict=True)]
    last = layers[-1]
    assert isinstance(last, nn.Linear)
    rows, biases = last.weight.tolist(), last.bias.tolist()
    leads = [
        affine([Fraction(y) - Fraction(j) for y, j in zip(rows[label], rows[other], strict=True)], bias)[0]
        for other in range(last.out_features)
        if other != label
        for bias in [Fraction(biases[label]) - Fraction(biases[other])]
    ]
    return min(leads)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
def test_it_stays_below_exact_interval_arithmetic_and_close_to_it(scale: float) -> None:
    for seed, radius in product(range(4), (0.0, 0.01, 0.2, 1.0)):
        layers = network("dense", seed)
        for value in layers.parameters():
            value.data.mul_(scale)
        certifier, inputs = BoxCertifier(layers, "interval"), examples("dense")
        labels = certifier.predict(inputs).tolist()
        for centre, label, margin in zip(inputs, labels, certifier.margins(inputs, radius).tolist(), strict=True):
            exact = exact_interval_margin(layers, centre, radius, label)
            assert Fraction(margin) <= exact
            assert margin >= float(exact) - 1e-4 * max(scale, scale**3)


def test_a_box_that_leaves_the_range_of_inputs_is_cut() -> None:
    layers, ends = nn.Sequential(nn.Linear(2, 2)), torch.tensor([[1.0, -1.0]])
    layers[0].weight.data.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
    layers[0].bias.data.zero_()
    assert float(BoxCertifier(layers).margins(ends, 0.75)) == pytest.approx(0.5, abs=1e-5)
    assert float(BoxCertifier(layers).margins(torch.zeros(1, 2) + 1e-3, 5.0)) == pytest.approx(-2, abs=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_pixel_at_its_end_is_fixed_by_the_squash(method: Literal["interval", "linear"]) -> None:
    layers, ends = nn.Sequential(Squash(4.0), nn.Linear(2, 2)), torch.tensor([[1.0, -1.0]])
    certifier = BoxCertifier(layers, method)
    assert float(certifier.margins(ends, 0.7)) == pytest.approx(float(certifier.margins(ends, 0.0)), abs=1e-12)
    assert float(certifier.margins(ends, 0.8)) < float(certifier.margins(ends, 0.0))


def test_forgetting_that_sizes_add_up_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_bounds.Dense, "product", lambda self, weight, values: values @ self.weight.t())
    certifier = BoxCertifier(network("dense"), "interval")
    with pytest.raises(ModelError, match="not those that its layers give"):
        certifier.margins(examples("dense"), 0.3)
    monkeypatch.setattr(interval, "_require_within_bounds", lambda *_: None)
    assert violated(examples("dense"), 0.3, certifier)


@pytest.mark.parametrize("method", METHODS)
def test_half_the_ball_is_caught(method: Literal["interval", "linear"], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = interval._ball
    monkeypatch.setattr(interval, "_ball", lambda inputs, radii: whole(inputs, radii / 2))
    assert violated(examples("padded"), 0.3, BoxCertifier(network("padded"), method))


@pytest.mark.parametrize("method", METHODS)
def test_rounding_in_float32_flips_a_class_that_real_numbers_would_certify(
    method: Literal["interval", "linear"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2²⁴ + 3z - 2²⁴ is 0 or 4 in float32 and leads the constant 1/2 in real numbers, for every z in [0.3, 1].

    The squash holds the first and the last input at 1 through the whole ball, so nothing but rounding can flip it.
    """
    centre, radius = torch.tensor([1.0, 0.16, 1.0]), 0.08
    flips = 0
    for order in permutations((2.0**24, 3.0, -(2.0**24))):
        inputs = torch.ones(3)
        inputs[order.index(3.0)] = centre[1]
        layers = nn.Sequential(Squash(4.0), nn.Linear(3, 2)).requires_grad_(False)
        layers[1].weight.data.copy_(torch.tensor([order, (0.0, 0.0, 0.0)]))
        layers[1].bias.data.copy_(torch.tensor([0.0, 0.5]))
        certifier = BoxCertifier(layers, method)
        label = int(certifier.predict(inputs[None]))
        flipped = smallest_lead(layers, inputs, radius, label) < 0
        flips += flipped
        assert float(certifier.margins(inputs[None], radius)) < 0
        with monkeypatch.context() as broken:
            broken.setattr(linear_bounds, "FLOAT32_UNIT", 0.0)
            broken.setattr(interval, "_require_within_bounds", lambda *_: None)
            claimed = float(certifier.margins(inputs[None], radius)) > 0
        assert claimed == (label == 0)
    assert flips > 0


def test_sums_that_overflow_prove_nothing() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    layers[0].weight.data.fill_(3e38)
    layers[2].bias.data.copy_(torch.tensor([1e3, 0.0]))
    assert float(BoxCertifier(layers).margins(torch.zeros(1, 2), 0.5)) == -torch.inf


@pytest.mark.parametrize("name", NETWORKS)
def test_a_smaller_ball_is_never_harder(name: str) -> None:
    certifier, inputs, radii = BoxCertifier(network(name)), examples(name), [0.4, 0.0, 0.1, 0.05, 0.2]
    boxes = [BoxCertifier(network(name), "interval").margins(inputs, radius) for radius in sorted(radii)]
    assert all(bool((small >= large - 1e-12).all()) for small, large in pairwise(boxes))
    certified = certifier.certified_at(inputs, radii)
    for column, radius in enumerate(radii):
        assert certified[:, column].tolist() == (certifier.margins(inputs, radius) > 0).tolist()


@pytest.mark.parametrize("method", METHODS)
def test_bisection_returns_the_last_radius_on_its_grid_that_holds(method: Literal["interval", "linear"]) -> None:
    layers, inputs = network("padded"), examples("padded", 40)
    for value in layers.parameters():
        value.mul_(3)
    certifier = BoxCertifier(layers, method)
    found = certifier.certified_radius(inputs, largest=0.3, tolerance=0.025)
    grid = torch.arange(13).double() * 0.025
    holds = certifier.certified_at(inputs, grid.tolist())
    assert found.radius.tolist() == [float(grid[row].max()) if row.any() else 0.0 for row in holds]
    assert found.prediction.tolist() == certifier.layers(inputs).argmax(1).tolist()
    assert len(set(found.radius.tolist())) > 3


def test_at_radius_zero_the_bound_is_the_margin_of_the_prediction() -> None:
    for name in NETWORKS:
        certifier, inputs = BoxCertifier(network(name)), examples(name)
        for row, label, margin in zip(inputs, certifier.predict(inputs), certifier.margins(inputs, 0.0), strict=True):
            assert float(margin) == pytest.approx(float(lead(certifier.layers, row[None], int(label))), abs=1e-4)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_memory_budget_does_not_change_bounds(name: str) -> None:
    inputs = examples(name, 70)
    small, large = (BoxCertifier(network(name), memory_mb=mb).margins(inputs, 0.1) for mb in (0, 512))
    assert torch.allclose(small, large, rtol=0, atol=1e-12)


def test_an_empty_batch_has_empty_answers() -> None:
    certifier, none = BoxCertifier(network("dense")), torch.zeros(0, 3)
    assert certifier.margins(none, 0.1).shape == (0,)
    assert certifier.certified_at(none, [0.1, 0.2]).shape == (0, 2)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([nn.Conv2d(2, 2, 1, groups=2), nn.Linear(2, 2)], "groups=2"),
        ([nn.Conv2d(2, 2, 2, dilation=2), nn.Linear(2, 2)], "dilation"),
        ([nn.Conv2d(2, 2, 2, padding=1, padding_mode="reflect"), nn.Linear(2, 2)], "padding_mode"),
        ([nn.Conv2d(2, 2, 2, padding="same"), nn.Linear(2, 2)], "padding='same'"),
        ([nn.AvgPool2d(2, padding=1), nn.Linear(2, 2)], "padding=1"),
        ([nn.MaxPool2d(2, ceil_mode=True), nn.Linear(2, 2)], "ceil_mode"),
        ([nn.Flatten(0), nn.Linear(2, 2)], "start_dim"),
        ([Squash(-1.0), nn.Linear(2, 2)], "slope"),
        ([nn.GroupNorm(1, 2), nn.Linear(2, 2)], "GroupNorm"),
        ([nn.Linear(2, 2), nn.ReLU()], "last layer"),
        ([nn.Linear(2, 1)], "two classes"),
        ([nn.Linear(2, 2).double()], "float64"),
        ([], "last layer"),
    ],
)
def test_layers_without_bounds_are_refused(layers: list[nn.Module], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        BoxCertifier(nn.Sequential(*layers))


def test_a_subclass_may_compute_anything_and_is_refused() -> None:
    class Other(nn.ReLU):
        pass

    with pytest.raises(ModelError, match="Other"):
        BoxCertifier(nn.Sequential(Other(), nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("inputs", "radius", "error"),
    [
        (torch.tensor([[torch.nan, 0, 0]]), 0.1, DataError),
        (torch.tensor([[1.001, 0, 0]]), 0.1, DataError),
        (torch.zeros(1, 3).double(), 0.1, DataError),
        (torch.zeros(1, 3), -0.1, UnitError),
        (torch.zeros(1, 3), float("nan"), UnitError),
        (torch.zeros(1, 3), float("inf"), UnitError),
    ],
)
def test_inputs_and_radii_that_mean_nothing_are_refused(
    inputs: Tensor, radius: float, error: type[StobatchError]
) -> None:
    with pytest.raises(error):
        BoxCertifier(network("dense")).margins(inputs, radius)


def test_pictures_need_flattening_before_a_linear_layer() -> None:
    with pytest.raises(ModelError, match="Flatten"):
        BoxCertifier(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))).margins(examples("linear"), 0.1)


def test_a_grid_of_radii_needs_a_step() -> None:
    with pytest.raises(UnitError, match="tolerance"):
        BoxCertifier(network("dense")).certified_radius(examples("dense"), largest=0.1, tolerance=0.2)
