"""Clipped sums: equal to a slow loop over single examples, never further than C from the sum without an example.

The oracle asks autograd for one example's gradient at a time and knows nothing of tapes, rows or inner products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.bounds.boxes import Box, spread, worst_case_scores
from stobatch.dp import layer_gradients
from stobatch.dp import layer_gradients as tape
from stobatch.dp.clipping import (
    Batch,
    ClippedSum,
    Clipper,
    Losses,
    clipped_sum_by_example,
    clipped_sum_in_chunks,
    clipped_sum_in_one_pass,
    clipper_for,
    clipping_weights,
)
from stobatch.dp.layer_gradients import ConvGradients, LinearGradients
from stobatch.errors import ModelError
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


def unbounded(inputs: Tensor, radius: float) -> Box:
    """As `Box.around`, but huge inputs stay huge."""
    return Box.between(inputs - radius, inputs + radius)


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


def spread_alone(network: nn.Module, batch: Batch) -> Tensor:
    """The weight meets nothing but how far inputs move."""
    assert isinstance(network, Layered)
    first = network.layers[0]
    assert isinstance(first, nn.Conv2d | nn.Linear)
    return spread(first, batch[0].abs()).square().flatten(1).sum(1)


def whole_output_layer(network: nn.Module, batch: Batch) -> Tensor:
    """The output layer meets boxes in both ways: score by score, and against the label."""
    assert isinstance(network, Layered)
    last = network.layers[-1]
    assert isinstance(last, nn.Linear)
    return certified(network, batch) + spread(last, batch[0].flatten(1)[:, : last.in_features].abs()).square().sum(1)


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


@pytest.mark.parametrize("losses", [natural, views])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_fast_way_equals_the_slow_loop(name: str, losses: Losses) -> None:
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
    monkeypatch.setattr(layer_gradients, "AT_A_TIME", {"cpu": at_a_time})
    assert_right(layered(description, PICTURE), losses, examples(PICTURE, losses))


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


# Sensitivity: what the privacy proof needs.


def largest_change(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float, by: Clipper) -> float:
    """max ‖sum(D) - sum(D minus i)‖ over the examples i."""
    whole = by(network, losses, batch, clip_norm).gradients
    changes = []
    for row in range(len(batch[0])):
        rest = torch.arange(len(batch[0])) != row
        less = by(network, losses, tuple(entry[rest] for entry in batch), clip_norm).gradients
        changes.append(difference(whole, less))
    return max(changes)


HOSTILE = [0.0, 1e-200, 1e-12, 1.0, 1e4, 1e12, 1e80, 1e160, 1e308, math.inf, -math.inf, math.nan]


@settings(max_examples=40)
@given(
    name=st.sampled_from(["two linear", "conv with stride and padding", "two convs", "wide conv"]),
    losses=st.sampled_from([natural, views, *BOXED]),
    scales=st.lists(st.sampled_from(HOSTILE), min_size=2, max_size=5),
    clip_norm=st.sampled_from([1e-3, 1.0, 50.0]),
    seed=st.integers(0, 1000),
)
@pytest.mark.parametrize("by", [clipped_sum_in_one_pass, clipped_sum_by_example])
def test_no_example_moves_the_sum_further_than_c(
    by: Clipper, name: str, losses: Losses, scales: list[float], clip_norm: float, seed: int
) -> None:
    """Inputs of any size, infinite and undefined ones included."""
    description, shape = STACKS[name]
    network = layered(description.replace("squash 2 -0.5 0.5, ", ""), shape, seed).double()
    inputs, labels = examples(shape, losses, len(scales), seed)
    inputs *= torch.tensor(scales).double().reshape(-1, *[1] * (inputs.ndim - 1))
    assert largest_change(network, losses, (inputs, labels), clip_norm, by) <= clip_norm * (1 + 1e-6)


@pytest.mark.parametrize("by", [clipped_sum_in_one_pass, clipped_sum_by_example])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_example_that_is_not_finite_adds_nothing(by: Clipper, bad: float) -> None:
    network, batch = layered("conv 3 3, relu, linear", PICTURE).double(), examples(PICTURE)
    inputs = batch[0].clone()
    inputs[2, 0, 3, 3] = bad
    rest = torch.tensor([0, 1, 3, 4])
    found = by(network, natural, (inputs, batch[1]), 0.5)
    assert difference(found.gradients, by(network, natural, (batch[0][rest], batch[1][rest]), 0.5).gradients) < 1e-12
    assert not bool(found.norms[2].isfinite())
    assert bool(found.norms[rest].isfinite().all())
    inputs[:, 0, 3, 3] = bad
    assert length(by(network, natural, (inputs, batch[1]), 0.5).gradients) == 0


def opposed(network: nn.Module, batch: Batch) -> Tensor:
    """Two views that all but cancel, times a weight."""
    first, second = network(batch[0][:, 0]), network(batch[0][:, 1])
    return (first - second).sum(1) * batch[1]


def in_one_call(network: nn.Module, batch: Batch) -> Tensor:
    first, second = network(batch[0].flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
    return (first - second).sum(1) * batch[1]


def spread_against_centre(network: nn.Module, batch: Batch) -> Tensor:
    """W a - |W| r with r all but equal to |a|: the gradient is short, its two parts are long."""
    assert isinstance(network, nn.Linear)
    return (network(batch[0][:, 0].abs()) - spread(network, batch[0][:, 1].abs())).sum(1) * batch[1]


CANCELLING = [
    (opposed, False),
    (opposed, True),
    (in_one_call, False),
    (in_one_call, True),
    (spread_against_centre, False),
]


@pytest.mark.parametrize(("losses", "picture"), CANCELLING)
def test_long_parts_that_cancel_are_clipped_all_the_same(losses: Losses, picture: bool) -> None:
    """In float32 an inner product of such rows may come out as 0: the example would seem short and go unclipped."""
    torch.manual_seed(0)
    network: nn.Module = nn.Linear(20, 5, bias=False)
    if picture:
        network = nn.Sequential(nn.Conv2d(5, 30, 2, bias=False), nn.Flatten())
    elif losses is spread_against_centre:
        network.weight.data.abs_()
    first = torch.randn(60, 1, *((5, 2, 2) if picture else (20,)))
    both = torch.cat([first, first + 1e-4 * torch.randn_like(first)], 1)
    batch = (both, torch.full((60,), 1e5))
    assert float(oracle(network, losses, batch, 1.0).norms.min()) > 10
    for row in range(60):
        alone = clipped_sum_in_one_pass(network, losses, (both[row : row + 1], batch[1][row : row + 1]), 1.0)
        assert length(alone.gradients) <= 1 + 1e-4
    assert largest_change(network, losses, batch, 1.0, clipped_sum_in_one_pass) <= 1 + 1e-3


def test_trusting_rounded_inner_products_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_gradients, "_hidden", lambda size, *_: torch.zeros_like(size))
    with pytest.raises(AssertionError):
        test_long_parts_that_cancel_are_clipped_all_the_same(opposed, False)
    with pytest.raises(AssertionError):
        test_long_parts_that_cancel_are_clipped_all_the_same(opposed, True)


def test_the_allowance_for_rounding_costs_next_to_nothing() -> None:
    """Where rows do not cancel, norms in float32 are a ten-thousandth too long at most."""
    network, batch = flat(nn.Conv2d(2, 24, 5), nn.ReLU()), examples(PICTURE, views, 50)
    fast = clipped_sum_in_one_pass(network, views, (batch[0].float(), batch[1]), 1.0).norms.double()
    true = clipped_sum_by_example(network.double(), views, batch, 1.0).norms
    ratio = fast / true
    assert 1 - 1e-6 <= float(ratio.min()) <= float(ratio.max()) <= 1 + 1e-4


def clipped_by_the_batch(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedSum:
    whole = clipped_sum_in_one_pass(network, losses, batch, math.inf)
    weight = min(1.0, clip_norm / length(whole.gradients)) if len(batch[0]) else 1.0
    return ClippedSum({name: weight * value for name, value in whole.gradients.items()}, whole.norms)


def views_clipped_apart(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedSum:
    count = batch[0].shape[1]
    return clipped_sum_in_one_pass(
        network, natural, (batch[0].flatten(0, 1), batch[1].repeat_interleave(count)), clip_norm
    )


def test_clipping_the_batch_is_caught() -> None:
    """One example turns the whole sum around: it moves by up to 2C."""
    network = layered("linear", (4,)).double()
    inputs, labels = torch.ones(4, 4).double(), torch.zeros(4).long()
    inputs[0] *= -1e3
    assert largest_change(network, natural, (inputs, labels), 1e-3, clipped_by_the_batch) > 1.5e-3
    assert largest_change(network, natural, (inputs, labels), 1e-3, clipped_sum_in_one_pass) <= 1e-3 * (1 + 1e-6)


def test_clipping_views_apart_is_caught() -> None:
    network, batch = layered("conv 3 3, relu, linear", PICTURE).double(), examples(PICTURE, views)
    assert largest_change(network, views, batch, 1e-2, views_clipped_apart) > 1.2e-2
    assert largest_change(network, views, batch, 1e-2, clipped_sum_in_one_pass) <= 1e-2 * (1 + 1e-6)


def without_bias(gradients: LinearGradients) -> Tensor:
    return gradients._of_weight()


def without_cross_term(gradients: LinearGradients) -> Tensor:
    parts = [layer_gradients._gram(*rows)[0] for rows in ((gradients.a, gradients.g), (gradients.r, gradients.h))]
    return sum(parts) + gradients.g.sum(1).square().sum(1)


def without_other_rows(gradients: LinearGradients) -> Tensor:
    """Rows of one example taken for orthogonal."""
    return (gradients.a.square().sum(2) * gradients.g.square().sum(2)).sum(1) + gradients.g.sum(1).square().sum(1)


@pytest.mark.parametrize(
    ("twin", "losses"),
    [
        (without_bias, natural),
        (without_cross_term, natural_and_certified),
        (without_cross_term, certified),
        (without_other_rows, views),
    ],
)
def test_a_forgotten_part_of_the_norm_is_caught(
    twin: Callable[[LinearGradients], Tensor], losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It differs from the oracle, and some example is longer than C."""
    network, batch = layered("linear 5, tanh, linear", (4,)).double(), examples((4,), losses, 20)
    batch = (batch[0] / 4, batch[1])
    clip_norm = 0.01
    assert largest_change(network, losses, batch, clip_norm, clipped_sum_in_one_pass) <= clip_norm * (1 + 1e-6)
    slow = oracle(network, losses, batch, clip_norm)
    monkeypatch.setattr(LinearGradients, "squared_norms", twin)
    assert not agrees(clipped_sum_in_one_pass(network, losses, batch, clip_norm), slow, 1e-3)
    assert largest_change(network, losses, batch, clip_norm, clipped_sum_in_one_pass) > clip_norm * 1.01


