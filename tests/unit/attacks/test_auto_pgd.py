"""Auto-PGD against a slow loop in plain Python, written from Algorithm 1 of Croce and Hein (2020)."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
import torch
from oracles import Floats, ball, digits, random_points, rows, seeded
from torch import Tensor, nn

from stobatch.attacks import APGD, Ball, Goal, Plain, craft
from stobatch.attacks.apgd import checkpoints
from stobatch.types import Norm

Objective = Callable[[Floats], tuple[float, Floats]]
"""Value and gradient at one point."""


def network(*, lead: float = 0.0) -> nn.Module:
    """Curved, so that steps of twice the radius overshoot; `lead` is what the first class has in advance."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    layers[1].weight.data.mul_(6)
    layers[3].bias.data.copy_(torch.tensor([lead, 0, 0]))
    return layers


def objective_of(model: nn.Module, shape: torch.Size, label: int) -> Objective:
    def evaluate(point: Floats) -> tuple[float, Floats]:
        leaf = torch.from_numpy(point).reshape(1, *shape).requires_grad_()
        loss = nn.functional.cross_entropy(model(leaf), torch.tensor([label]))
        loss.backward()
        return float(loss.detach()), rows(leaf.grad)[0]

    return evaluate


def slow_auto_pgd(
    objective: Objective, centre: Floats, start: Floats, size: float, steps: int, *, halve: bool = True
) -> tuple[Floats, Floats, int]:
    """The last point, the best point and how often the step was halved; one example, l-infinity, range [-1, 1].

    Checkpoints are counted down as in the authors' released code. After a restart there is no momentum.
    """

    def project(point: Floats) -> Floats:
        return np.clip(np.clip(point, centre - size, centre + size), -1, 1)

    step, halvings = 2 * size, 0
    x, before = start, start
    values = []
    best_value, best, best_slope = -np.inf, start, None
    until, since, shortest, shorter = max(1, int(0.22 * steps)), 0, max(1, int(0.06 * steps)), max(1, int(0.03 * steps))
    old_best, halved_last = -np.inf, True
    for k in range(steps):
        value, slope = objective(x)
        values.append(value)
        if value > best_value:
            best_value, best, best_slope = value, x, slope
        if k > 0:
            since += 1
        if since == until:
            rises = sum(values[i + 1] > values[i] for i in range(k - until, k))
            stuck = not halved_last and best_value <= old_best
            halved_last = halve and (rises < 0.75 * until or stuck)
            old_best = best_value
            if halved_last:
                step, halvings = step / 2, halvings + 1
                x, before, slope = best, best, best_slope
            until, since = max(until - shorter, shortest), 0
        z = project(x + step * np.sign(slope))
        x, before = (z if k == 0 else project(x + 0.75 * (z - x) + 0.25 * (x - before))), x
    if objective(x)[0] > best_value:
        best = x
    return x, best, halvings


def test_checkpoints_of_a_hundred_steps_are_the_papers() -> None:
    """p₀ = 0, p₁ = 0.22, pⱼ₊₁ = pⱼ + max(pⱼ - pⱼ₋₁ - 0.03, 0.06), at the steps ⌈100 pⱼ⌉."""
    shares = [Fraction(0), Fraction(22, 100)]
    while shares[-1] < 1:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - Fraction(3, 100), Fraction(6, 100)))
    assert checkpoints(100) == [ceil(100 * share) for share in shares[1:] if share < 1]


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10, 33, 1000])
def test_checkpoints_rise_and_are_steps(steps: int) -> None:
    found = checkpoints(steps)
    assert found == sorted(set(found))
    assert all(0 < step < steps for step in found)


