"""Clipped sums are equal to a slow loop over single examples, for every layer, loss and precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from slow_loop import (
    BOXED,
    NETWORKS,
    PICTURE,
    STACKS,
    agrees,
    assert_right,
    certified,
    examples,
    flat,
    layered,
    natural,
    natural_and_certified,
    oracle,
    views,
)
from torch import Tensor, nn

from stobatch.bounds.boxes import affine_radius
from stobatch.dp import layer_gradients
from stobatch.dp.clipping import (
    Batch,
    Losses,
    clipped_sum_by_example,
    clipped_sum_in_one_pass,
    clipper_for,
)
from stobatch.dp.layer_gradients import ConvGradients
from stobatch.errors import ModelError
from stobatch.models.layered import Layered


def spread_alone(network: nn.Module, batch: Batch) -> Tensor:
    """The weight multiplies nothing but how far inputs move."""
    assert isinstance(network, Layered)
    first = network.layers[0]
    assert isinstance(first, nn.Conv2d | nn.Linear)
    return affine_radius(first, batch[0].abs()).square().flatten(1).sum(1)


def whole_output_layer(network: nn.Module, batch: Batch) -> Tensor:
    """The output layer multiplies boxes in both ways: score by score, and against the label."""
    assert isinstance(network, Layered)
    last = network.layers[-1]
    assert isinstance(last, nn.Linear)
    return certified(network, batch) + affine_radius(
        last, batch[0].flatten(1)[:, : last.in_features].abs()
    ).square().sum(1)


@pytest.mark.parametrize("losses", [natural, views])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_fast_clipper_equals_the_slow_loop(name: str, losses: Losses) -> None:
    network = NETWORKS[name]()
    assert_right(network, losses, examples(PICTURE, losses))
    assert clipper_for(network.double(), losses, examples(PICTURE, losses)) is clipped_sum_in_one_pass


@pytest.mark.parametrize(
    ("layer", "is_formed"),
    [(nn.Conv2d(2, 3, 3), True), (nn.Conv2d(2, 24, 5), False), (nn.Conv2d(2, 24, 5, bias=False), False)],
    ids=repr,
)
def test_convolutions_go_both_ways(layer: nn.Conv2d, is_formed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many positions and few weights: gradients are formed. Few positions and many weights: they are not."""
    formed, original = [], ConvGradients._formed
    monkeypatch.setattr(ConvGradients, "_formed", lambda self, *rows: formed.append(1) or original(self, *rows))
    clipped_sum_in_one_pass(flat(layer).double(), natural, examples(PICTURE), 1.0)
    assert bool(formed) == is_formed


@pytest.mark.parametrize("at_a_time", [1, 300])
@pytest.mark.parametrize("losses", [natural, views, natural_and_certified])
@pytest.mark.parametrize("description", ["conv 3 3/2+1, relu, linear", "conv 32 5, relu, linear"])
def test_a_few_examples_at_a_time_are_all_examples(
    description: str, losses: Losses, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_gradients, "NUMBERS_AT_ONCE", {"cpu": at_a_time})
    assert_right(layered(description, PICTURE), losses, examples(PICTURE, losses))


@pytest.mark.parametrize("losses", BOXED)
@pytest.mark.parametrize("name", STACKS)
def test_the_pass_of_boxes_equals_the_slow_loop(name: str, losses: Losses) -> None:
    description, shape = STACKS[name]
    network, batch = layered(description, shape), examples(shape, losses)
    assert_right(network, losses, batch)
    assert clipper_for(network.double(), losses, batch) is clipped_sum_in_one_pass


@pytest.mark.parametrize("losses", [spread_alone, whole_output_layer])
@pytest.mark.parametrize("name", ["two linear", "conv"])
def test_unusual_meetings_equal_the_slow_loop(name: str, losses: Losses) -> None:
    description, shape = STACKS[name]
    if losses is whole_output_layer and name == "two linear":
        shape = (8,)
    assert_right(layered(description.replace("conv 3 3", "conv 2 4"), shape), losses, examples(shape))


def all_zero(network: Layered) -> None:
    for value in network.parameters():
        value.data.zero_()


def output_zero(network: Layered) -> None:
    network.layers[-1].weight.data.zero_()


def tied_classes(network: Layered) -> None:
    """W_0 = W_1, so that |W_0 - W_1| has no derivative, and single zeros elsewhere."""
    for layer in network.layers:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.weight.data[1] = layer.weight.data[0]
            layer.weight.data[2].view(-1)[::2] = 0


@pytest.mark.parametrize("change", [all_zero, output_zero, tied_classes])
@pytest.mark.parametrize("losses", BOXED)
@pytest.mark.parametrize("name", ["two linear", "conv with stride and padding"])
def test_zero_weights_and_ties_equal_the_slow_loop(
    name: str, losses: Losses, change: Callable[[Layered], None]
) -> None:
    """|w| has no derivative at 0; the one that is used has to be the one whose size the norms assume."""
    description, shape = STACKS[name]
    network = layered(description, shape)
    change(network)
    assert_right(network, losses, examples(shape, losses))


@pytest.mark.parametrize("losses", [natural, natural_and_certified])
@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "0.", "3.weight", "3.", "5.weight", "5.", "5.bias"])
def test_frozen_parameters_count_for_nothing(frozen: str, losses: Losses) -> None:
    """Neither in the sum nor in the norms: an example would be shortened for a gradient that it does not send."""
    network = layered("conv 3 3/2+1, relu, linear 5, tanh, linear", PICTURE)
    for name, value in network.named_parameters():
        value.requires_grad_(not name.startswith(f"layers.{frozen}"))
    assert 0 < sum(not value.requires_grad for value in network.parameters()) < 3
    assert_right(network, losses, examples(PICTURE))


def test_frozen_group_norm_counts_for_nothing() -> None:
    network = NETWORKS["group norm"]()
    norm = network[0][1]
    norm.bias.requires_grad_(False)
    assert_right(network, natural, examples(PICTURE))
    norm.weight.requires_grad_(False)
    assert_right(network, natural, examples(PICTURE))


PLAIN = ["conv 3 3", "conv 2 2/2", "conv 4 3+1", "conv 16 3/2+1", "avgpool 2", "maxpool 2", "linear 4", "linear 7"]
LAYER = st.sampled_from([*PLAIN, "relu", "tanh", "squash 2 0 0.5", "groupnorm 1", "groupnorm 2"])


@settings(max_examples=40)
@given(
    body=st.lists(LAYER, max_size=5),
    losses=st.sampled_from([natural, views, *BOXED]),
    count=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_random_networks_equal_the_slow_loop(body: list[str], losses: Losses, count: int, seed: int) -> None:
    if losses not in (natural, views):
        body = [layer for layer in body if not layer.startswith("groupnorm")]
    try:
        network = layered(", ".join([*body, "linear"]), PICTURE, seed).double()
    except ModelError:
        reject()
    batch = examples(PICTURE, losses, count, seed)
    slow = oracle(network, losses, batch, 1.0)
    assert agrees(clipped_sum_in_one_pass(network, losses, batch, 1.0), slow, 1e-9)
    assert agrees(clipped_sum_by_example(network, losses, batch, 1.0), slow, 1e-9)
