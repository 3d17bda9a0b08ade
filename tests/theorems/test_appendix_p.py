"""Appendix P: the published settings, the split of the budget, and the norm that the plan rests on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stobatch.config import RunConfig
from stobatch.data import DatasetInfo
from stobatch.errors import BudgetError
from stobatch.models import AffineEncoder, ConvEncoder, DenseEncoder
from stobatch.published.lemmas import split_budget
from stobatch.published.plan import PublishedPlan
from stobatch.published.training import Published
from stobatch_recipes import recipe

INFOS = {
    "paper.mnist": DatasetInfo("mnist", (1, 28, 28), 10, 60_000, 10_000, ()),
    "paper.cifar10": DatasetInfo("cifar10", (3, 28, 28), 10, 50_000, 10_000, ()),
    "paper.tiny_imagenet": DatasetInfo("tiny_imagenet", (3, 64, 64), 30, 45_000, 1_500, ()),
}


def plan(name: str, total: float | None = None) -> PublishedPlan:
    config: RunConfig = recipe(name)
    if total is not None:
        config = config.override("method.total_epsilon", total)
    return Published().plan(config, INFOS[name], None)


@pytest.mark.parametrize(
    ("name", "sensitivity", "surplus", "batches"),
    [
        ("paper.mnist", 4_950, 1.981, 24),
        ("paper.cifar10", 9_504, 5.135, 27),
        ("paper.tiny_imagenet", 150_822, 33.516, 10),
    ],
)
def test_plans_have_the_published_numbers(name: str, sensitivity: int, surplus: float, batches: int) -> None:
    made = plan(name)
    assert made.reconstruction_sensitivity == sensitivity
    assert made.label_sensitivity == 512
    assert made.input_noise_surplus == pytest.approx(surplus, abs=1e-3)
    assert (made.num_batches, made.num_trainers) == (batches, batches // 2)
    assert made.hidden_noise_scale == 2 * made.input_noise_scale


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(INFOS)), st.floats(0.01, 20))
def test_the_parts_add_up_to_the_total(name: str, surplus: float) -> None:
    least = {"paper.mnist": 0.1, "paper.cifar10": 2.0, "paper.tiny_imagenet": 1.0}[name]
    made = plan(name, least + surplus)
    e1, e2 = made.epsilons
    parts = e1 * (1 + 1 / made.input_noise_surplus + 1 / made.hidden_noise_surplus) + e2
    assert min(e1, e2) > 0
    assert parts == pytest.approx(least + surplus)
    assert made.guarantee.epsilon == pytest.approx(least + surplus)
    expected_label = {"paper.mnist": 0.1, "paper.cifar10": 1 + surplus / 3, "paper.tiny_imagenet": 1.0}[name]
    assert e2 == pytest.approx(expected_label)


@pytest.mark.parametrize(
    ("name", "total"),
    [("paper.mnist", 0.1), ("paper.mnist", 0.05), ("paper.cifar10", 0.5), ("paper.tiny_imagenet", 1.0)],
)
def test_a_budget_that_cannot_be_split_is_refused(name: str, total: float) -> None:
    with pytest.raises(BudgetError):
        plan(name, total)


@given(st.sampled_from(["fixed_label", "third_of_surplus"]), st.floats(-5, 5), st.floats(0.01, 3))
def test_a_split_is_positive_or_refused(split: str, total: float, base: float) -> None:
    try:
        parts = split_budget(
            total, split=split, label_epsilon_base=base, input_noise_surplus=2.0, hidden_noise_surplus=8.0
        )
    except BudgetError:
        return
    assert min(parts) > 0


MAKERS: list[Callable[[], AffineEncoder]] = [
    lambda: DenseEncoder((784,), 20),
    lambda: DenseEncoder((3,), 50),
    lambda: ConvEncoder((3, 12, 12), 16, 7, stride=2, padding=3),
]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(MAKERS), st.floats(1e-4, 1), st.floats(-6, 6), st.booleans(), st.integers(0, 2**31))
def test_after_limiting_no_column_is_longer_than_the_bound(
    make: Callable[[], AffineEncoder], bound: float, size: float, uneven: bool, seed: int
) -> None:
    encoder, generator = make(), torch.Generator().manual_seed(seed)
    weights = torch.randn(encoder.weight.shape, generator=generator) * 10**size
    encoder.weight.data.copy_(weights**5 if uneven else weights)
    encoder.limit_columns(bound)
    assert encoder.max_column_norm() <= bound
    assert float(encoder.weight.detach().double().flatten(1).abs().sum(1).max()) <= bound


@settings(deadline=None, max_examples=30)
@given(st.floats(1e-3, 1), st.integers(0, 2**31))
def test_limiting_keeps_short_columns_and_directions(bound: float, seed: int) -> None:
    encoder = DenseEncoder((10,), 6)
    encoder.weight.data.copy_(torch.randn(6, 10, generator=torch.Generator().manual_seed(seed)) * 0.1)
    before = encoder.weight.detach().clone()
    encoder.limit_columns(bound)
    short = before.abs().sum(1) <= bound
    assert torch.equal(encoder.weight[short], before[short])
    cosines = torch.cosine_similarity(encoder.weight, before)
    assert torch.allclose(cosines, torch.ones(6), atol=1e-5)


@pytest.mark.parametrize("seed", range(10))
def test_the_first_layer_stays_within_1_even_in_the_worst_corner(seed: int) -> None:
    """x = sign(w) is where θᵀx is largest; Lemma 2 assumes that it is at most 1 there."""
    encoder = DenseEncoder((784,), 30)
    encoder.weight.data.copy_(torch.randn(30, 784, generator=torch.Generator().manual_seed(seed)))
    encoder.limit_columns(1.0)
    corners = encoder.weight.detach().sign()
    assert float(encoder(corners).detach().abs().max()) <= 1


def test_the_bound_holds_after_every_step(make_training: Callable[..., object]) -> None:
    training = make_training(encoder_norm_bound=0.3)
    optimiser = torch.optim.SGD(training.network.parameters(), lr=10.0)
    for step in range(3):
        gradients = training.gradients(training.tasks(step)[0], step)
        for name, parameter in training.network.named_parameters():
            parameter.grad = gradients[name]
        optimiser.step()
        assert training.network.encoder.max_column_norm() > 0.3
        training.after_update()
        assert training.network.encoder.max_column_norm() <= 0.3
