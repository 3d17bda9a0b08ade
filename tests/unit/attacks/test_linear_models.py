"""On linear models the worst point of a ball is known, also where the range cuts the ball: attacks must find it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import NORMS, ROUNDING, Floats, ball, best_gains, digits, excess, rows, seeded
from torch import Tensor

from stobatch.attacks import APGD, ATTACKS, Ball, Budget, Goal, Madry, MultiTargeted, Plain, Restarts
from stobatch.types import Norm

SHAPE = (1, 4, 4)
BUDGET = Budget(steps=25, queries=700)

every_norm = pytest.mark.parametrize("norm", NORMS)


def weights(classes: int, *, seed: int = 0, spread: float = 1.0) -> Tensor:
    """Some pixels matter much more than others."""
    drawn, scale = (torch.randn(classes, 16, generator=seeded(seed + i), dtype=torch.float64) for i in (0, 100))
    return drawn * torch.exp(spread * scale[:1]) / 16


def unreachable(weight: Tensor) -> Plain:
    """The first of two classes leads by more than any step can gain, so that no attack stops early."""
    lead = 1 + 2 * float((weight[1] - weight[0]).abs().sum())
    return Plain(lambda x: x.flatten(1) @ weight.T + torch.tensor([lead, 0.0], dtype=x.dtype))


def gains(around: Ball, points: Tensor, push: Floats) -> Floats:
    return (rows(points) - rows(around.centre)) @ push


@every_norm
@pytest.mark.parametrize("share", [0.02, 0.15, 0.6])
@pytest.mark.parametrize("name", sorted(set(ATTACKS) - {"square"}))
def test_gradients_lead_to_the_optimum(name: str, share: float, norm: Norm) -> None:
    """Within a thousandth; the sums of l1 and the corners of l-infinity are met exactly."""
    around, weight = ball(digits(6, SHAPE), norm, share), weights(2)
    found = ATTACKS[name](BUDGET).run(unreachable(weight), around, Goal(torch.zeros(6).long()), seeded())
    push = (weight[1] - weight[0]).numpy()
    assert excess(around, found) <= ROUNDING
    tolerance = 1e-3 if norm is Norm.L2 else 1e-9
    assert gains(around, found, push) == pytest.approx(best_gains(around, push), rel=tolerance)


@pytest.mark.parametrize(("norm", "enough"), [(Norm.LINF, 0.999), (Norm.L2, 0.9), (Norm.L1, 0.8)])
def test_random_search_comes_close_to_the_optimum(norm: Norm, enough: float) -> None:
    """A seed fixes the outcome, so there is no false alarm; shares of the optimum, over all examples."""
    around, weight = ball(digits(4, SHAPE), norm, 0.15), weights(2)
    push = (weight[1] - weight[0]).numpy()
    found = ATTACKS["square"](BUDGET).run(unreachable(weight), around, Goal(torch.zeros(4).long()), seeded())
    few = ATTACKS["square"](Budget(queries=5)).run(unreachable(weight), around, Goal(torch.zeros(4).long()), seeded())
    best = best_gains(around, push).sum()
    assert enough * best <= gains(around, found, push).sum() <= best * (1 + 1e-9)
    assert gains(around, few, push).sum() < gains(around, found, push).sum()


def best_margins(around: Ball, weight: Tensor, bias: Tensor, labels: Tensor) -> Floats:
    """For each example and class: the best lead over the label that the ball allows; the label's own is -inf."""
    found = np.full((len(labels), len(weight)), -np.inf)
    logits = rows(around.centre) @ weight.T.numpy() + bias.numpy()
    for row, label in enumerate(labels.tolist()):
        part = around.part(slice(row, row + 1))
        for other in set(range(len(weight))) - {label}:
            push = (weight[other] - weight[label]).numpy()
            found[row, other] = logits[row, other] - logits[row, label] + best_gains(part, push)[0]
    return found


