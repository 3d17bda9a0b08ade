"""`results/search_margins.py`: its closed forms against the library's own loss, scattering and clipping."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
from support.pages import ROOT
from torch import nn

from stobatch.dp.clipping import clipped_sum_by_loop
from stobatch.models.layered import build_layered
from stobatch.models.scattering import Scattering
from stobatch.sound.losses import Margin, Objective, Ramp

LAYERS = "scatter_even 4 2 3 0.25 0.03, linear"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    return importlib.import_module("search_margins")


@pytest.mark.parametrize("progress", [0.0, 0.1, 1.0])
def test_clipped_gradients_are_those_of_the_margin_loss(script: ModuleType, progress: float) -> None:
    generator = torch.Generator().manual_seed(0)
    network = build_layered(LAYERS, (3, 12, 12), 5, generator)
    front, head = network.layers[0], network.layers[-1]
    assert isinstance(front, Scattering)
    assert isinstance(head, nn.Linear)
    inputs, labels = torch.rand(20, 3, 12, 12, generator=generator) * 2 - 1, torch.arange(20) % 5
    ramp, features, bound = Ramp(0.0, 0.3), front(inputs), 3.0
    objective = Objective(((1.0, Margin(0.35)),), ramp)
    batch, losses = objective.prepare(network, features, labels, progress, torch.zeros)
    expected = clipped_sum_by_loop(network, losses, batch, bound)
    with torch.no_grad():
        found = script.clipped_sum(head, front, (features, labels), 0.35, bound, ramp.share(progress))
    for mine, (name, _) in zip(found, network.named_parameters(), strict=True):
        torch.testing.assert_close(mine, expected.gradients[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("even", [True, False])
def test_kept_features_have_the_gains_and_levels_of_a_network(script: ModuleType, even: bool) -> None:
    inputs = torch.rand(4, 3, 12, 12, generator=torch.Generator().manual_seed(1)) * 2 - 1
    front = Scattering((3, 12, 12), 8, (1.0, 2.0, 2.0, 3.0), (-0.5, 0.25, 0.25, 0.03), even=even)
    kept = script.Kept(inputs, None, front)
    torch.testing.assert_close(kept.of(torch.arange(4), front), front(inputs).flatten(1), atol=0.02, rtol=0.01)
    others = (1.0, 0.0, 2.0)
    front = Scattering((3, 12, 12), 4, (1.0, 3.0, 2.0), (0.0, 0.3, 0.3), differences=others, orders=1, even=even)
    kept = script.Kept(inputs, None, front)
    torch.testing.assert_close(kept.of(torch.arange(4), front), front(inputs).flatten(1), atol=0.02, rtol=0.01)
