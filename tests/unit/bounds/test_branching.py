"""Slopes that are climbed on and branches on signs: below the exact minimum, never worse, and nearly complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations, product

import pytest
import torch
from support.exact_leads import exact_minimum, examples, small_network
from torch import Tensor, nn

from stobatch import bounds
from stobatch.bounds import branching, certifier, linear
from stobatch.bounds.branching import PLAIN, Branch, Effort
from stobatch.bounds.certifier import BoxCertifier
from stobatch.bounds.linear import Box, LayerBounds, LinearBounds, LowerSlope, ReLU
from stobatch.errors import SettingError
from stobatch.models.layered import Squash

SLOPES, BRANCHES = Effort(20), Effort(20, 160)
RADIUS = 0.4


def networks_with_a_least_lead_of(wanted: float, seeds: int = 6) -> Iterator[tuple[nn.Sequential, Tensor]]:
    """Go through tiny networks, each with one input, whose lead is smallest at this very value."""
    for seed, centre in product(range(seeds), examples(3)):
        layers = small_network(seed)
        label = int(layers(centre[None]).argmax())
        least = float(exact_minimum(layers, centre, RADIUS, label))
        layers[3].bias.data[label] += wanted - least
        if int(layers(centre[None]).argmax()) == label:
            yield layers, centre[None]


def proved(effort: Effort, wanted: float) -> list[bool]:
    found = networks_with_a_least_lead_of(wanted)
    return [bool(BoxCertifier(layers, effort=effort).margins(centre, RADIUS) > 0) for layers, centre in found]


def test_never_above_the_exact_minimum_and_each_effort_at_least_the_one_before() -> None:
    gains = []
    for seed, radius in product(range(4), (0.2, 0.6)):
        layers, inputs = small_network(seed), examples()
        plain, slopes, branches = (
            BoxCertifier(layers, effort=effort).margins(inputs, radius) for effort in (PLAIN, SLOPES, BRANCHES)
        )
        assert bool((plain <= slopes).all())
        assert bool((slopes <= branches).all())
        labels = BoxCertifier(layers).predict(inputs).tolist()
        for centre, label, bound in zip(inputs, labels, branches.tolist(), strict=True):
            assert bound <= exact_minimum(layers, centre, radius, label)
        gains.append(slopes - plain)
    assert float(torch.cat(gains).max()) > 1e-3


def test_with_enough_branches_nearly_every_answer_is_found() -> None:
    """Of narrow leads plain bounds prove some, slopes more, branches nearly all; and none that is not there.

    Nearly: where no ReLU is unstable, a linear program is left, which the optimiser solves up to its last steps.
    """
    plain, slopes, branches = (proved(effort, 0.02) for effort in (PLAIN, SLOPES, BRANCHES))
    assert sum(plain) < sum(slopes) < sum(branches)
    assert sum(branches) >= len(branches) - 1
    assert not any(proved(BRANCHES, -0.01))


def test_whatever_the_optimiser_does_is_clamped_to_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: branching._ReluVariables) -> None:
        self.values.data.mul_(5).add_(torch.randn(self.values.shape, generator=torch.Generator().manual_seed(1)))

    monkeypatch.setattr(branching._ReluVariables, "project", careless)
    assert not any(proved(Effort(20, 40), -0.01))


honest_split, honest_backward = Branch.split, ReLU.backward


def forgotten(self: Branch, scores: dict[int, Tensor]) -> list[Branch]:
    return honest_split(self, scores)[:1]


def both_halves_at_0(self: Box, signs: Tensor) -> Box:
    return Box(torch.where(signs == 0, self.low, 0.0), torch.where(signs == 0, self.high, 0.0))


def steep(self: ReLU, rows: LinearBounds, passed: LayerBounds, lower_slope: LowerSlope) -> LinearBounds:
    return honest_backward(self, rows, replace(passed, slope=None), lambda box, chord: 2 * torch.ones_like(chord))


def wrong_way(self: ReLU, rows: LinearBounds, passed: LayerBounds, lower_slope: LowerSlope) -> LinearBounds:
    without = honest_backward(self, rows, replace(passed, multiplier=None), lower_slope)
    taken_off = without.coefficients - honest_backward(self, rows, passed, lower_slope).coefficients
    return LinearBounds(without.coefficients + taken_off, without.constant, without.owner)


TWINS: dict[str, tuple[type, str, Callable[..., object]]] = {
    "a forgotten half": (Branch, "split", forgotten),
    "halves that are too small": (Box, "restrict_signs", both_halves_at_0),
    "a slope above one": (ReLU, "backward", steep),
    "a multiplier of the wrong sign": (ReLU, "backward", wrong_way),
}


@pytest.mark.parametrize("twin", TWINS)
def test_a_broken_branch_is_caught(twin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*TWINS[twin])
    assert any(proved(Effort(20, 40), -0.01))


def test_rounding_is_allowed_for_in_every_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """ReLU(2²⁴ + 3z - 2²⁴) is 0 or 4 in float32, and leads 1/2 in real numbers, where no sign is open."""
    claimed = []
    for order in permutations((2.0**24, 3.0, -(2.0**24))):
        inputs = torch.ones(1, 3)
        inputs[0, order.index(3.0)] = 0.16
        layers = nn.Sequential(Squash(4.0), nn.Linear(3, 1), nn.ReLU(), nn.Linear(1, 2)).requires_grad_(False)
        layers[1].weight.data.copy_(torch.tensor([order]))
        layers[1].bias.data.zero_()
        layers[3].weight.data.copy_(torch.tensor([[1.0], [0.0]]))
        layers[3].bias.data.copy_(torch.tensor([0.0, 0.5]))
        several = BoxCertifier(layers, effort=BRANCHES)
        assert float(several.margins(inputs, 0.08)) < 0
        with monkeypatch.context() as broken:
            broken.setattr(linear, "FLOAT32_UNIT", 0.0)
            broken.setattr(certifier, "_require_within_bounds", lambda *_: None)
            claimed.append(float(several.margins(inputs, 0.08)) > 0)
    assert any(claimed)


def test_an_answer_does_not_hang_on_its_company_and_a_radius_only_grows() -> None:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
    layers[0].weight.data.mul_(3)
    inputs = torch.rand(16, 4) * 2 - 1
    radii = [0.02, 0.05, 0.1, 0.2]
    together = bounds.certify(layers, inputs, radii, branches=30)
    alone = [bounds.certify(layers, one[None], radii, branches=30).radius[0] for one in inputs]
    assert together.radius.tolist() == alone
    plain = bounds.certify(layers, inputs, radii, slope_steps=0)
    assert bool((together.radius >= plain.radius).all())
    assert bool((together.radius > plain.radius).any())
    few, more = (
        BoxCertifier(layers, effort=effort).certified_radius(inputs, largest=0.5, tolerance=0.01).radius
        for effort in (PLAIN, Effort(20, 30))
    )
    assert bool((few <= more).all())
    assert bool((few < more).any())


def test_less_than_no_effort_is_refused() -> None:
    with pytest.raises(SettingError, match="is negative"):
        bounds.certify(small_network(0), examples(), 0.1, branches=-1)
