"""Models that hide their gradients look robust to attacks that follow them; the other attacks tell."""

from __future__ import annotations

import pytest
import torch
from oracles import ball, best_gains, digits, seeded
from torch import Tensor

from stobatch.attacks import ATTACKS, Ball, Budget, Goal, Plain, Scores
from stobatch.types import Norm

BUDGET = Budget(steps=20, queries=300)


def weight(classes: int) -> Tensor:
    return torch.randn(classes, 16, generator=seeded(), dtype=torch.float64) / 4


def left(name: str, scores: Scores, around: Ball, labels: Tensor) -> float:
    """The share of examples whose label the attack makes the model leave."""
    found = ATTACKS[name](BUDGET).run(Plain(scores), around, Goal(labels), seeded())
    return float((scores(found).argmax(1) != labels).double().mean())


def test_random_search_breaks_what_rounding_hides_from_gradients() -> None:
    """Inputs rounded to quarters: no slope anywhere, while the rounded function itself is easy to fool."""
    around = ball(digits(50), Norm.LINF, 0.2)

    def scores(x: Tensor) -> Tensor:
        return (torch.round(4 * x) / 4).flatten(1) @ weight(3).T

    labels = scores(around.centre).argmax(1)
    for name in ("fgsm", "ifgsm", "mim"):
        found = ATTACKS[name](BUDGET).run(Plain(scores), around, Goal(labels), seeded())
        assert torch.equal(found, around.centre)
    # Random starts are all that these have here.
    assert all(left(name, scores, around, labels) < 0.4 for name in ("madry", "apgd_ce", "apgd_dlr", "apgd_t"))
    assert left("square", scores, around, labels) > 0.8


def test_the_same_model_without_rounding_hides_nothing() -> None:
    """The twin: gradients do the work as soon as there are some."""
    around = ball(digits(50), Norm.LINF, 0.2)

    def scores(x: Tensor) -> Tensor:
        return x.flatten(1) @ weight(3).T

    labels = scores(around.centre).argmax(1)
    assert all(left(name, scores, around, labels) > 0.8 for name in ATTACKS)


@pytest.mark.parametrize("factor", [1.0, 1e4])
def test_saturated_logits_stop_the_cross_entropy_but_not_the_ratio_of_differences(factor: float) -> None:
    """In float32 the cross-entropy of a huge margin is 0, and so is its slope; a factor changes no prediction."""
    around = ball(digits(50, dtype=torch.float32), Norm.LINF, 0.2)

    def scores(x: Tensor) -> Tensor:
        return factor * x.flatten(1) @ weight(3).float().T

    labels = scores(around.centre).argmax(1)
    for name in ("fgsm", "ifgsm", "mim", "madry", "apgd_ce"):
        share = left(name, scores, around, labels)
        assert share > 0.8 if factor == 1.0 else share < 0.4
    for name in ("apgd_dlr", "apgd_t", "square"):
        assert left(name, scores, around, labels) > 0.8


def test_the_margin_shows_the_way_with_two_classes_where_a_ratio_would_be_constant() -> None:
    around = ball(digits(30, dtype=torch.float32), Norm.LINF, 0.2)
    difference = (weight(2)[1] - weight(2)[0]).numpy()

    def scores(x: Tensor) -> Tensor:
        return 1e4 * x.flatten(1) @ weight(2).float().T

    labels = torch.zeros(30).long()
    found = ATTACKS["apgd_dlr"](BUDGET).run(Plain(scores), around, Goal(labels), seeded())
    start = around.centre.flatten(1).double().numpy() @ difference
    possible = torch.from_numpy(start + best_gains(around, difference) > 1e-3)
    assert torch.equal(scores(found).argmax(1) == 1, possible)
