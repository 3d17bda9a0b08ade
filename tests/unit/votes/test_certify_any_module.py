"""`bounds.certify` and `votes.certify` on modules of one's own: attacks and closed forms do not contradict them."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stobatch import attacks, bounds, votes
from stobatch.errors import DataError, ModelError, UnitError
from stobatch.models import Layered
from stobatch.types import UNIT_RANGE, InputRange, Norm, Radius, Status
from stobatch.votes.noise import GaussianNoise

FAILURE = 1e-10


@st.composite
def stacks(draw: st.DrawFn) -> nn.Sequential:
    """Layers that bounds can follow, from pictures of 1 x 4 x 4 to three classes."""
    torch.manual_seed(draw(st.integers(0, 2**20)))
    activation = draw(st.sampled_from([nn.ReLU, nn.Tanh]))
    width = draw(st.integers(1, 6))
    if draw(st.booleans()):
        pool = draw(st.sampled_from([nn.AvgPool2d(2), nn.MaxPool2d(2), nn.Identity()]))
        size = 4 if isinstance(pool, nn.Identity) else 2
        conv = nn.Conv2d(1, width, 3, padding=1)
        return nn.Sequential(conv, activation(), pool, nn.Flatten(), nn.Linear(width * size**2, 3))
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), activation(), nn.Linear(width, 3))


@pytest.mark.slow
@settings(max_examples=30)
@given(stacks(), st.sampled_from(list(Norm)), st.sampled_from(["apgd_ce", "square"]), st.integers(0, 2**20))
def test_no_attack_breaks_what_bounds_certify(module: nn.Sequential, norm: Norm, name: str, seed: int) -> None:
    torch.manual_seed(seed)
    inputs = 2 * torch.rand(6, 1, 4, 4) - 1
    radii = [Radius(size, norm) for size in (0.01, 0.05, 0.2, 1.0)]
    found = bounds.certify(module, inputs, radii)
    assert np.array_equal(found.label, module(inputs).argmax(1).numpy())
    certified = [found.certified(radius) for radius in radii]
    assert all((one >= other).all() for one, other in pairwise(certified))
    for radius, sure, more in zip(radii, certified, [*certified[1:], np.zeros(6, bool)], strict=True):
        only = sure & ~more  # at the largest radius of each: smaller balls lie inside
        if not only.any():
            continue
        rows = torch.from_numpy(only)
        labels = torch.from_numpy(found.label[only])
        broken = attacks.attack(module, inputs[rows], labels, radius, name=name, steps=20, queries=50)
        assert not broken.success.any()


def leads(slope: float) -> nn.Sequential:
    """The first class leads by slope (x_1 + x_2): its linf radius at x is |x_1 + x_2|/2, its l2 one |x_1 + x_2|/√2."""
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].weight.data.copy_(torch.tensor([[slope, slope], [0.0, 0.0]]))
    module[0].bias.data.zero_()
    return module


def test_bounds_of_a_linear_module_are_its_closed_form_and_half_as_much_again_is_broken() -> None:
    inputs = torch.tensor([[0.4, 0.2], [-0.1, -0.5], [0.7, 0.7]])
    exact = inputs.sum(1).abs().numpy() / 2
    radii = np.arange(1, 100) / 100
    found = bounds.certify(leads(3.0), inputs, radii)
    assert (found.radius <= exact).all()
    assert (found.radius >= exact - 0.011).all()
    # The broken twin: a radius half as large again is contradicted at every input.
    for row, label, radius in zip(inputs, found.label, found.radius, strict=True):
        assert attacks.attack(leads(3.0), row[None], torch.tensor([label]), 1.5 * float(radius)).success.all()


def test_a_certificate_names_its_unit_its_status_and_its_assumptions() -> None:
    inputs, labels = torch.tensor([[0.4, 0.2], [0.1, 0.0]]), torch.tensor([0, 1])
    found = bounds.certify(leads(1.0), inputs, Radius(0.2, Norm.LINF, UNIT_RANGE), labels)
    assert str(found[0]) == "class 0 within linf 0.2 over [0, 1] (proved)"
    assert (found[0].status, found[0].failure_probability, len(found)) == (Status.PROVED, 0.0, 2)
    assert found.certified(Radius(0.4)).tolist() == [True, False], "0.4 on [-1, 1] is 0.2 on [0, 1]"
    assert found.correct is not None
    assert found.correct.tolist() == [True, False]
    assert "1 certified, 1 of them with the right label; proved, radii linf over [0, 1]" in repr(found)
    assert "<li>the deployed pass is a call" in found._repr_html_()
    with pytest.raises(UnitError, match="you ask about l2"):
        found.certified(Radius(0.1, Norm.L2))


def test_a_stack_of_the_library_is_certified_as_its_layers_are() -> None:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)]
    inputs = 2 * torch.rand(20, 4) - 1
    one = bounds.certify(Layered(layers, (4,)), inputs, [0.01, 0.1])
    other = bounds.certify(nn.Sequential(*layers), inputs, [0.01, 0.1])
    assert np.array_equal(one.radius, other.radius)
    assert len(set(one.radius)) > 1


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(inputs * self.layer(inputs).relu())
        return scores


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Gated(), r"no bounds for a Gated.*stobatch\.votes\.certify"),
        (nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)), "layer '1' is GELU: no bounds are known"),
        (nn.Sequential(nn.Linear(2, 2).double()), "float64"),
    ],
)
def test_modules_that_bounds_cannot_follow_are_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        bounds.certify(module, torch.zeros(1, 2), 0.1)


def test_requests_that_make_no_sense_are_refused() -> None:
    module, inputs = leads(1.0), torch.full((2, 2), -0.5)
    for radii in ([], [Radius(0.1), Radius(0.1, Norm.L2)]):
        with pytest.raises(UnitError, match="none, or of different units"):
            bounds.certify(module, inputs, radii)
    with pytest.raises(DataError, match=r"inputs leave \[0, 1\]"):
        bounds.certify(module, inputs, Radius(0.1, Norm.LINF, UNIT_RANGE))
    with pytest.raises(UnitError, match=r"is not inside \[-1, 1\]"):
        bounds.certify(module, inputs, Radius(0.1, Norm.LINF, InputRange(0, 255)))
    with pytest.raises(DataError, match="labels of shape"):
        bounds.certify(module, inputs, 0.1, torch.zeros(3))


INPUTS = torch.tensor([[x, y] for x, y in product((-0.7, -0.2, 0.0, 0.1, 0.6), (-0.4, 0.3))])
TRUE_L2 = INPUTS.sum(1).abs().double().numpy() / np.sqrt(2)


def voted() -> votes.VoteCertificates:
    return votes.certify(leads(5.0), INPUTS, 0.25, draws=4_000, failure_probability=FAILURE)


def test_votes_on_a_linear_module_stay_below_its_closed_form() -> None:
    """Ten certificates, each wrong with probability at most 1e-10: the false-alarm rate is 1e-9."""
    found = voted()
    sums = INPUTS.sum(1).numpy()
    sure = ~found.abstain
    assert sure.sum() >= 6
    assert np.array_equal(found.label[sure], (sums[sure] < 0).astype(int))
    assert (found.radius(Norm.L2) <= TRUE_L2).all()
    near = sure & (TRUE_L2 < 2 * 0.25)
    assert (found.radius(Norm.L2)[near] > 0.4 * TRUE_L2[near]).all(), "and says something"


def test_half_of_the_noise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: with half of the noise that the radius is computed from, the closed form is exceeded."""
    whole = GaussianNoise.draw
    monkeypatch.setattr(GaussianNoise, "draw", lambda self, shape, generator: whole(self, shape, generator) / 2)
    assert (voted().radius(Norm.L2) > TRUE_L2).any()


