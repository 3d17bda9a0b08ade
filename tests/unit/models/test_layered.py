"""Stacks of layers from a line of text: what the line may say, what comes out, and what its weights depend on."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stobatch.bounds.boxes import TrainingBox, propagate
from stobatch.errors import ModelError
from stobatch.models.layered import GRAMMAR, Layered, Squash, build_layered


def build(description: str, shape: tuple[int, ...] = (2, 6, 6), classes: int = 3, seed: int = 0) -> Layered:
    return build_layered(description, shape, classes, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("word", "layer"),
    [
        ("conv 4 3", nn.Conv2d(2, 4, 3)),
        ("conv 4 3/2", nn.Conv2d(2, 4, 3, stride=2)),
        ("conv 4 3+1", nn.Conv2d(2, 4, 3, padding=1)),
        ("conv 4 3/2+1", nn.Conv2d(2, 4, 3, stride=2, padding=1)),
        ("conv 4 3/2+0", nn.Conv2d(2, 4, 3, stride=2)),
        ("relu", nn.ReLU()),
        ("tanh", nn.Tanh()),
        ("avgpool 2", nn.AvgPool2d(2)),
        ("avgpool 3/1", nn.AvgPool2d(3, 1)),
        ("maxpool 3", nn.MaxPool2d(3)),
        ("maxpool 2/1", nn.MaxPool2d(2, 1)),
        ("groupnorm 2", nn.GroupNorm(2, 2)),
        ("squash 4", Squash(4)),
        ("squash 4 -0.5 +0.5", Squash(4, -0.5, 0.5)),
    ],
)
def test_words_name_layers(word: str, layer: nn.Module) -> None:
    """By their sizes, whatever the spaces; strides and padding are left out on their own."""
    assert repr(build(f" {word.replace(' ', '  ')} ,linear").layers[0]) == repr(layer)


def test_linear_layers_take_pictures_and_the_last_has_the_classes() -> None:
    network = build("conv 4 3, relu, linear 7, tanh, linear")
    assert [type(layer).__name__ for layer in network.layers] == [
        "Conv2d",
        "ReLU",
        "Flatten",
        "Linear",
        "Tanh",
        "Linear",
    ]
    assert (network.layers[3].in_features, network.layers[3].out_features) == (64, 7)
    assert (network.num_classes, network.input_shape) == (3, (2, 6, 6))
    assert (network.device, network.dtype) == (torch.device("cpu"), torch.float32)
    network.calibrate()


@pytest.mark.parametrize(
    "description", ["linear", "linear 3", "squash 2 0 0.5, conv 4 3/2+1, groupnorm 2, relu, linear"]
)
def test_scores_have_one_column_per_class(description: str) -> None:
    network = build(description)
    assert network(torch.zeros(5, 2, 6, 6)).shape == (5, 3)
    assert network(torch.zeros(0, 2, 6, 6)).shape == (0, 3)


@pytest.mark.parametrize(
    "word",
    [
        "",
        "Linear 3",
        "flatten",
        "conv",
        "conv 4",
        "conv 0 3",
        "conv -4 3",
        "conv 4.5 3",
        "conv 4 0",
        "conv 4 3/0",
        "conv 4 3/1.5",
        "conv 4 3+-1",
        "conv 4 3+",
        "conv 4 3/",
        "conv 4 3+1/2",
        "conv 4 3/2+1+1",
        "conv inf 3",
        "conv nan 3",
        "conv four 3",
        "avgpool",
        "avgpool 0",
        "avgpool 2/0",
        "maxpool 2+1",
        "groupnorm 0",
        "groupnorm 3",
        "relu 2",
        "linear 0",
        "linear 2.5",
        "linear",
        "squash",
        "squash 0",
        "squash -4",
        "squash inf",
        "squash nan",
        "squash 4 nan",
    ],
)
def test_what_is_no_layer_is_refused_with_the_grammar(word: str) -> None:
    """A slope below zero would turn intervals inside out."""
    with pytest.raises(ModelError, match="is not a layer for values of shape") as caught:
        build(f"{word}, relu, linear")
    assert f"'{word}'" in caught.value.what
    assert GRAMMAR in caught.value.remedy


@pytest.mark.parametrize(
    ("description", "word"),
    [
        ("conv 4 9, linear", "conv 4 9"),
        ("maxpool 4, conv 4 3, linear", "conv 4 3"),
        ("maxpool 9, linear", "maxpool 9"),
        ("linear 4, conv 4 3, linear", "conv 4 3"),
        ("linear 4, avgpool 2, linear", "avgpool 2"),
        ("linear 4, maxpool 2, linear", "maxpool 2"),
        ("linear 2, groupnorm 2, linear", "groupnorm 2"),
    ],
)
def test_layers_that_do_not_fit_are_refused_with_the_shape(description: str, word: str) -> None:
    with pytest.raises(ModelError, match=rf"layer '{word}' does not take values of shape \(") as caught:
        build(description)
    assert "pool less" in caught.value.remedy


@pytest.mark.parametrize("description", ["conv 4 3", "linear, relu", "linear 3, tanh"])
def test_the_last_layer_has_to_be_linear(description: str) -> None:
    with pytest.raises(ModelError, match="End the list of layers with `linear`") as caught:
        build(description.replace("linear,", "linear 3,"))
    assert "last layer" in caught.value.what


def test_another_number_of_scores_is_refused() -> None:
    with pytest.raises(ModelError, match="does not end with 3 scores") as caught:
        build("relu, linear 4")
    assert "`linear`" in caught.value.remedy


@given(st.text(alphabet="convliearsquhmxp 0123456789./+-,", max_size=25))
def test_any_text_is_a_network_or_a_user_error(text: str) -> None:
    try:
        network = build(text, (1, 3, 3))
    except ModelError:
        return
    assert network(torch.zeros(2, 1, 3, 3)).shape == (2, 3)


DEEP = "conv 4 3, groupnorm 2, relu, linear 7, tanh, linear"


def test_weights_depend_on_the_generator_alone() -> None:
    torch.manual_seed(1)
    first = build(DEEP).state_dict()
    torch.manual_seed(2)
    again, other = build(DEEP).state_dict(), build(DEEP, seed=1).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    drawn = [name for name in first if first[name].ndim > 1 and bool(first[name].any())]
    assert drawn
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


def test_weights_have_variance_one_over_fan_in_and_biases_are_zero() -> None:
    network = build("conv 100 5, relu, linear 200, relu, linear")
    for layer in (network.layers[0], network.layers[3]):
        deviation = float(layer.weight.detach().flatten(1).std()) * layer.weight[0].numel() ** 0.5
        assert deviation == pytest.approx(1, rel=0.05)
    assert all(not bool(layer.bias.any()) for layer in network.layers if isinstance(layer, nn.Linear | nn.Conv2d))


@pytest.mark.parametrize(("first_weights", "kept"), [("box", True), ("fan_in", False)])
def test_boxes_neither_grow_nor_vanish_from_layer_to_layer(first_weights: str, kept: bool) -> None:
    """Behind each ReLU the mean width is what it was, within 15%; the seed is fixed, so chance plays no part.

    The usual weights, whose boxes grow about eight times in a layer, are the broken twin.
    """
    description = ", ".join(["linear 400, relu"] * 4 + ["linear"])
    generator = torch.Generator().manual_seed(0)
    network = build_layered(description, (1, 20, 20), 3, generator, first_weights=first_weights)
    box = TrainingBox(torch.randn(8, 1, 20, 20, generator=generator), torch.full((8, 1, 20, 20), 0.1))
    widths = []
    for layer in network.layers:
        box = propagate(layer, box)
        if isinstance(layer, nn.ReLU):
            widths.append(float(box.radius.detach().mean()))
    ratios = [after / before for before, after in pairwise([0.1, *widths])]
    assert all(0.85 <= ratio <= 1.15 for ratio in ratios) is kept
    assert kept or min(ratios) > 5


# Squash.


def test_a_squash_is_a_ramp_between_its_ends() -> None:
    values = torch.tensor([[-2.0, -0.25, 0.0, 0.1, 0.25, 2.0]])
    assert Squash(4)(values).tolist() == [[-1.0, -1.0, 0.0, pytest.approx(0.4), 1.0, 1.0]]
    assert repr(Squash(4)) == "Squash(slope=4, thresholds=(0.0,))"


@pytest.mark.parametrize("thresholds", [(), (0.3,), (-0.5, 0.5), (-0.5, 0.0, 0.5)])
def test_every_threshold_has_its_own_channels(thresholds: tuple[float, ...]) -> None:
    layer, count = Squash(3.0, *thresholds), max(1, len(thresholds))
    pictures = torch.rand(4, 2, 3, 3) * 2 - 1
    assert layer(pictures).shape == (4, 2 * count, 3, 3)
    assert layer(pictures[:, :, 0, 0]).shape == (4, 2 * count)
    for place, threshold in enumerate(thresholds or (0.0,)):
        expected = (3 * (pictures - threshold)).clamp(-1, 1)
        assert torch.equal(layer(pictures)[:, 2 * place : 2 * place + 2], expected)


@given(
    slope=st.floats(0.1, 50),
    thresholds=st.lists(st.floats(-1, 1), max_size=3),
    ends=st.tuples(st.floats(-1, 1), st.floats(-1, 1)),
)
def test_a_squash_never_falls(slope: float, thresholds: list[float], ends: tuple[float, float]) -> None:
    low, high = (Squash(slope, *thresholds)(torch.tensor([[end]])) for end in sorted(ends))
    assert bool((low <= high).all())


@pytest.mark.parametrize("slope", [1.5, 4.0, 8.0])
def test_a_pixel_at_its_end_is_fixed_up_to_one_minus_one_over_the_slope(slope: float) -> None:
    layer, end = Squash(slope).double(), torch.tensor([[1.0, -1.0]]).double()

    def moved(by: float) -> Tensor:
        return layer(end - by * end.sign())

    limit = 1 - 1 / slope
    assert torch.equal(moved(0.999 * limit), layer(end))
    assert not torch.equal(moved(1.001 * limit), layer(end))
