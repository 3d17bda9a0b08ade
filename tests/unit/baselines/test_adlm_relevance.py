"""AdLM's relevances, which have a proof of their own, and the budgets that inputs get from them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from adlm_steps import (
    ADLM,
    CLASSES,
    CLIP,
    COUNT,
    HIDDEN,
    RELEVANCE_BATCH,
    RELEVANCE_STEPS,
    SIDE,
    Gradients,
    pictures,
    prepared,
    released,
    same,
    settings,
)
from support.noise_checks import normal_of
from support.private_steps import sampling
from torch import Tensor, nn

import stobatch
from stobatch.baselines.adlm import AdLmTrainable
from stobatch.config import RunConfig
from stobatch.dp.clipping import clipping_weights
from stobatch.errors import ModelError
from stobatch.models import Network
from stobatch.seeds import Seeds
from stobatch.sound.losses import NormalSampler
from stobatch.training.descent import Descent
from stobatch.training.engines import InProcessEngine


def parameters(trainable: AdLmTrainable) -> Gradients:
    return {name: p.detach().clone() for name, p in trainable.network.named_parameters()}


def run_steps(trainable: AdLmTrainable, config: RunConfig, steps: range) -> list[torch.optim.Optimizer]:
    engine, optimisers = InProcessEngine(), trainable.optimisers(config)
    descent = Descent(config.training, dict(trainable.network.named_parameters()), optimisers)
    for step in steps:
        gradients = trainable.release(step, engine).gradients
        descent.step(step, gradients)
        trainable.after_update()
    return optimisers


# Relevances.


def no_coins(shape: tuple[int, ...]) -> Tensor:
    raise AssertionError("relevances draw nothing")


def linear_network(generator: torch.Generator) -> Network:
    """h and scores are linear in x as long as |h_π| < 1, which small weights see to."""
    torch.manual_seed(0)
    first, last = nn.Linear(SIDE**2, HIDDEN, bias=False), nn.Linear(HIDDEN, CLASSES, bias=False)
    network = stobatch.from_layers(first, nn.Identity(), last, (1, SIDE, SIDE))
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 20
    return network


def test_relevance_is_gradient_times_input_of_a_linear_network() -> None:
    network = linear_network(torch.Generator().manual_seed(3))
    trainable = prepared(settings(**{"model.architecture": "custom"}), network=network)
    inputs, labels = pictures().train.in_memory().inputs, pictures().train.in_memory().labels
    found = trainable.estimation.relevances(inputs, labels, no_coins)
    slopes = network.head.output.weight @ network.encoder.weight
    expected = (inputs.flatten(1) * slopes[labels]).abs().reshape(inputs.shape)
    assert torch.allclose(found, expected, atol=1e-7)
    # All of the score is shared out.
    scores = network(inputs).gather(1, labels[:, None])[:, 0]
    assert torch.allclose((inputs.flatten(1) * slopes[labels]).sum(1), scores, atol=1e-6)


def test_it_is_layer_wise_relevance_propagation_of_a_relu_network_without_biases() -> None:
    """LRP-0, layer by layer: each neuron hands its relevance down in proportion to what it was given."""
    torch.manual_seed(1)
    first, middle, last = (nn.Linear(*size, bias=False) for size in ((SIDE**2, 7), (7, HIDDEN), (HIDDEN, CLASSES)))
    for layer in (first, middle, last):
        layer.weight.data.mul_(0.5)
    body = nn.Sequential(nn.ReLU(), middle, nn.ReLU())
    network = stobatch.from_layers(first, body, last, (1, SIDE, SIDE))
    trainable = prepared(settings(**{"model.architecture": "custom"}), network=network)
    train = pictures().train.in_memory()
    inputs, labels = train.inputs[:8], train.labels[:8]
    found = trainable.estimation.relevances(inputs, labels, no_coins)
    for row in range(8):
        values = [inputs[row].flatten().double()]
        for layer in (first, middle):
            values.append((layer.weight.double() @ values[-1]).clamp(min=0))
        relevance = torch.zeros(CLASSES, dtype=torch.float64)
        relevance[labels[row]] = last.weight.double()[labels[row]] @ values[-1]
        for layer, given in zip((last, middle, first), reversed(values), strict=True):
            share = layer.weight.double() * given
            relevance = (share / share.sum(1, keepdim=True) * relevance[:, None]).nan_to_num().sum(0)
        assert torch.allclose(found[row].flatten().double(), relevance.abs(), atol=1e-7)
        assert relevance.abs().sum() > 0


@pytest.mark.parametrize("rows", [(0, 3, 7, 11, 20), (5,), ()])
def test_the_release_is_the_sum_of_clipped_relevances_and_noise(
    rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainable = prepared()
    step, scale = RELEVANCE_STEPS, CLIP * RELEVANCE_BATCH
    sampling(monkeypatch, *rows)
    (name,) = released(trainable, step)
    found = released(trainable, step)[name].double() * scale
    train = pictures().train.in_memory()
    total = torch.zeros(1, SIDE, SIDE, dtype=torch.float64)
    for row in rows:
        leaf = train.inputs[row : row + 1].clone().requires_grad_()
        trainable.network(leaf)[0, train.labels[row]].backward()
        assert leaf.grad is not None
        own = (leaf.grad * train.inputs[row : row + 1]).abs()[0].double()
        total += own * min(1.0, CLIP / float(own.norm()))
    noise = normal_of(Seeds.reproducible(4).stream("step", step, "noise"), SIDE * SIDE).view(1, SIDE, SIDE)
    assert torch.allclose(found, total + noise * trainable.plan.relevance.noise_stddev, atol=1e-5)


@pytest.mark.parametrize("step", range(RELEVANCE_STEPS + 1))
def test_an_example_moves_a_step_of_the_estimation_within_its_unit(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trainable = prepared()
    longest = 0.0
    for row in range(COUNT):
        sampling(monkeypatch, *[other for other in range(COUNT) if other != row])
        without = torch.cat([value.flatten() for value in released(trainable, step).values()])
        sampling(monkeypatch, *range(COUNT))
        whole = torch.cat([value.flatten() for value in released(trainable, step).values()])
        longest = max(longest, float((whole - without).norm()))
    assert 0.2 / RELEVANCE_BATCH < longest <= (1 + 1e-4) / RELEVANCE_BATCH


def test_examples_whose_relevance_is_no_number_add_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trainable = prepared()
    original = trainable.estimation.relevances

    def spoilt(inputs: Tensor, labels: Tensor, coins: NormalSampler) -> Tensor:
        found = original(inputs, labels, coins)
        found[0, 0, 0, 0] = math.inf
        return found

    sampling(monkeypatch, 1, 2)
    expected = released(trainable, RELEVANCE_STEPS)
    sampling(monkeypatch, 0, 1, 2)
    monkeypatch.setattr(trainable.estimation, "relevances", spoilt)
    assert torch.allclose(
        *(next(iter(found.values())) for found in (expected, released(trainable, RELEVANCE_STEPS))), atol=1e-7
    )
    assert clipping_weights(torch.tensor([3.0]), CLIP) <= CLIP / 3


def test_the_estimation_descends_and_its_last_step_moves_nothing() -> None:
    trainable, engine = prepared(), InProcessEngine()
    first = parameters(trainable)
    for step in range(RELEVANCE_STEPS):
        before, gradients = parameters(trainable), released(trainable, step)
        assert trainable.release(step, engine).gradients == {}
        after = parameters(trainable)
        for name, gradient in gradients.items():
            assert torch.allclose(after[name], before[name] - 1.0 * gradient, atol=1e-6)
        assert not same(before, after)
        trainable.after_update()
    before = parameters(trainable)
    trainable.estimation.release(RELEVANCE_STEPS, engine)
    assert same(parameters(trainable), before)
    assert not same(before, first)


def test_the_network_begins_again_with_its_first_weights() -> None:
    config = settings()
    trainable = prepared(config)
    first, even = parameters(trainable), trainable.network.input_budget
    assert isinstance(even, Tensor)
    assert bool((even == 1).all())
    (optimiser,) = run_steps(trainable, config, range(ADLM))
    assert same(parameters(trainable), first)
    assert not bool((even == 1).all()), "but for what it knows of relevances"
    assert not optimiser.state_dict()["state"], "the second part's descent remembers nothing"
    # The reference statistics are those of the first weights as well.
    inputs = pictures().test.inputs
    assert torch.equal(trainable.network(inputs), prepared(config).network(inputs))


def test_an_estimation_that_diverges_says_so() -> None:
    config = settings(**{"method.relevance_learning_rate": 3e38})
    with pytest.raises(ModelError, match="NaN or infinite") as caught:
        run_steps(prepared(config), config, range(RELEVANCE_STEPS))
    assert "relevance_learning_rate" in caught.value.remedy


# Budgets of inputs.


def taken(relevance: Tensor, **changes: Any) -> Tensor:
    trainable = prepared(settings(**changes))
    trainable.estimation.take(relevance)
    budget = trainable.network.input_budget
    assert isinstance(budget, Tensor)
    return budget


def test_more_relevant_inputs_have_more_of_the_budget_and_less_noise() -> None:
    relevance = torch.rand(1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    budget = taken(relevance)
    order = relevance.flatten().argsort()
    assert bool((budget.flatten()[order].diff() > 0).all())
    assert float(budget.double().mean()) == pytest.approx(1, abs=1e-6), "the mean of ε_j is ε2"
    assert float(budget.min()) >= 0.5
    trainable = prepared()
    trainable.estimation.take(relevance)
    trainable.network.input_budget = budget
    even = prepared()
    ratio = even.input_noise(5) / trainable.input_noise(5)
    assert torch.allclose(ratio, budget, rtol=1e-5)


def test_budgets_are_the_published_ones_but_for_the_even_share() -> None:
    relevance = torch.rand(1, SIDE, SIDE, generator=torch.Generator().manual_seed(0)) + 0.1
    published = SIDE**2 * relevance / relevance.sum()
    for even in (1e-6, 0.3, 1.0):
        found = taken(relevance, **{"method.even_share": even})
        assert torch.allclose(found, even + (1 - even) * published, atol=1e-5)
    scaled = taken(relevance * 1e-4, **{"method.even_share": 0.3})
    assert torch.allclose(scaled, taken(relevance, **{"method.even_share": 0.3}), atol=1e-5)


def test_relevances_that_are_all_noise_leave_the_budget_even() -> None:
    assert torch.equal(taken(-torch.rand(1, SIDE, SIDE)), torch.ones(1, SIDE, SIDE))
    half = torch.cat([torch.ones(1, 3, SIDE), -torch.ones(1, 3, SIDE)], dim=1)
    assert set(taken(half).flatten().tolist()) == {0.5, 1.5}