# Coupling: no example reaches another's part of the sum.


def weighted(losses: Losses) -> Losses:
    """A weight for each example; with all but one at zero the sum is that one's part, in a batch of the same shape."""
    return lambda network, batch: losses(network, batch[:-1]) * batch[-1]


def changed_part(network: nn.Module, losses: Losses, by: Clipper = clipped_sum_in_one_pass) -> float:
    inputs, labels = examples(PICTURE, losses)
    only = torch.zeros(len(inputs)).double()
    only[1] = 1
    before = by(network.double(), weighted(losses), (inputs, labels, only), 0.5)
    assert length(before.gradients) > 0.1
    changes = []
    for scale in (0.0, -1.0, 1e3):
        other = inputs.clone()
        other[3] *= scale
        after = by(network, weighted(losses), (other, labels.roll(1).where(torch.arange(5) == 3, labels), only), 0.5)
        changes.append(difference(before.gradients, after.gradients) + float((before.norms - after.norms)[1].abs()))
    return max(changes)


@pytest.mark.parametrize("losses", [natural, views, *BOXED])
def test_changing_an_example_leaves_every_other_part_as_it_is_bit_for_bit(losses: Losses) -> None:
    assert changed_part(layered("conv 4 3, relu, linear 6, tanh, linear", PICTURE), losses) == 0
    if losses in (natural, views):
        assert changed_part(NETWORKS["group norm"](), losses) == 0
        assert changed_part(NETWORKS["wide conv"](), losses) == 0


