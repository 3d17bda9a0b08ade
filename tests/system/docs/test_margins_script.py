"""`results/search_margins.py`: its closed forms against the library's own loss, scattering and clipping."""

from __future__ import annotations

import importlib
import random
from types import ModuleType

import pytest
import torch
from support.pages import ROOT
from torch import nn

from stobatch.dp.clipping import clipped_sum_by_loop
from stobatch.models.layered import build_layered
from stobatch.models.scattering import Scattering
from stobatch.sound.losses import Margin, Objective, Ramp
from stobatch.types import Norm

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
    for mixtures in (None, (0.0, 0.0, 3.0)):
        front = Scattering(
            *((3, 12, 12), 4, (1.0, 3.0, 2.0), (0.0, 0.3, 0.3)),
            differences=(1.0, 0.0, 2.0),
            mixtures=mixtures,
            orders=1,
            even=even,
        )
        kept = script.Kept(inputs, None, front)
        torch.testing.assert_close(kept.of(torch.arange(4), front), front(inputs).flatten(1), atol=0.02, rtol=0.01)


def test_steepness_is_that_of_the_least_lead_over_its_slope(script: ModuleType) -> None:
    """Of one picture and three classes, by hand."""
    network = build_layered(LAYERS, (3, 12, 12), 4, torch.Generator().manual_seed(0))
    inputs = (torch.rand(250, 3, 12, 12, generator=torch.Generator().manual_seed(1)) * 2 - 1).requires_grad_()
    labels = torch.zeros(250, dtype=torch.long)
    scores, radii = network(inputs), []
    for other in (1, 2, 3):
        lead = scores[:, 0] - scores[:, other]
        (slope,) = torch.autograd.grad(lead.sum(), inputs, retain_graph=True)
        radii.append((lead / slope.abs().sum((1, 2, 3))).detach())
    least = torch.stack(radii).amin(0)
    asked = float(least.median())
    found = script.steepness(network, inputs.detach(), labels, Norm.LINF, (asked,))
    assert found["at_first_order"][f"{asked:.6g}"] == pytest.approx(float((least >= asked).double().mean()), abs=0.01)
    assert found["clean_of_all"] == pytest.approx(float((least > 0).double().mean()), abs=1e-4)


def test_settings_that_are_drawn_keep_what_is_left_out(script: ModuleType) -> None:
    """Gains of 0 stay 0, so that kept features fit; the first settings are those that were good before."""
    space, chance = script.TASKS["cifar10_linf_strict"].space, random.Random(1)
    layers = {space.settings(chance)["model.architecture"] for _ in range(20)}
    assert len(layers) > 10
    for text in layers:
        gains = text.split(",")[0].split()[4:]
        assert [place for place, gain in enumerate(gains) if float(gain) == 0] == [4, 8]
