"""Linear bounds pulled back through a network: below the true minimum, above boxes, and the transposes they rest on."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest
import torch
from support.exact_leads import exact_minimum, examples, small_network
from torch import nn

from stobatch.bounds import linear as linear_bounds
from stobatch.bounds.certifier import BoxCertifier
from stobatch.bounds.linear import (
    LOWER_SLOPES,
    Affine,
    AveragePool,
    Box,
    Convolution,
    Dense,
    LinearBounds,
    ReLU,
    gamma,
    lower_bounds,
)


def overshoots(radii: tuple[float, ...] = (0.0, 0.05, 0.2, 0.6)) -> list[float]:
    """How far each bound lies above the exact minimum: never, if it is a bound."""
    found = []
    for seed, radius in product(range(12), radii):
        certifier, inputs = BoxCertifier(small_network(seed)), examples()
        answers = zip(
            inputs, certifier.predict(inputs).tolist(), certifier.margins(inputs, radius).tolist(), strict=True
        )
        for centre, label, margin in answers:
            found.append(float(Fraction(margin) - exact_minimum(certifier.layers, centre, radius, label)))
    return found


def test_the_bound_never_exceeds_the_exact_minimum() -> None:
    assert max(overshoots()) <= 0


def test_it_is_the_exact_minimum_where_no_relu_changes_sign() -> None:
    layers, inputs = small_network(3), examples()
    layers[1].bias.data.add_(10)
    certifier = BoxCertifier(layers)
    answers = zip(inputs, certifier.predict(inputs).tolist(), certifier.margins(inputs, 0.4).tolist(), strict=True)
    for centre, label, margin in answers:
        assert margin == pytest.approx(float(exact_minimum(layers, centre, 0.4, label)), abs=1e-4)


@pytest.mark.parametrize(
    "slope",
    [lambda box, chord: 2 * torch.ones_like(chord), lambda box, chord: -torch.ones_like(chord)],
    ids=["above one", "below zero"],
)
def test_a_lower_line_that_crosses_the_curve_is_caught(
    slope: linear_bounds.LowerSlope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOWER_SLOPES, "zero", slope)
    assert max(overshoots((0.2, 0.6))) > 0


def test_an_upper_line_that_is_not_lifted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ReLU.backward

    def sunk(self: ReLU, rows: LinearBounds, *rest: object) -> LinearBounds:
        return LinearBounds(whole(self, rows, *rest).coefficients, rows.constant, rows.owner)  # type: ignore[arg-type]

    monkeypatch.setattr(ReLU, "backward", sunk)
    assert max(overshoots((0.2, 0.6))) > 0


def test_it_proves_more_than_boxes_and_never_less() -> None:
    gains = []
    for seed in range(12):
        boxes, lines = (
            BoxCertifier(small_network(seed), method).margins(examples(), 0.2) for method in ("interval", "linear")
        )
        gains.append(lines - boxes)
    gain = torch.cat(gains)
    assert bool((gain >= 0).all())
    assert float((gain > 1e-3).double().mean()) > 0.5


def test_every_choice_of_slope_wins_somewhere() -> None:
    """Why there are several: a choice that never helps would only cost time."""
    wins: set[str] = set()
    for seed, radius in product(range(40), (0.1, 0.4)):
        every = BoxCertifier(small_network(seed))
        best = every.margins(examples(), radius)
        for name in list(LOWER_SLOPES):
            with pytest.MonkeyPatch.context() as patch:
                for other in set(LOWER_SLOPES) - {name}:
                    patch.delitem(LOWER_SLOPES, other)
                alone = every.margins(examples(), radius)
            assert bool((alone <= best).all())
            boxes = BoxCertifier(every.layers, "interval").margins(examples(), radius)
            if bool(((alone == best) & (best > boxes)).any()):
                wins.add(name)
    assert wins == set(LOWER_SLOPES)


LAYERS: dict[str, tuple[Callable[[], Affine], tuple[int, ...]]] = {
    "dense": (lambda: Dense(nn.Linear(7, 4)), (7,)),
    "no bias": (lambda: Dense(nn.Linear(7, 4, bias=False)), (7,)),
    "stride leaves pixels over": (lambda: Convolution(nn.Conv2d(1, 3, 3, 2)), (1, 8, 6)),
    "padding": (lambda: Convolution(nn.Conv2d(2, 3, (3, 2), (2, 3), (2, 1))), (2, 7, 8)),
    "strides longer than kernels": (lambda: Convolution(nn.Conv2d(1, 2, 2, 4)), (1, 9, 11)),
    "mean": (lambda: AveragePool((2, 3), (2, 1), torch.device("cpu")), (3, 7, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_and_its_transpose_are_the_same_matrix(name: str) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[name][0](), torch.Size(LAYERS[name][1])
    pixels = torch.eye(shape.numel(), dtype=torch.float64).view(-1, *shape)
    matrix = layer.product(layer.weight, pixels)
    neurons = torch.eye(matrix[0].numel(), dtype=torch.float64).view(-1, *matrix.shape[1:])
    assert torch.equal(layer.transposed(neurons, shape).flatten(1), matrix.flatten(1).t())
    assert torch.equal(layer.product(layer.weight.abs(), pixels), matrix.abs())


@pytest.mark.parametrize("name", LAYERS)
def test_a_convolution_has_the_bounds_of_its_matrix(name: str) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[name][0](), LAYERS[name][1]
    matrix = layer.product(layer.weight, torch.eye(torch.Size(shape).numel(), dtype=torch.float64).view(-1, *shape))
    low = torch.randn(3, *shape, dtype=torch.float64)
    high = low + torch.rand_like(low)
    after = layer.forward(Box(low, high)).after
    up, down = matrix.flatten(1).clamp(min=0), matrix.flatten(1).clamp(max=0)
    bias = 0 if layer.bias is None else layer.bias.expand_as(after.low).flatten(1)
    assert torch.allclose(after.low.flatten(1), low.flatten(1) @ up + high.flatten(1) @ down + bias, atol=1e-4)
    assert torch.allclose(after.high.flatten(1), high.flatten(1) @ up + low.flatten(1) @ down + bias, atol=1e-4)
    assert bool((after.low.flatten(1) < low.flatten(1) @ up + high.flatten(1) @ down + bias).all())


def test_mean_pooling_is_the_layer_that_is_deployed() -> None:
    values = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    layer = AveragePool((2, 3), (2, 1), values.device)
    assert torch.allclose(layer.product(layer.weight, values), nn.AvgPool2d((2, 3), (2, 1))(values))


def test_float32_layers_stay_inside_the_allowance_and_a_float64_allowance_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(1000, 50).requires_grad_(False)
    inputs = torch.rand(20, 1000) * 2 - 1

    def contained() -> bool:
        after = Dense(layer).forward(Box(inputs.double(), inputs.double())).after
        return bool(((after.low <= layer(inputs)) & (layer(inputs) <= after.high)).all())

    assert contained()
    monkeypatch.setattr(linear_bounds, "FLOAT32_UNIT", linear_bounds.FLOAT64_UNIT)
    assert not contained()


def test_cancelling_layers_leave_rounding_as_the_only_loss() -> None:
    """h and -h add up to nothing for a linear bound; a box knows each only by itself."""
    first, last = nn.Linear(1, 2, bias=False), nn.Linear(2, 2)
    layers = nn.Sequential(first, last).requires_grad_(False)
    first.weight.copy_(torch.tensor([[1.0], [1.0]]))
    last.weight.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
    last.bias.copy_(torch.tensor([0.5, 0.0]))
    zero = torch.zeros(1, 1)
    assert float(BoxCertifier(layers, "interval").margins(zero, 1.0)) == pytest.approx(-1.5, abs=1e-5)
    margin = float(BoxCertifier(layers, "linear").margins(zero, 1.0))
    assert margin == pytest.approx(0.5, abs=1e-5)
    assert margin < 0.5


def test_gamma_of_too_many_roundings_is_no_bound_at_all() -> None:
    assert gamma(2.0**-24, 2) == pytest.approx(2 * 2.0**-24)
    assert gamma(2.0**-24, 2**24) == float("inf")


def test_bounds_of_a_single_row_are_those_of_the_quantity() -> None:
    layer = Dense(nn.Linear(3, 4))
    passed = layer.forward(Box(-torch.ones(1, 3).double(), torch.ones(1, 3).double()))
    one, owner = torch.eye(4, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    bounds = lower_bounds(LinearBounds(one, torch.zeros(4).double(), owner), [passed], LOWER_SLOPES["zero"])
    assert torch.allclose(bounds, passed.after.low[0], atol=1e-5)
