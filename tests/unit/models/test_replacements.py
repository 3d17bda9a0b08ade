"""What `fix` makes of layers that no guarantee allows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stobatch.dp.mixing import mixing_layers
from stobatch.errors import ModelError
from stobatch.models import FrozenAffine, fix, hand_over
from stobatch.models.experiments import require_function


class Block(nn.Module):
    """As residual networks have it: batch normalisation, overwriting ReLUs and an overwriting sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)

    def forward(self, values: Tensor) -> Tensor:
        out = self.norm(self.conv(values))
        out += values
        return self.relu(out)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), Block(), nn.Dropout(), nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3))


def statistics(module: nn.Module) -> nn.Module:
    """As after some training on public data."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            for value in (layer.running_mean, layer.running_var, layer.weight, layer.bias):
                nn.init.uniform_(value, 0.5, 1.5)
    return module


def test_a_frozen_copy_computes_what_evaluation_computes():
    module = statistics(network()).eval()
    fixed, inputs = fix(module, batch_norm="frozen", dropout="remove"), torch.rand(7, 1, 6, 6) * 2 - 1
    assert torch.allclose(fixed(inputs), module(inputs), rtol=1e-5, atol=1e-6)
    assert isinstance(fixed[1].norm, FrozenAffine)
    assert not [p for layer in fixed.modules() if isinstance(layer, FrozenAffine) for p in layer.parameters()]


def test_a_frozen_copy_without_weight_and_bias():
    layer = nn.BatchNorm1d(3, affine=False)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    nn.init.uniform_(layer.running_mean, 0.5, 1.5)
    nn.init.uniform_(layer.running_var, 0.5, 1.5)
    for values in (torch.rand(5, 3), torch.rand(5, 3, 4)):
        assert torch.allclose(FrozenAffine.of(layer)(values), layer.eval()(values), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_norm", ["group", "frozen"])
def test_a_fixed_network_passes_every_experiment(batch_norm):
    fixed = fix(network(), batch_norm=batch_norm, dropout="remove")
    assert mixing_layers(fixed) == []
    assert not fixed[1].relu.inplace
    require_function(hand_over(fixed, (1, 6, 6), 3), 20)


def test_the_given_network_stays_as_it_is():
    given = network()
    fix(given, dropout="remove")
    assert isinstance(given[1].norm, nn.BatchNorm2d)
    assert given[1].relu.inplace


def test_what_cannot_be_fixed_says_why():
    with pytest.raises(ModelError, match=r"layer '2' is Dropout.*dropout='remove'"):
        fix(network())
    with pytest.raises(ModelError, match="without running statistics"):
        fix(nn.Sequential(nn.BatchNorm2d(4, track_running_stats=False)), batch_norm="frozen")


def test_a_layer_that_stands_in_two_places_is_replaced_once():
    shared = nn.BatchNorm1d(8)
    fixed = fix(nn.Sequential(shared, nn.Linear(8, 8), shared))
    assert fixed[0] is fixed[2]
    assert isinstance(fixed[0], nn.GroupNorm)
