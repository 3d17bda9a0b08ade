"""Boxes through layers, for training: they hold every image, and are as small as boxes can be where that is known."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.bounds import boxes as bounds
from stobatch.bounds.boxes import TrainingBox, affine_radius, difference_radius, propagate, worst_case_scores
from stobatch.dp.layer_gradients import absolute, class_pairs, sign
from stobatch.errors import ModelError
from stobatch.models.layered import Layered, Squash, build_layered

SLACK = 1e-12
"""Of float64; these bounds do not account for rounding."""
PICTURE = (2, 4, 4)


def around(inputs: Tensor, radius: float) -> TrainingBox:
    return TrainingBox.between(inputs - radius, inputs + radius)


def points_of(box: TrainingBox, count: int, seed: int = 0) -> Tensor:
    """Corners and points inside, as count x examples x values."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(count, *box.centre.shape, generator=generator, dtype=torch.float64) * 2 - 1
    draws[: count // 2] = draws[: count // 2].sign()
    return box.centre + draws * box.radius


def escapes(layer: nn.Module, box: TrainingBox, count: int = 300) -> float:
    """How far images get out of the layer's box."""
    with torch.no_grad():
        image = propagate(layer, box)
        found = layer(points_of(box, count).flatten(0, 1)).unflatten(0, (count, -1))
    return float(torch.maximum(found - image.high, image.low - found).max())


LAYERS = {
    "linear": lambda: nn.Linear(4, 5),
    "linear without bias": lambda: nn.Linear(4, 5, bias=False),
    "conv": lambda: nn.Conv2d(2, 3, 3),
    "conv with stride and padding": lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False),
    "conv with oblong everything": lambda: nn.Conv2d(2, 4, (3, 2), (1, 2), (2, 1), (2, 1), groups=2),
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "average": lambda: nn.AvgPool2d(3, 1, padding=1),
    "maximum": lambda: nn.MaxPool2d(2, 1, padding=1),
    "squash": lambda: Squash(3.0, -0.4, 0.3),
    "flatten": nn.Flatten,
    "identity": nn.Identity,
}