@pytest.mark.parametrize("steps", [1, 2, 5, 20, 50, 100])
@pytest.mark.parametrize("seed", range(3))
def test_every_step_is_the_published_one(steps: int, seed: int) -> None:
    """The last point depends on every halving, restart and momentum before it."""
    model, around = network(), ball(digits(1, seed=seed), Norm.LINF, 0.3)
    start = rows(random_points(around, seeded(seed)))[0]
    objective = objective_of(model, around.centre.shape[1:], 1)
    last, _, halvings = slow_auto_pgd(objective, rows(around.centre)[0], start, around.radius.size, steps)
    found = craft(model, around, [APGD(steps)], seeded(seed), labels=torch.tensor([1]))
    assert rows(found)[0] == pytest.approx(last, abs=1e-9)
    assert halvings > 0 or steps < 20, "a test of nothing"


class Scripted(nn.Module):
    """A loss that starts high and then rises slowly, hardly moved by the input: steps gain, the best stays the first.

    Only the second condition halves such steps: neither length nor best value has changed since the last checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.looks = torch.randn(16, generator=seeded(), dtype=torch.float64), 0

    def forward(self, x: Tensor) -> Tensor:
        other = 1e-6 * x.flatten(1) @ self.weight + (5.0 if self.looks == 0 else 0.01 * self.looks)
        self.looks += 1
        return torch.stack([torch.zeros_like(other), other], 1)


def test_steps_that_gain_without_a_new_best_are_halved_at_every_second_checkpoint() -> None:
    around = ball(digits(1), Norm.LINF, 0.3)
    start = rows(random_points(around, seeded()))[0]
    objective = objective_of(Scripted(), around.centre.shape[1:], 0)
    last, _, halvings = slow_auto_pgd(objective, rows(around.centre)[0], start, around.radius.size, 100)
    found = craft(Scripted(), around, [APGD(100)], seeded(), labels=torch.tensor([0]))
    assert halvings == 4
    assert rows(found)[0] == pytest.approx(last, abs=1e-9)


def test_steps_that_never_halve_are_caught() -> None:
    """The broken twin."""
    model, around = network(), ball(digits(1), Norm.LINF, 0.3)
    objective = objective_of(model, around.centre.shape[1:], 1)
    start = rows(random_points(around, seeded()))[0]
    last, *_ = slow_auto_pgd(objective, rows(around.centre)[0], start, around.radius.size, 50, halve=False)
    found = craft(model, around, [APGD(50)], seeded(), labels=torch.tensor([1]))
    assert float(np.abs(rows(found)[0] - last).max()) > 1e-3


def resisting_rows(model: nn.Module, around: Ball, labels: Tensor, steps: int) -> dict[int, Floats]:
    """The slow loop's best points for the examples whose label it never leaves."""
    starts, found = rows(random_points(around, seeded())), {}
    for row, label in enumerate(labels.tolist()):
        reached = False
        evaluate = objective_of(model, around.centre.shape[1:], label)

        def watched(point: Floats, label: int = label, evaluate: Objective = evaluate) -> tuple[float, Floats]:
            nonlocal reached
            with torch.no_grad():
                scores = model(torch.from_numpy(point).reshape(1, *around.centre.shape[1:]))
            reached = reached or int(scores.argmax(1)) != label
            return evaluate(point)

        best = slow_auto_pgd(watched, rows(around.centre)[row], starts[row], around.radius.size, steps)[1]
        if not reached:
            found[row] = best
    return found


def test_letting_go_of_some_examples_does_not_mix_up_the_others() -> None:
    """Each row of a batch that shrinks on the way ends where the slow loop ends alone, or has left its label."""
    model, around, labels = network(lead=3.0), ball(digits(24), Norm.LINF, 0.04), torch.zeros(24).long()
    labels[::5] = 1
    resisting = resisting_rows(model, around, labels, 40)
    assert 5 < len(resisting) < 20, "a test of nothing"
    found = APGD(40).run(Plain(model), around, Goal(labels), seeded())
    left = (model(found).argmax(1) != labels).numpy()
    for row in range(24):
        assert left[row] == (row not in resisting)
        if row in resisting:
            assert rows(found)[row] == pytest.approx(resisting[row], abs=1e-9)
