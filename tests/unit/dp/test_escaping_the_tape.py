"""What the tape cannot see goes the slow way or is refused, and a network is left as it was found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from slow_loop import (
    CLASSES,
    EXACT,
    PICTURE,
    agrees,
    assert_right,
    examples,
    flat,
    largest_change,
    layered,
    natural,
    oracle,
    views,
)
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.dp import layer_gradients as tape
from stobatch.dp.clipping import (
    Batch,
    Losses,
    clipped_sum_by_example,
    clipped_sum_in_one_pass,
    clipped_sum_mixed,
    clipper_for,
)
from stobatch.errors import ModelError


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
def test_hidden_in_place_changes_are_refused(kind: Callable[[], nn.Module]) -> None:
    network, batch = kind().double(), examples((4,))
    with pytest.raises(ModelError, match="inplace=False"):
        clipped_sum_in_one_pass(network, natural, batch, 1.0)


def test_a_network_with_hidden_in_place_changes_is_clipped_by_example() -> None:
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


LEFT_OVER = ("own parameter", "groups", "padding by name", "padding by reflection", "layer norm")
"""Parameters that no layer of the tape holds: they alone are formed."""


@pytest.mark.parametrize("name", ESCAPING)
def test_what_escapes_the_tape_is_clipped_by_example(name: str) -> None:
    torch.manual_seed(0)
    network, batch = ESCAPING[name](), examples((4,))
    way = clipper_for(network.double(), natural, batch)
    assert way is (clipped_sum_mixed if name in LEFT_OVER else clipped_sum_by_example)
    slow = oracle(network, natural, batch, 0.5)
    assert agrees(way(network, natural, batch, 0.5), slow, EXACT)


def penalised(network: nn.Module, batch: Batch) -> Tensor:
    return natural(network, batch) + 0.1 * sum(value.square().sum() for value in network.parameters())


def view_after_view(network: nn.Module, batch: Batch) -> Tensor:
    """Rows in the wrong order: all examples, then all of them again."""
    scores = network(torch.cat([batch[0][:, 0], batch[0][:, 1]]))
    return natural(lambda rows: rows, (scores, batch[1].repeat(2))).unflatten(0, (2, -1)).mean(0)  # type: ignore[arg-type]


@pytest.mark.parametrize("losses", [penalised, view_after_view])
def test_losses_that_escape_the_tape_are_clipped_by_example(losses: Losses) -> None:
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