def layer_and_inputs(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    layer = LAYERS[name]().double()
    shape = (layer.in_features,) if isinstance(layer, nn.Linear) else PICTURE
    return layer, torch.randn(6, *shape, dtype=torch.float64)


@pytest.mark.parametrize("name", LAYERS)
def test_boxes_hold_the_images_of_corners_and_points(name: str) -> None:
    for seed, radius in product(range(3), (0.0, 0.1, 2.0)):
        layer, inputs = layer_and_inputs(name, seed)
        box = around(inputs, radius)
        assert escapes(layer, box) <= SLACK
        assert bool((propagate(layer, box).radius >= -SLACK).all())


@pytest.mark.parametrize("name", LAYERS)
def test_every_end_of_a_box_is_reached(name: str) -> None:
    """Value by value no smaller box would do: the sign of a value's gradient points at the corner."""
    layer, inputs = layer_and_inputs(name)
    box = around(inputs[:2], 0.3)
    image = propagate(layer, box)
    for place in range(image.high[0].numel()):
        centre = box.centre.clone().requires_grad_()
        (slope,) = torch.autograd.grad(layer(centre).flatten(1)[:, place].sum(), centre)
        direction = torch.ones_like(slope) if not isinstance(layer, nn.Linear | nn.Conv2d) else slope.sign()
        with torch.no_grad():
            top = layer(box.centre + direction * box.radius).flatten(1)[:, place]
        assert torch.allclose(top, image.high.flatten(1)[:, place], rtol=0, atol=SLACK)


def test_a_box_stays_in_the_range_of_inputs() -> None:
    box = TrainingBox.around(torch.tensor([[-1.0, -0.9, 0.0, 1.0]]).double(), 0.3)
    assert torch.allclose(box.low, torch.tensor([[-1.0, -1.0, -0.3, 0.7]]).double())
    assert torch.allclose(box.high, torch.tensor([[-0.7, -0.6, 0.3, 1.0]]).double())
    each = TrainingBox.around(torch.zeros(2, 1), torch.tensor([[0.1], [0.2]]))
    assert each.radius.flatten().tolist() == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize("layer", [nn.GroupNorm(1, 2), nn.Sigmoid(), nn.BatchNorm2d(2), nn.Softmax(1)], ids=repr)
def test_layers_without_bounds_are_refused(layer: nn.Module) -> None:
    with pytest.raises(ModelError, match=f"no interval bounds for a {type(layer).__name__} layer") as caught:
        propagate(layer, TrainingBox(torch.zeros(1, *PICTURE), torch.zeros(1, *PICTURE)))
    assert "train without the certified loss" in caught.value.remedy


def test_padding_that_repeats_values_is_refused() -> None:
    with pytest.raises(ModelError, match="padding_mode='reflect'"):
        propagate(
            nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"),
            TrainingBox(torch.zeros(1, *PICTURE), torch.ones(1, *PICTURE)),
        )


# Scores against the label's.


def stack(description: str, shape: tuple[int, ...], classes: int = 4, seed: int = 0) -> Layered:
    network = build_layered(description, shape, classes, torch.Generator().manual_seed(seed)).double()
    generator = torch.Generator().manual_seed(seed)
    for value in network.parameters():
        value.data += 0.3 * torch.randn(value.shape, generator=generator)
    return network


def leads(network: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    scores = network(inputs)
    return scores - scores.gather(1, labels[:, None])


def highest_leads(network: nn.Module, box: TrainingBox, labels: Tensor) -> Tensor:
    """The highest found among all corners, the centre and random points of a box of few values."""
    corners = torch.tensor(list(product((-1.0, 1.0), repeat=box.centre.shape[1]))).double()
    points = torch.cat([box.centre + corner * box.radius for corner in corners] + [*points_of(box, 200), box.centre])
    return leads(network, points, labels.repeat(len(points) // len(labels))).unflatten(0, (-1, len(labels))).amax(0)


STACKS = [
    "linear",
    "linear 6, relu, linear",
    "linear 5, tanh, linear 4, relu, linear",
    "squash 2, linear 6, relu, linear",
]


def exceeded(description: str, radius: float, seed: int) -> bool:
    network, labels = stack(description, (4,), seed=seed), torch.tensor([0, 1, 2, 3, 2])
    box = around(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).double(), radius)
    with torch.no_grad():
        bound = worst_case_scores(network.layers, box, labels)
        return bool((highest_leads(network, box, labels) > bound + SLACK).any())


@pytest.mark.parametrize("description", STACKS)
def test_no_point_of_the_box_exceeds_the_worst_case(description: str) -> None:
    for seed, radius in product(range(5), (0.0, 0.05, 0.5)):
        assert not exceeded(description, radius, seed)


def test_signed_weights_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the absolute value movements of inputs would cancel."""
    monkeypatch.setattr(bounds, "absolute", lambda weight: weight)
    for description in STACKS:
        assert any(exceeded(description, 0.5, seed) for seed in range(5))
    layer, inputs = layer_and_inputs("conv")
    assert escapes(layer, around(inputs, 0.3)) > 0.1


def test_a_linear_network_has_the_true_worst_case() -> None:
    network, labels = stack("linear", (4,)), torch.tensor([0, 1, 2, 3, 2])
    box = around(torch.randn(5, 4).double(), 0.3)
    found = highest_leads(network, box, labels)
    assert torch.allclose(worst_case_scores(network.layers, box, labels), found, rtol=0, atol=SLACK)


@pytest.mark.parametrize("description", STACKS)
def test_without_a_radius_it_is_the_margin(description: str) -> None:
    network, labels, inputs = stack(description, (4,)), torch.tensor([0, 1, 2]), torch.randn(3, 4).double()
    found = worst_case_scores(network.layers, around(inputs, 0.0), labels)
    assert torch.allclose(found, leads(network, inputs, labels), rtol=0, atol=SLACK)


def test_it_is_tighter_than_bounding_the_scores() -> None:
    network, labels, inputs = stack(STACKS[1], (4,)), torch.tensor([0, 1, 2]), torch.randn(3, 4).double()
    box = around(inputs, 0.3)
    apart = box
    for layer in network.layers:
        apart = propagate(layer, apart)
    loose = apart.high - apart.low.gather(1, labels[:, None])
    tight = worst_case_scores(network.layers, box, labels)
    assert bool((tight <= loose + SLACK).all())
    assert float((loose - tight).detach().amax()) > 0.1


@given(classes=st.integers(2, 6), size=st.integers(1, 5), seed=st.integers(0, 1000))
def test_the_spread_from_the_label_is_the_formula_term_by_term(classes: int, size: int, seed: int) -> None:
    """Σ_k |W_jk - W_yk| r_k, and 0 for the label."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(size, classes).double()
    layer.weight.data.copy_(torch.randn(classes, size, generator=generator).round(decimals=1))
    radius = torch.rand(4, size, generator=generator).double()
    labels = torch.randint(classes, (4,), generator=generator)
    found, weight = difference_radius(layer, radius, labels).detach(), layer.weight.detach()
    for row, label in enumerate(labels.tolist()):
        for other in range(classes):
            gaps = [abs(float(weight[other, k] - weight[label, k])) for k in range(size)]
            expected = sum(gap * float(r) for gap, r in zip(gaps, radius[row], strict=True))
            assert float(found[row, other]) == pytest.approx(expected, abs=SLACK)
        assert float(found[row, label]) == 0


def test_the_label_has_worst_case_zero_exactly() -> None:
    network, labels = stack("conv 3 3, relu, linear", PICTURE), torch.tensor([0, 1, 2, 3])
    found = worst_case_scores(network.layers, around(torch.randn(4, *PICTURE).double(), 0.3), labels)
    assert found.gather(1, labels[:, None]).flatten().tolist() == [0.0] * 4


def test_pairs_are_those_above_the_diagonal() -> None:
    assert class_pairs(3, torch.device("cpu")).t().tolist() == [[0, 1], [0, 2], [1, 2]]
    assert class_pairs(1, torch.device("cpu")).shape == (2, 0)


# Gradients.


def certified(network: Layered, inputs: Tensor, labels: Tensor, radius: float) -> Tensor:
    scores = worst_case_scores(network.layers, around(inputs, radius), labels)
    return F.cross_entropy(scores, labels)


SMOOTH_AND_NOT = [
    "linear",
    "conv 3 3/2+1, tanh, linear 5, tanh, linear",
    "squash 0.1 0 0.5, conv 2 2, relu, maxpool 2, linear",
    "avgpool 2, linear 6, relu, linear 5, relu, linear",
]


@settings(max_examples=15)
@given(
    description=st.sampled_from(SMOOTH_AND_NOT),
    radius=st.sampled_from([0.0, 0.05, 0.3]),
    seed=st.integers(0, 1000),
)
def test_gradients_are_those_of_finite_differences(description: str, radius: float, seed: int) -> None:
    """Along random directions; a kink between two points an ε apart is rare, and a second direction settles it."""
    network, labels = stack(description, PICTURE, seed=seed), torch.tensor([0, 1, 2])
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(3, *PICTURE, generator=generator).double()
    values = list(network.parameters())
    gradients = torch.autograd.grad(certified(network, inputs, labels, radius), values)

    def agrees() -> bool:
        steps = [1e-6 * torch.randn(value.shape, generator=generator).double() for value in values]
        ends = []
        for factor in (1, -2):
            for value, step in zip(values, steps, strict=True):
                value.data += factor * step
            ends.append(float(certified(network, inputs, labels, radius).detach()))
        for value, step in zip(values, steps, strict=True):
            value.data += step
        slope = sum(float((gradient * step).sum()) for gradient, step in zip(gradients, steps, strict=True))
        return (ends[0] - ends[1]) / 2 == pytest.approx(slope, rel=1e-5, abs=1e-12)

    assert agrees() or agrees()


def test_the_size_of_a_weight_has_a_gradient_of_size_one_everywhere() -> None:
    """At zero too, where norms of gradients are told from it."""
    weight = torch.tensor([-2.0, -0.0, 0.0, 3.0], requires_grad=True)
    size = absolute(weight)
    assert size.tolist() == [2.0, 0.0, 0.0, 3.0]
    assert torch.autograd.grad(size.sum(), weight)[0].tolist() == sign(weight).tolist() == [-1.0, 1.0, 1.0, 1.0]


def test_the_spread_of_a_convolution_is_that_of_its_matrix() -> None:
    layer, radius = nn.Conv2d(2, 3, 3, stride=2, padding=1).double(), torch.rand(1, *PICTURE).double()
    basis = torch.eye(32).double().unflatten(1, PICTURE)
    matrix = F.conv2d(basis, layer.weight, None, 2, 1).flatten(1).abs()
    assert torch.allclose(affine_radius(layer, radius).flatten(), radius.flatten() @ matrix, rtol=0, atol=SLACK)