def test_batch_normalisation_is_caught() -> None:
    mixing = flat(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, affine=False, track_running_stats=False), nn.ReLU())
    assert changed_part(mixing, natural) > 1e-3


# What the tape cannot see.


@pytest.mark.parametrize(
    "first",
    [
        (nn.Conv2d(2, 3, 3),),
        (nn.Flatten(), nn.Linear(72, 4)),
        (nn.Conv2d(2, 3, 3), nn.Flatten()),
        (nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)),
        (nn.Conv2d(2, 3, 3), nn.Hardtanh(-0.5, 0.5, inplace=True)),
    ],
    ids=repr,
)
def test_layers_may_overwrite_what_others_returned(first: tuple[nn.Module, ...]) -> None:
    """The gradient is taken where the values were made, not where they are overwritten."""
    network, batch = flat(*first, nn.LeakyReLU(0.3, inplace=True)), examples(PICTURE)
    assert_right(network, natural, batch)
    assert clipper_for(network.double(), natural, batch) is clipped_sum_in_one_pass


def test_gradients_at_overwritten_values_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    network, batch = flat(nn.Conv2d(2, 3, 3), nn.LeakyReLU(0.3, inplace=True)).double(), examples(PICTURE)
    monkeypatch.setattr(tape, "get_gradient_edge", lambda outputs: outputs)
    assert not agrees(clipped_sum_in_one_pass(network, natural, batch, 1.0), oracle(network, natural, batch, 1.0), 1e-3)
    assert clipper_for(network, natural, batch) is clipped_sum_by_example


