"""Losses against PyTorch's formulas, and what an attack refuses before or while it runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import NORMS, ball, digits, seeded
from torch import Tensor, nn

from stobatch.attacks import APGD, ATTACKS, IFGSM, Ball, Budget, Goal, Plain, Scores
from stobatch.attacks.goals import LOSSES, cross_entropy, difference_of_logits_ratio, margin, targeted_dlr
from stobatch.errors import DataError, ModelError, SettingError, UnitError
from stobatch.types import UNIT_RANGE, Norm, Radius

EVERYTHING = slice(None)

every_attack = pytest.mark.parametrize("name", sorted(ATTACKS))
few = settings(max_examples=30)
cases = st.tuples(st.integers(2, 7), st.integers(0, 1000))


def logits_and_labels(classes: int, seed: int, count: int = 6) -> tuple[Tensor, Tensor]:
    logits = 5 * torch.randn(count, classes, generator=seeded(seed), dtype=torch.float64)
    return logits, torch.randint(classes, (count,), generator=seeded(seed + 1))


def linear(x: Tensor) -> Tensor:
    return x.flatten(1)[:, :3] * 2


def attack(
    scores: Scores, *, name: str = "ifgsm", inputs: Tensor | None = None, goal: Goal | None = None, size: float = 0.1
) -> Tensor:
    around = Ball.around(digits(4) if inputs is None else inputs, Radius(size))
    labels = torch.tensor([0, 1, 2, 0])
    return ATTACKS[name](Budget(steps=3, queries=5)).run(Plain(scores), around, goal or Goal(labels), seeded())


@few
@given(cases)
def test_losses_are_their_formulas(case: tuple[int, int]) -> None:
    """Example by example, in plain Python on top of PyTorch's own log-softmax and multi-margin loss."""
    classes, seed = case
    logits, labels = logits_and_labels(classes, seed)
    for row, (z, y) in enumerate(zip(logits, labels.tolist(), strict=True)):
        others = [float(v) for k, v in enumerate(z) if k != y]
        lead, ordered = max(others) - float(z[y]), sorted(z.tolist(), reverse=True)
        assert float(cross_entropy(logits, labels)[row]) == pytest.approx(-float(z.log_softmax(0)[y]))
        assert float(margin(logits, labels)[row]) == pytest.approx(lead)
        ratio = lead / (ordered[0] - ordered[2]) if classes > 2 else lead
        assert float(difference_of_logits_ratio(logits, labels)[row]) == pytest.approx(ratio)


@few
@given(cases)
def test_the_margin_is_positive_exactly_where_the_label_has_lost(case: tuple[int, int]) -> None:
    logits, labels = logits_and_labels(*case, count=50)
    assert torch.equal(margin(logits, labels) > 0, logits.argmax(1) != labels)
    assert torch.equal(Goal(labels).reached(logits), logits.argmax(1) != labels)
    assert torch.equal(Goal(labels, targeted=True).reached(logits), logits.argmax(1) == labels)


@few
@given(st.tuples(st.integers(3, 7), st.integers(0, 1000)), st.floats(1e-3, 1e5), st.floats(-1e3, 1e3))
def test_the_ratios_do_not_see_the_scale_nor_a_shift(case: tuple[int, int], scale: float, shift: float) -> None:
    logits, labels = logits_and_labels(*case)
    aims = (labels + 1) % case[0]
    other = scale * logits + shift
    assert torch.allclose(difference_of_logits_ratio(other, labels), difference_of_logits_ratio(logits, labels))
    assert torch.allclose(targeted_dlr(other, labels, aims), targeted_dlr(logits, labels, aims))
    assert not torch.allclose(margin(2 * logits, labels), margin(logits, labels)), "the margin does"


@few
@given(st.tuples(st.integers(4, 7), st.integers(0, 1000)))
def test_the_targeted_ratio_is_the_published_one(case: tuple[int, int]) -> None:
    """-(z_y - z_t) / (z_π1 - (z_π3 + z_π4) / 2)."""
    logits, labels = logits_and_labels(*case)
    aims = (labels + 2) % case[0]
    for row, (z, y, t) in enumerate(zip(logits.tolist(), labels.tolist(), aims.tolist(), strict=True)):
        ordered = sorted(z, reverse=True)
        value = -(z[y] - z[t]) / (ordered[0] - (ordered[2] + ordered[3]) / 2)
        assert float(targeted_dlr(logits, labels, aims)[row]) == pytest.approx(value)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_targeted_goal_wants_the_opposite(loss: str) -> None:
    logits, labels = logits_and_labels(5, 0)
    away, near = (
        Goal(labels, targeted=targeted, loss=loss).objective(logits, EVERYTHING) for targeted in (False, True)
    )
    assert torch.equal(away, -near)


def test_without_labels_the_prediction_is_left_and_success_is_undefined() -> None:
    logits, _ = logits_and_labels(5, 0)
    assert torch.equal(Goal().objective(logits, EVERYTHING), Goal(logits.argmax(1)).objective(logits, EVERYTHING))
    with pytest.raises(SettingError, match="without labels"):
        Goal().reached(logits)


