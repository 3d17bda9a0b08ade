"""Eq. 13: the published robustness size at the published settings, and how far its rule can ever certify."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stobatch
from stobatch.data import describe
from stobatch.published.radius import PublishedRule
from stobatch.votes.confidence import clopper_pearson
from stobatch_recipes import recipe

NUM_INPUTS, SENSITIVITY, BATCH = 784, 4950, 2499
RADII = (0.05, 0.1, 0.2, 0.3, 0.6)


def rule(encoder_epsilon: float, norm: float = 0.520) -> PublishedRule:
    scale = SENSITIVITY / (BATCH * encoder_epsilon)
    return PublishedRule(scale, 2 * scale, NUM_INPUTS, 14**2 * norm)


def unanimous(draws: int = 2000, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    lower, _ = clopper_pearson(np.array([float(draws)]), draws, 0.05 / classes)
    _, upper = clopper_pearson(np.array([0.0]), draws, 0.05 / classes)
    return lower, upper


@pytest.mark.parametrize(
    ("encoder_epsilon", "sizes", "largest"),
    [
        (0.0611, (1.067, 0.743, 0.463, 0.336, 0.184), 0.319),
        (0.550, (0.118, 0.083, 0.051, 0.037, 0.020), 0.0887),
    ],
    ids=["ε=0.2", "ε=1.0"],
)
def test_sizes_at_the_published_settings(encoder_epsilon: float, sizes: tuple[float, ...], largest: float) -> None:
    for radius, size in zip(RADII, sizes, strict=True):
        assert float(rule(encoder_epsilon).radius(*unanimous(), radius)[0]) == pytest.approx(size, rel=2e-3, abs=6e-4)
    assert float(rule(encoder_epsilon).largest_attack(*unanimous())[0]) == pytest.approx(largest, rel=2e-3)


def test_the_reported_certified_accuracy_at_0_6_cannot_come_from_this_rule() -> None:
    """72.41% at μ_a = 0.6 and ε = 1.0 is reported; even with θ1 = 0 and unanimous votes the rule ends at 0.112."""
    encoder_epsilon = (1.0 - 0.1) / (1 + BATCH / SENSITIVITY)
    assert float(rule(encoder_epsilon, norm=0).largest_attack(*unanimous())[0]) == pytest.approx(0.112, abs=1e-3)


@given(st.floats(0.01, 1), st.floats(0.01, 2), st.floats(0.501, 0.999))
def test_the_largest_attack_is_where_the_rule_turns(encoder_epsilon: float, norm: float, top: float) -> None:
    made, scores = rule(encoder_epsilon, norm), (np.array([top]), np.array([1 - top]))
    edge = float(made.largest_attack(*scores)[0])
    assert float(made.radius(*scores, edge * (1 - 1e-6))[0]) >= edge * (1 - 1e-6)
    assert float(made.radius(*scores, edge * (1 + 1e-6))[0]) < edge * (1 + 1e-6)


@given(st.floats(0.01, 1), st.floats(0.01, 0.6), st.floats(0.6, 0.999))
def test_the_size_is_the_closed_form_of_the_equation(encoder_epsilon: float, radius: float, top: float) -> None:
    made = rule(encoder_epsilon)
    epsilon_r = 0.5 * np.log(top / (1 - top))
    expected = (
        SENSITIVITY * epsilon_r / (BATCH * encoder_epsilon * (radius * NUM_INPUTS + made.hidden_attack_sensitivity / 2))
    )
    assert float(made.radius(np.array([top]), np.array([1 - top]), radius)[0]) == pytest.approx(expected)


def test_units_are_mixed_so_a_smaller_attack_raises_the_certified_size() -> None:
    """A radius that holds around x cannot depend on the attack one asks about."""
    made = rule(0.0611)
    assert float(made.radius(*unanimous(), 0.05)[0]) > 5 * float(made.radius(*unanimous(), 0.6)[0])


@pytest.mark.parametrize(
    ("name", "total", "most"),
    [
        ("paper.mnist", 0.2, 0.363),
        ("paper.mnist", 1.0, 0.121),
        ("paper.cifar10", 2.0, 0.086),
        ("paper.tiny_imagenet", 5.0, 0.042),
    ],
)
def test_no_encoder_lets_the_rule_certify_more_than_this(name: str, total: float, most: float) -> None:
    """The hidden layer's part only shrinks the size, so a vanishing θ1 is the best case."""
    config = recipe(name).override("method.total_epsilon", total)
    plan, info = stobatch.plan(config), describe(config.data, Path())
    votes = unanimous(config.certification.noise_draws, info.num_classes)
    best = PublishedRule(plan.input_noise_scale, plan.hidden_noise_scale, prod(info.input_shape), 1e-9)
    real = PublishedRule(plan.input_noise_scale, plan.hidden_noise_scale, prod(info.input_shape), 196 * 0.3)
    assert float(best.largest_attack(*votes)[0]) == pytest.approx(most, abs=5e-4)
    assert float(real.largest_attack(*votes)[0]) < float(best.largest_attack(*votes)[0])