def several_classes(norm: Norm) -> tuple[Ball, Tensor, Tensor, Tensor]:
    """Labels are the clean predictions; some can be left, some cannot, and not always towards the runner-up."""
    share = {Norm.LINF: 0.08, Norm.L2: 0.05, Norm.L1: 0.015}[norm]
    around, weight = ball(digits(40, SHAPE), norm, share), weights(5, spread=0.5)
    bias = torch.linspace(0, 0.1, 5, dtype=torch.float64)
    return around, weight, bias, (around.centre.flatten(1) @ weight.T + bias).argmax(1)


@every_norm
def test_an_aim_at_every_class_succeeds_exactly_where_some_class_can_win(norm: Norm) -> None:
    around, weight, bias, labels = several_classes(norm)
    margins = best_margins(around, weight, bias, labels).max(1)
    decided = np.abs(margins) > 1e-3
    attack = ATTACKS["apgd_t"](Budget(steps=30, num_aims=4))
    found = attack.run(Plain(lambda x: x.flatten(1) @ weight.T + bias), around, Goal(labels), seeded())
    left = (found.flatten(1) @ weight.T + bias).argmax(1) != labels
    assert 5 < int((margins > 0).sum()) < 35, "a test of nothing"
    assert np.array_equal(left.numpy()[decided], margins[decided] > 0)


def test_an_aim_at_the_runner_up_alone_misses_some() -> None:
    """The twin of the test above: fewer aims find less, so the aims are really used."""
    around, weight, bias, labels = several_classes(Norm.L1)
    victim = Plain(lambda x: x.flatten(1) @ weight.T + bias)

    def left(aims: int) -> int:
        found = MultiTargeted(APGD(30, loss="dlr"), num_aims=aims).run(victim, around, Goal(labels), seeded())
        return int((victim.scores(found).argmax(1) != labels).sum())

    assert left(1) < left(4)


@every_norm
@pytest.mark.parametrize("name", ["ifgsm", "mim", "madry", "apgd_ce", "apgd_dlr", "apgd_t", "square"])
def test_a_targeted_attack_reaches_its_target_where_it_can(name: str, norm: Norm) -> None:
    """Two classes: reaching the other class is leaving one's own, and the closed form says where that can be done."""
    around, weight = ball(digits(20, SHAPE), norm, 0.2), weights(2)
    clean = around.centre.flatten(1) @ weight.T
    target = 1 - clean.argmax(1)
    margins = best_margins(around, weight, torch.zeros(2).double(), 1 - target).max(1)
    goal = Goal(target, targeted=True)
    found = ATTACKS[name](BUDGET).run(Plain(lambda x: x.flatten(1) @ weight.T), around, goal, seeded())
    reached = ((found.flatten(1) @ weight.T).argmax(1) == target).numpy()
    assert not reached[margins < 0].any()
    slack = 0.3 if name == "square" else 1e-2
    assert reached[margins > slack * best_gains(around, np.abs((weight[1] - weight[0]).numpy())).max()].all()
    assert reached.sum() > 5


def test_a_target_among_several_classes_is_reached_and_not_just_the_label_left() -> None:
    weight = weights(5, spread=0.0)
    around = ball(digits(30, SHAPE), Norm.LINF, 0.4)
    target = (around.centre.flatten(1) @ weight.T).argmin(1)
    found = ATTACKS["apgd_ce"](BUDGET).run(
        Plain(lambda x: x.flatten(1) @ weight.T), around, Goal(target, targeted=True), seeded()
    )
    reached = (found.flatten(1) @ weight.T).argmax(1) == target
    assert int(reached.sum()) >= 20


def test_restarts_add_up() -> None:
    """Another start never loses what an earlier one has reached, and here the first one leaves something to find."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 40), torch.nn.Tanh(), torch.nn.Linear(40, 4))
    network[1].weight.data.mul_(6)
    network[3].weight.data.mul_(6)
    around = ball(digits(80, SHAPE, dtype=torch.float32), Norm.LINF, 0.04)
    labels = network(around.centre).argmax(1)
    left = []
    for times in (1, 2, 6):
        found = Restarts(Madry(2), times=times).run(Plain(network), around, Goal(labels), seeded())
        left.append(network(found).argmax(1) != labels)
    assert bool((left[0] <= left[1]).all())
    assert bool((left[1] <= left[2]).all())
    assert int(left[2].sum()) > int(left[0].sum())