class OverwritesInputs(nn.Module):
    """Scales what its layer was given before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, CLASSES)

    def forward(self, values: Tensor) -> Tensor:
        own = values.clone()
        out = self.linear(own)
        own.mul_(2)
        return out


class OverwritesView(nn.Module):
    """Overwrites a layer's output that is a view, so that autograd goes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, values: Tensor) -> Tensor:
        return F.leaky_relu_(self.linear(values.unflatten(1, (2, 2))), 0.3).sum(1)


@pytest.mark.parametrize("kind", [OverwritesInputs, OverwritesView])
def test_what_is_overwritten_out_of_sight_is_refused(kind: Callable[[], nn.Module]) -> None:
    network, batch = kind().double(), examples((4,))
    with pytest.raises(ModelError, match="inplace=False"):
        clipped_sum_in_one_pass(network, natural, batch, 1.0)


def test_a_network_that_overwrites_out_of_sight_goes_the_slow_way() -> None:
    network, batch = OverwritesView().double(), examples((4,))
    assert clipper_for(network, natural, batch) is clipped_sum_by_example
    assert agrees(clipped_sum_by_example(network, natural, batch, 1.0), oracle(network, natural, batch, 1.0), EXACT)


class Outside(nn.Module):
    """Uses its layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, CLASSES)

    def forward(self, values: Tensor) -> Tensor:
        return self.linear(values) + F.linear(values.square(), self.linear.weight)


class Scaled(nn.Module):
    """Has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, CLASSES), nn.Parameter(torch.tensor(1.3))

    def forward(self, values: Tensor) -> Tensor:
        return self.linear(values) * self.scale


class Doubled(nn.Linear):
    """A linear layer by name only."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(2 * values)


class Constant(nn.Module):
    """Sends the same rows through its layer whatever the examples are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.query = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, values: Tensor) -> Tensor:
        fixed = torch.ones(2 * len(values), 4).to(values)
        return self.query(values * self.linear(fixed).mean(0))


def tied() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Linear(4, CLASSES))


def tied_behind_zero() -> nn.Module:
    """As every gradient behind an output layer at zero is zero, the probe would see nothing at the weights' start."""
    network = tied()
    network[-1].weight.data.zero_()
    return network


def on_pictures(conv: nn.Conv2d) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 1, 2)), conv, nn.Flatten(), nn.Linear(4, CLASSES))


ESCAPING: dict[str, Callable[[], nn.Module]] = {
    "outside": Outside,
    "own parameter": Scaled,
    "subclass": lambda: nn.Sequential(Doubled(4, CLASSES)),
    "constant rows": Constant,
    "tied": tied,
    "tied behind zero": tied_behind_zero,
    "groups": lambda: on_pictures(nn.Conv2d(2, 2, 1, groups=2)),
    "padding by name": lambda: on_pictures(nn.Conv2d(2, 2, (1, 3), padding="same")),
    "padding by reflection": lambda: on_pictures(nn.Conv2d(2, 2, (1, 3), padding=(0, 1), padding_mode="reflect")),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, CLASSES)),
}


@pytest.mark.parametrize("name", ESCAPING)
def test_what_escapes_the_tape_goes_the_slow_way(name: str) -> None:
    torch.manual_seed(0)
    network, batch = ESCAPING[name](), examples((4,))
    way = clipper_for(network.double(), natural, batch)
    assert way is clipped_sum_by_example
    slow = oracle(network, natural, batch, 0.5)
    assert agrees(way(network, natural, batch, 0.5), slow, EXACT)


