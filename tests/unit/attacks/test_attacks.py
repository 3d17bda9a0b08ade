"""Attacks as training uses them, on fused batches: against closed forms and against loops written by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stobatch.attacks import APGD, FGSM, IFGSM, MIM, Ball, Madry, craft, ensemble_slices, paper_ensemble
from stobatch.errors import ModelError, SettingError
from stobatch.types import PAPER_RANGE, UNIT_RANGE, Norm, Radius

SHAPE = (1, 3, 4)
few = settings(max_examples=25)
WALKS = {"fgsm": lambda steps: FGSM(), "ifgsm": IFGSM, "mim": MIM, "madry": Madry, "apgd": APGD}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    return layers.to(dtype)


def points(count: int, seed: int = 1, *, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(count, *SHAPE, generator=generator(seed)) * 2 - 1).to(dtype)


def radius(size: float) -> Radius:
    return Radius(size, Norm.LINF, PAPER_RANGE)


@pytest.mark.parametrize("name", WALKS)
@few
@given(size=st.floats(0.0, 2.0), steps=st.integers(1, 4), seed=st.integers(0, 1000))
def test_every_point_is_in_the_ball_and_in_the_range(name, size, steps, seed):
    centre = points(3, seed)
    crafted = craft(model(), Ball.around(centre, radius(size)), [WALKS[name](steps)], generator(seed))
    assert crafted.isfinite().all()
    assert float((crafted - centre).abs().max()) <= size + 1e-6
    assert float(crafted.abs().max()) <= 1.0


@few
@given(size=st.floats(0.0, 2.0), shift=st.floats(-50, 50), seed=st.integers(0, 1000))
def test_a_shifted_range_moves_with_the_noise(size, shift, seed):
    """Training attacks inputs that carry χ1: the range they may move in carries it too."""
    inputs = points(3, seed)
    noise = torch.full(SHAPE, shift) * torch.rand(SHAPE, generator=generator(seed))
    ball = Ball.around(inputs + noise, radius(size), shift=noise)
    crafted = craft(model(), ball, paper_ensemble(("ifgsm", "mim", "madry"), 2), generator(seed))
    clean = crafted - noise
    tolerance = 1e-6 * max(1.0, abs(shift)) * 8
    assert float(clean.abs().max()) <= 1 + tolerance
    assert float((clean - inputs).abs().max()) <= size + tolerance


def test_a_radius_of_nothing_changes_nothing():
    centre = points(6)
    for walk in WALKS.values():
        assert torch.equal(craft(model(), Ball.around(centre, radius(0.0)), [walk(3)], generator()), centre)


def test_the_input_is_left_alone():
    centre = points(6)
    before = centre.clone()
    craft(model(), Ball.around(centre, radius(0.3)), [MIM(5), Madry(5), IFGSM(5)], generator())
    assert torch.equal(centre, before)


@few
@given(size=st.floats(0.01, 1.0), seed=st.integers(0, 1000))
def test_fgsm_is_one_step_of_ifgsm(size, seed):
    ball = Ball.around(points(4, seed), radius(size))
    labels = torch.tensor([0, 1, 2, 3])
    one = craft(model(), ball, [FGSM()], generator(), labels=labels)
    assert torch.equal(one, craft(model(), ball, [IFGSM(1)], generator(), labels=labels))
    assert torch.equal(one, craft(model(), ball, [MIM(1)], generator(), labels=labels))
    assert not torch.equal(one, ball.centre)


def test_fgsm_by_hand():
    centre, labels = points(4), torch.tensor([0, 1, 2, 3])
    inputs = centre.clone().requires_grad_()
    nn.functional.cross_entropy(model()(inputs), labels).backward()
    by_hand = (centre + 0.1 * inputs.grad.sign()).clamp(-1, 1)
    crafted = craft(model(), Ball.around(centre, radius(0.1)), [FGSM()], generator(), labels=labels)
    assert torch.allclose(crafted, by_hand, atol=1e-7)


def test_ifgsm_by_hand():
    """The published loop, Eq. 8, written out."""
    centre, labels = points(4), torch.tensor([0, 1, 2, 3])
    now = centre.clone()
    for _ in range(5):
        inputs = now.clone().requires_grad_()
        nn.functional.cross_entropy(model()(inputs), labels).backward()
        now = torch.minimum(torch.maximum(now + 0.3 / 5 * inputs.grad.sign(), centre - 0.3), centre + 0.3).clamp(-1, 1)
    crafted = craft(model(), Ball.around(centre, radius(0.3)), [IFGSM(5)], generator(), labels=labels)
    assert torch.allclose(crafted, now, atol=1e-6)


def test_mim_by_hand():
    centre, labels = points(4), torch.tensor([0, 1, 2, 3])
    now, momentum = centre.clone(), torch.zeros_like(centre)
    for _ in range(5):
        inputs = now.clone().requires_grad_()
        nn.functional.cross_entropy(model()(inputs), labels, reduction="sum").backward()
        momentum = momentum + inputs.grad / inputs.grad.abs().mean((1, 2, 3), keepdim=True)
        now = torch.minimum(torch.maximum(now + 0.06 * momentum.sign(), centre - 0.3), centre + 0.3).clamp(-1, 1)
    crafted = craft(model(), Ball.around(centre, radius(0.3)), [MIM(5)], generator(), labels=labels)
    assert torch.allclose(crafted, now, atol=1e-6)


@pytest.mark.parametrize("name", WALKS)
@few
@given(size=st.floats(0.01, 2.0), steps=st.integers(1, 12), seed=st.integers(0, 100))
def test_on_a_linear_model_attacks_reach_the_optimum(name, size, steps, seed):
    """Two classes, z = Wx: the worst point of the ball is the corner that w_other - w_label points at."""
    torch.manual_seed(seed)
    linear = nn.Linear(12, 2)
    centre, labels = points(5, seed), torch.tensor([0, 1, 0, 1, 0])
    crafted = craft(
        lambda x: linear(x.flatten(1)), Ball.around(centre, radius(size)), [WALKS[name](steps)], generator(),
        labels=labels,
    )  # fmt: skip
    push = (linear.weight[1 - labels] - linear.weight[labels]).detach().reshape(5, *SHAPE)
    assert push.abs().min() > 1e-6
    optimum = (centre + size * push.sign()).clamp(-1, 1)
    assert torch.allclose(crafted, optimum, atol=1e-5)


def test_without_labels_the_models_own_prediction_is_left():
    """No true label may leak into training examples: the attack walks away from what the model says."""
    network, centre = model(), points(6)
    predicted = network(centre).argmax(1)
    ball = Ball.around(centre, radius(0.05))
    own = craft(network, ball, [FGSM()], generator())
    assert torch.equal(own, craft(network, ball, [FGSM()], generator(), labels=predicted))
    assert not torch.equal(own, craft(network, ball, [FGSM()], generator(), labels=(predicted + 1) % 4))


@pytest.mark.parametrize("start", [None, 3.0])
def test_the_models_own_gradients_are_untouched(start):
    network = model()
    for parameter in network.parameters():
        parameter.grad = None if start is None else torch.full_like(parameter, start)
    craft(network, Ball.around(points(6), radius(0.3)), [IFGSM(3), MIM(3), Madry(3)], generator())
    for parameter in network.parameters():
        if start is None:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, torch.full_like(parameter, start))


def test_attacks_work_where_gradients_are_switched_off():
    ball = Ball.around(points(4), radius(0.3))
    with torch.no_grad():
        off = craft(model().requires_grad_(False), ball, [IFGSM(3)], generator())
    assert torch.equal(off, craft(model(), ball, [IFGSM(3)], generator()))
    assert not off.requires_grad


def test_the_same_generator_gives_the_same_points():
    ball = Ball.around(points(6), radius(0.3))
    attacks = [IFGSM(3), MIM(3), Madry(3)]
    one, same, other = (craft(model(), ball, attacks, generator(seed)) for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert torch.equal(one[:4], other[:4]), "only the random start depends on the generator"
    assert not torch.equal(one[4:], other[4:])
    torch.manual_seed(99)
    assert torch.equal(craft(model(), ball, attacks, generator(5)), one)


@few
@given(size=st.floats(0.01, 1.0), share=st.integers(1, 4), steps=st.integers(1, 5))
def test_a_fused_ensemble_equals_its_attacks_one_by_one(size, share, steps):
    """Up to float64's rounding, which differs with the number of rows; another draw or step would move points by far.

    Madry's start is the only draw of the ensemble, so it sees the same numbers alone.
    """
    attacks = [IFGSM(steps), MIM(steps), Madry(steps)]
    network, centre = model(dtype=torch.float64), points(3 * share, dtype=torch.float64)
    labels = torch.arange(3 * share) % 4
    ball = Ball.around(centre, radius(size))
    fused = craft(network, ball, attacks, generator(1), labels=labels)
    for attack, where in zip(attacks, ensemble_slices(3 * share, 3), strict=True):
        alone = craft(network, ball.part(where), [attack], generator(1), labels=labels[where])
        assert torch.allclose(fused[where], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_chunks_do_not_change_the_points(chunk):
    ball = Ball.around(points(6, dtype=torch.float64), radius(0.3))
    attacks = [IFGSM(3), MIM(3), Madry(3)]
    whole = craft(model(dtype=torch.float64), ball, attacks, generator())
    assert torch.allclose(craft(model(dtype=torch.float64), ball, attacks, generator(), chunk=chunk), whole, atol=1e-12)


def test_more_steps_find_no_smaller_loss():
    """On a curved model the iterated attacks beat the single step on average."""
    centre, labels = points(60), torch.arange(60) % 4
    ball = Ball.around(centre, radius(0.5))

    def loss(attack) -> float:
        crafted = craft(model(), ball, [attack], generator(), labels=labels)
        return float(nn.functional.cross_entropy(model()(crafted), labels).detach())

    clean = float(nn.functional.cross_entropy(model()(centre), labels).detach())
    assert clean < loss(FGSM()) <= loss(IFGSM(20)) + 1e-4
    assert loss(Madry(20)) > clean


def test_madry_starts_at_random_all_over_the_ball():
    ball = Ball.around(torch.zeros(500, *SHAPE), radius(0.4))
    start = ball.at(Madry(1).offsets(ball, 500, generator()))
    assert float(start.abs().max()) <= 0.4
    # Uniform on [-0.4, 0.4]: deviation 0.8/√12; six thousand draws miss it by 10% with probability below 1e-9, and
    # their mean misses 0 by 0.03, ten deviations, more rarely still.
    assert float(start.std()) == pytest.approx(0.8 / math.sqrt(12), rel=0.1)
    assert abs(float(start.mean())) < 0.03


def test_training_attacks_step_by_the_radius_over_the_steps():
    ball = Ball.around(points(2), radius(0.8))
    for attack in paper_ensemble(("ifgsm", "mim", "madry"), 4):
        assert attack.step_size(ball) == pytest.approx(0.2)
        assert attack.steps == 4
    assert Madry(4).step_size(ball) == pytest.approx(0.5)


def test_other_units_are_kept():
    unit = (points(3) + 1) / 2
    crafted = craft(model(), Ball.around(unit, Radius(0.9, Norm.LINF, UNIT_RANGE)), [IFGSM(2)], generator())
    assert float(crafted.min()) >= 0
    assert float(crafted.max()) <= 1


def test_uneven_shares_and_uneven_steps_are_refused():
    ball = Ball.around(points(4), radius(0.1))
    with pytest.raises(SettingError, match=r"batch_size=4 is not a multiple of the 3 attacks.*Use 3 or 6\."):
        craft(model(), ball, [IFGSM(2), MIM(2), Madry(2)], generator())
    with pytest.raises(SettingError, match="different numbers of steps"):
        craft(model(), ball, [IFGSM(2), MIM(3)], generator())


@few
@given(st.integers(1, 5000), st.integers(1, 7))
def test_shares_are_equal_and_cover_the_batch(batch, attacks):
    if batch % attacks == 0:
        slices = ensemble_slices(batch, attacks)
        assert [i for where in slices for i in range(batch)[where]] == list(range(batch))
        assert len({where.stop - where.start for where in slices}) == 1
        return
    with pytest.raises(SettingError) as caught:
        ensemble_slices(batch, attacks)
    named = [int(word) for word in caught.value.remedy.rstrip(".").split() if word.isdigit()]
    assert named
    assert all(number > 0 and number % attacks == 0 and abs(number - batch) < attacks for number in named)


@pytest.mark.parametrize("name", WALKS)
def test_nan_gradients_are_reported(name):
    """An attack that stands still makes a broken model look robust."""
    ball = Ball.around(points(3), radius(0.1))
    with pytest.raises(ModelError, match="NaN or infinite"):
        craft(lambda x: x.flatten(1) * float("nan"), ball, [WALKS[name](2)], generator())
