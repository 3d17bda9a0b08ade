"""Eq. 7 and Eq. 8: FGSM and its iterated form on noisy inputs, with the model's own prediction as label."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.attacks import APGD, FGSM, IFGSM, MIM, Ball, Madry, craft, ensemble_slices, paper_ensemble
from stobatch.errors import ModelError, SettingError
from stobatch.models import Network
from stobatch.types import Radius

Uniform = Callable[..., Tensor]

WALKS = {"fgsm": lambda steps: FGSM(), "ifgsm": IFGSM, "mim": MIM, "madry": Madry, "apgd": APGD}


def sign_step(scores: nn.Module, points: Tensor) -> Tensor:
    """The sign in Eq. 7, one example at a time."""
    steps = []
    for point in points:
        x = point[None].clone().requires_grad_()
        logits = scores(x)
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits, logits.argmax(1)), x)
        steps.append(gradient[0].sign())
    return torch.stack(steps)


def test_fgsm_is_one_step_of_the_published_formula(make_network: Callable[..., Network], uniform: Uniform) -> None:
    network, points = make_network(), uniform(8, 1, 6, 6) / 2
    found = craft(network, Ball.around(points, Radius(0.1)), [FGSM()], torch.Generator())
    assert torch.allclose(found, points + 0.1 * sign_step(network, points), rtol=0, atol=1e-12)


def test_the_iterated_form_takes_steps_of_mu_over_t_with_a_new_prediction_each(
    make_network: Callable[..., Network], uniform: Uniform
) -> None:
    network, points, radius, steps = make_network(), uniform(8, 1, 6, 6) / 2, 0.3, 5
    expected = points
    for _ in range(steps):
        expected = expected + radius / steps * sign_step(network, expected)
    found = craft(network, Ball.around(points, Radius(radius)), [IFGSM(steps=steps)], torch.Generator())
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_one_step_of_the_iterated_form_is_fgsm(make_network: Callable[..., Network], uniform: Uniform) -> None:
    network, ball = make_network(), Ball.around(uniform(4, 1, 6, 6), Radius(0.2))
    results = [craft(network, ball, [attack], torch.Generator()) for attack in (FGSM(), IFGSM(steps=1))]
    assert torch.equal(*results)


def test_on_a_linear_model_no_point_of_the_ball_is_worse_than_fgsm(uniform: Uniform) -> None:
    """An oracle: the loss of two classes grows with one linear margin, and the sign step ends in its best corner."""
    model = nn.Linear(5, 2, bias=False).double()
    model.weight.data.copy_(uniform(2, 5, seed=1))
    centre, radius = uniform(6, 5) / 2, 0.25
    labels = model(centre).argmax(1)

    def losses(points: Tensor) -> Tensor:
        return F.cross_entropy(model(points), labels, reduction="none").detach()

    worst = losses(craft(model, Ball.around(centre, Radius(radius)), [FGSM()], torch.Generator(), labels=labels))
    for seed in range(200):
        points = centre + radius * uniform(6, 5, seed=seed + 10).sign()
        assert bool((losses(points) <= worst + 1e-12).all())


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(WALKS)), st.floats(0, 2), st.integers(1, 4), st.integers(0, 2**31), st.booleans())
def test_no_attack_leaves_the_ball_or_the_range(name: str, size: float, steps: int, seed: int, noisy: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    inputs = torch.rand(4, 6, generator=generator) * 2 - 1
    shift = 5 * torch.randn(6, generator=generator) if noisy else torch.zeros(6)
    ball = Ball.around(inputs + shift, Radius(size), shift=shift)
    points = craft(model, ball, [WALKS[name](steps)], generator)
    rounding = 1e-5
    assert float((points - inputs - shift).abs().max()) <= size + rounding
    assert float((points - shift).abs().max()) <= 1 + rounding
    assert bool((points == ball.project(points)).all())


@given(st.integers(1, 50), st.integers(1, 5))
def test_every_attack_of_the_ensemble_gets_an_equal_share(share: int, attacks: int) -> None:
    slices = ensemble_slices(share * attacks, attacks)
    assert [i for part in slices for i in range(part.start, part.stop)] == list(range(share * attacks))
    assert {part.stop - part.start for part in slices} == {share}


def test_an_unequal_share_is_refused() -> None:
    with pytest.raises(SettingError, match="Use 2499 or 2502"):
        ensemble_slices(2500, 3)


def test_a_fused_ensemble_is_each_attack_on_its_own_slice(
    make_network: Callable[..., Network], uniform: Uniform
) -> None:
    network, points = make_network(), uniform(6, 1, 6, 6)
    ball, attacks = Ball.around(points, Radius(0.2)), paper_ensemble(("ifgsm", "mim"), 3)
    assert all(attack.step_size(ball) == pytest.approx(0.2 / 3) for attack in attacks)
    fused = craft(network, ball, attacks, torch.Generator())
    alone = [
        craft(network, ball.part(part), [a], torch.Generator())
        for a, part in zip(attacks, ensemble_slices(6, 2), strict=True)
    ]
    assert torch.allclose(fused, torch.cat(alone), rtol=0, atol=1e-12)


def test_crafting_reads_no_label_and_leaves_the_model_alone(
    make_network: Callable[..., Network], uniform: Uniform
) -> None:
    network, points = make_network(), uniform(4, 1, 6, 6)
    craft(network, Ball.around(points, Radius(0.2)), [IFGSM(steps=2)], torch.Generator())
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize("name", sorted(WALKS))
def test_gradients_that_are_no_numbers_are_refused(name: str, uniform: Uniform) -> None:
    ball = Ball.around(uniform(2, 3), Radius(0.1))
    with pytest.raises(ModelError):
        craft(lambda points: points * float("nan"), ball, [WALKS[name](2)], torch.Generator())