def penalised(network: nn.Module, batch: Batch) -> Tensor:
    return natural(network, batch) + 0.1 * sum(value.square().sum() for value in network.parameters())


def view_after_view(network: nn.Module, batch: Batch) -> Tensor:
    """Rows in the wrong order: all examples, then all of them again."""
    scores = network(torch.cat([batch[0][:, 0], batch[0][:, 1]]))
    return natural(lambda rows: rows, (scores, batch[1].repeat(2))).unflatten(0, (2, -1)).mean(0)  # type: ignore[arg-type]


@pytest.mark.parametrize("losses", [penalised, view_after_view])
def test_losses_that_escape_the_tape_go_the_slow_way(losses: Losses) -> None:
    network = layered("linear 5, tanh, linear", (4,)).double()
    batch = examples((4,), views if losses is view_after_view else natural)
    assert clipper_for(network, losses, batch) is clipped_sum_by_example
    slow = oracle(network, losses, batch, 0.5)
    assert agrees(clipped_sum_by_example(network, losses, batch, 0.5), slow, EXACT)
    assert not agrees(clipped_sum_in_one_pass(network, losses, batch, 0.5), slow, 1e-3)


def test_one_example_is_too_few_for_a_probe() -> None:
    """Whose row is whose cannot be told from it."""
    network = layered("linear 5, tanh, linear", (4,)).double()
    for count, way in ((1, clipped_sum_by_example), (2, clipped_sum_in_one_pass)):
        assert clipper_for(network, natural, examples((4,), count=count)) is way


def test_choosing_leaves_the_network_as_it_was() -> None:
    network = layered("conv 3 3, relu, linear", PICTURE)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    inputs, labels = examples(PICTURE)
    assert clipper_for(network, natural, (inputs.float(), labels)) is clipped_sum_in_one_pass
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(value.grad is None for value in network.parameters())
    assert not any(layer._forward_hooks for layer in network.modules())


def test_a_probe_that_fails_leaves_the_network_as_it_was() -> None:
    network, before = layered("linear", (4,)), layered("linear", (4,)).state_dict()
    with pytest.raises(RuntimeError):
        clipper_for(network, natural, (torch.zeros(3, 7), torch.zeros(3).long()))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(layer._forward_hooks for layer in network.modules())


def test_an_attack_inside_the_losses_is_not_part_of_the_gradient() -> None:
    """Its passes meet the same weights, with and without gradients of inputs."""
    network, batch = layered("conv 3 3, relu, linear", PICTURE).double(), examples(PICTURE)

    def attacked(network: nn.Module, batch: Batch) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(natural(network, (inputs, batch[1])).sum(), inputs)
        candidate = (inputs + 0.3 * gradient.sign()).detach()
        with torch.no_grad():
            worse = natural(network, (candidate, batch[1])) > natural(network, batch)
        return natural(network, (torch.where(worse[:, None, None, None], candidate, batch[0]), batch[1]))

    slow = oracle(network, attacked, batch, 0.5)
    assert agrees(clipped_sum_in_one_pass(network, attacked, batch, 0.5), slow, EXACT)
    assert largest_change(network, attacked, batch, 0.5, clipped_sum_in_one_pass) <= 0.5 * (1 + 1e-6)


# Small cases.


@pytest.mark.parametrize("by", [clipped_sum_in_one_pass, clipped_sum_by_example])
def test_an_empty_batch_gives_zeros_of_every_shape(by: Clipper) -> None:
    network = layered("conv 3 3, relu, linear", PICTURE)
    empty = (torch.zeros(0, *PICTURE), torch.zeros(0).long())
    for found in (by(network, natural, empty, 1.0), clipped_sum_in_chunks(network, natural, empty, 1.0, 4, by=by)):
        assert {name: value.shape for name, value in found.gradients.items()} == {
            name: value.shape for name, value in network.named_parameters()
        }
        assert length(found.gradients) == 0
        assert found.norms.shape == (0,)