def test_a_vote_names_its_chance_of_error_and_abstains() -> None:
    seeded = torch.Generator().manual_seed(0)
    found = votes.certify(leads(5.0), torch.tensor([[0.9, 0.9], [0.0, 0.0]]), 0.1, draws=500, generator=seeded)
    assert str(found[1]) == "abstains: no label was proved"
    assert str(found[0]).endswith("over [-1, 1] (proved, wrong with probability at most 0.001)")
    assert found[0].radius.norm is Norm.L2
    assert found.certified(found[0].radius).tolist() == [True, False]
    for words in ("2 inputs, 1 abstain", "of the vote, not of a single pass", "assuming exact arithmetic"):
        assert words in repr(found)


def test_votes_serve_modules_that_bounds_cannot_follow_and_refuse_those_that_mix() -> None:
    torch.manual_seed(0)
    assert len(votes.certify(Gated(), torch.zeros(3, 2), 0.1, draws=200)) == 3
    mixing = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    with pytest.raises(ModelError, match="layer '0' is in training mode"):
        votes.certify(mixing, torch.zeros(3, 2), 0.1)
    assert len(votes.certify(mixing.eval(), torch.zeros(3, 2), 0.1, draws=200)) == 3
    with pytest.raises(ModelError, match="returns"):
        votes.certify(nn.Flatten(0), torch.zeros(3, 2), 0.1)
    with pytest.raises(DataError, match="outside"):
        votes.certify(Gated(), torch.full((1, 2), 1.5), 0.1)
    with pytest.raises(DataError, match="no inputs"):
        votes.certify(Gated(), torch.zeros(0, 2), 0.1)