def test_parts_of_a_goal_are_goals_of_parts() -> None:
    logits, labels = logits_and_labels(5, 0)
    which = torch.tensor([True, False, True, True, False, False])
    for goal in (Goal(labels), Goal(labels, aim=(labels + 1) % 5), Goal(labels, targeted=True, loss="dlr"), Goal()):
        whole = goal.objective(logits, EVERYTHING)[which]
        assert torch.equal(goal.part(which).objective(logits[which], EVERYTHING), whole)


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_numbers_even_where_all_logits_are_equal(loss: str, dtype: torch.dtype) -> None:
    """A network without biases at an input of zeros."""
    weight = 100 * torch.randn(16, 4, generator=seeded(), dtype=dtype)
    around = Ball.around(torch.zeros(6, 16, dtype=dtype), Radius(0.1))
    found = IFGSM(3, loss=loss).run(Plain(lambda x: x @ weight), around, Goal(torch.arange(6) % 4), seeded())
    assert bool(((found @ weight).argmax(1) != torch.arange(6) % 4).all())


@every_attack
@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 1, 2, 3], [0, -1, 2, 0], [[0], [1], [2], [0]]])
def test_labels_that_do_not_fit_are_refused(name: str, labels: list[int]) -> None:
    with pytest.raises(DataError, match="label"):
        attack(linear, name=name, goal=Goal(torch.tensor(labels)))


@every_attack
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_inputs_that_are_nan_are_refused(name: str, value: float) -> None:
    inputs = digits(4)
    inputs[2, 0, 1, 1] = value
    with pytest.raises(DataError, match="NaN or infinite"):
        attack(linear, name=name, inputs=inputs)


@every_attack
def test_no_inputs_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="no inputs"):
        attack(linear, name=name, inputs=digits(4)[:0], goal=Goal(torch.zeros(0).long()))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("factor", [1.001, 127.5])
def test_inputs_outside_of_the_range_are_refused(norm: Norm, factor: float) -> None:
    around = Ball.around(factor * digits(4), Radius(0.1, norm))
    with pytest.raises(UnitError, match=r"over \[-1, 1\]"):
        APGD(2).run(Plain(linear), around, Goal(torch.zeros(4).long()), seeded())
    over_the_wrong_range = Ball.around(digits(4), Radius(0.1, norm, UNIT_RANGE))
    with pytest.raises(UnitError, match=r"Scale the inputs to \[0, 1\]"):
        APGD(2).run(Plain(linear), over_the_wrong_range, Goal(torch.zeros(4).long()), seeded())


@every_attack
def test_a_model_that_returns_probabilities_is_told_so(name: str) -> None:
    with pytest.raises(ModelError, match=r"probabilities, not logits.*before the softmax"):
        attack(lambda x: linear(x).softmax(1), name=name)


@every_attack
def test_logits_and_log_probabilities_pass_and_lead_to_the_same_places(name: str) -> None:
    found = attack(linear, name=name)
    assert torch.allclose(attack(lambda x: linear(x).log_softmax(1), name=name), found, atol=1e-9)


def test_scores_that_are_not_negative_are_not_taken_for_probabilities() -> None:
    attack(lambda x: linear(x).relu())
    attack(lambda x: linear(x) * 0 + torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))


@every_attack
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scores_that_are_nan_are_refused(name: str, value: float) -> None:
    with pytest.raises(ModelError, match="NaN or infinite"):
        attack(lambda x: linear(x) + value, name=name)


@every_attack
def test_scores_of_another_shape_are_refused(name: str) -> None:
    for scores in (lambda x: x, lambda x: x.flatten(1)[:, 0], lambda x: linear(x)[:2], lambda x: linear(x).sum()):
        with pytest.raises(ModelError, match=r"one row of logits for each input"):
            attack(scores, name=name)


@every_attack
def test_a_model_that_breaks_inside_of_the_ball_is_reported(name: str) -> None:
    """Sound on the inputs, no number beside them: neither a robust model nor a success of the attack."""
    inputs = torch.zeros(4, 1, 4, 4)

    def scores(x: Tensor) -> Tensor:
        moved = x.flatten(1).abs().amax(1, keepdim=True) > 1e-3
        return linear(x) + torch.where(moved, torch.nan, 0.0)

    with pytest.raises(ModelError, match=r"NaN"):
        attack(scores, name=name, inputs=inputs)


@pytest.mark.parametrize("name", sorted(set(ATTACKS) - {"square"}))
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_that_are_nan_are_reported(name: str, norm: Norm) -> None:
    """A root at 0: the value is sound and the slope infinite; times 0 it is not a number.

    An attack that stands still would make a broken model look robust.
    """

    def scores(x: Tensor) -> Tensor:
        return linear(x) + 0 * (0 * x.flatten(1)[:, :3]).sqrt()

    around = ball(digits(4), norm, 0.1)
    with pytest.raises(ModelError, match="gradient that is NaN or infinite"):
        ATTACKS[name](Budget(steps=3)).run(Plain(scores), around, Goal(torch.tensor([0, 1, 2, 0])), seeded())


def test_checks_do_not_change_what_is_drawn() -> None:
    generator = seeded(3)
    IFGSM(2).run(Plain(nn.Flatten()), Ball.around(digits(3, (3,)), Radius(0.1)), Goal(torch.zeros(3).long()), generator)
    assert torch.equal(generator.get_state(), seeded(3).get_state())