def test_losses_without_weights_give_zeros() -> None:
    network, batch = layered("conv 3 3, relu, linear", PICTURE).double(), examples(PICTURE)
    found = clipped_sum_in_one_pass(network, lambda network, batch: batch[0].flatten(1).sum(1), batch, 1.0)
    assert length(found.gradients) == 0
    assert found.norms.tolist() == [0.0] * 5


@pytest.mark.parametrize("chunk", [1, 2, 5, 9])
@pytest.mark.parametrize("by", [clipped_sum_in_one_pass, clipped_sum_by_example])
def test_chunks_add_up(chunk: int, by: Clipper) -> None:
    network, batch = layered("conv 3 3, relu, linear", PICTURE).double(), examples(PICTURE)
    whole = by(network, natural, batch, 0.5)
    assert agrees(clipped_sum_in_chunks(network, natural, batch, 0.5, chunk, by=by), whole, EXACT)


def test_weights_shorten_and_never_lengthen() -> None:
    norms = torch.tensor([0.0, 1e-30, 0.5, 2.0, 8.0, math.inf, math.nan])
    weights, exact = clipping_weights(norms, 2.0), [1.0, 1.0, 1.0, 1.0, 0.25, 0.0, 0.0]
    assert weights.tolist() == pytest.approx(exact, rel=1e-6)
    assert all(found <= wanted for found, wanted in zip(weights.tolist(), exact, strict=True))


@settings(max_examples=300)
@given(
    norm=st.floats(1e-6, 1e30), clip_norm=st.floats(1e-6, 1e6), dtype=st.sampled_from([torch.float32, torch.float64])
)
def test_a_weight_times_a_norm_is_at_most_c_in_exact_arithmetic(
    norm: float, clip_norm: float, dtype: torch.dtype
) -> None:
    """Norms are in float64 and never too short; the weight is rounded to the precision of the gradients."""
    (weight,) = clipping_weights(torch.tensor([norm], dtype=torch.float64), clip_norm, dtype).tolist()
    assert Fraction(weight) * Fraction(norm) <= Fraction(clip_norm)
    assert weight >= min(1.0, clip_norm / norm) * (1 - 1e-6)


def exact_square(values: Tensor) -> Fraction:
    return sum((Fraction(value) ** 2 for value in values.flatten().tolist()), Fraction(0))


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("spread", [1e-6, 1e-3, 1.0], ids=["cancelling", "nearly", "unrelated"])
def test_a_norm_in_float32_is_never_below_the_exact_one(rows: int, spread: float) -> None:
    """Against rational arithmetic, with rows that all but cancel; without the allowance some are too short."""
    generator = torch.Generator().manual_seed(rows)
    a = torch.randn(40, 1, 30, generator=generator) + spread * torch.randn(40, rows, 30, generator=generator)
    g = torch.randn(40, 1, 20, generator=generator) + spread * torch.randn(40, rows, 20, generator=generator)
    signs = torch.tensor([1.0 if row % 2 == 0 else -1.0 for row in range(rows)])
    g = g * signs[:, None]
    total, size = layer_gradients._gram(a, g)
    hidden = layer_gradients._hidden(size, 30 + 20 + 8, 2.0**-24) if rows > 1 else torch.zeros_like(total)
    found = total.clamp(min=0) + hidden
    short = 0
    for example in range(40):
        formed = [
            [
                sum((Fraction(x) * Fraction(y) for x, y in zip(column, other, strict=True)), Fraction(0))
                for other in a[example].T.tolist()
            ]
            for column in g[example].T.tolist()
        ]
        exact = sum((entry**2 for row in formed for entry in row), Fraction(0))
        assert Fraction(found[example].item()) >= exact
        short += Fraction(total[example].item()) < exact
    assert short or rows == 1, "nothing would be too short without the allowance"


def test_lengths_are_never_below_the_exact_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((20, 1), (20, 700), (20, 3, 90), (20, 2, 5, 7), (20,)):
        values = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-8, 8, shape, generator=generator)
        for row, found in zip(values, layer_gradients.squared_lengths(values).tolist(), strict=True):
            assert exact_square(row) <= Fraction(found) <= exact_square(row) * Fraction(10001, 10000)


def test_the_tape_is_closed_after_an_error() -> None:
    network = layered("linear", (4,))

    def fails(network: nn.Module, batch: Batch) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        clipped_sum_in_one_pass(network, fails, (torch.zeros(2, 4), torch.zeros(2).long()), 1.0)
    assert not any(layer._forward_hooks for layer in network.modules())
