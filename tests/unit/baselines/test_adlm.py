"""AdLM: relevances with a proof of their own, a new beginning, and the published noise on inputs and on the loss.

Statistical tests alarm falsely with probability 1e-9 each, and each has a broken twin that it catches.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import kstwo, laplace, norm
from support import checkpoints
from support.noise_checks import FALSE_ALARM, dependent, normal_of
from support.private_steps import sampling
from torch import Tensor, nn

import stobatch
from stobatch.auditing.releases import pair_of_tuples
from stobatch.baselines.adlm import AdLm
from stobatch.baselines.adlm_plan import AdLmConfig, AdLmPlan, input_sensitivity, loss_sensitivity
from stobatch.baselines.adlm_step import AdLmTrainable
from stobatch.config import DataConfig, MachineConfig, ModelConfig, RunConfig, TrainingConfig
from stobatch.data import Dataset
from stobatch.dp.clipping import clipping_weights
from stobatch.errors import ModelError, SettingError
from stobatch.loading import make_network
from stobatch.models import Classifier, Network, build
from stobatch.registry import METHODS
from stobatch.seeds import Seeds
from stobatch.sound.losses import NormalSampler
from stobatch.training.checkpoint import TrainingState
from stobatch.training.engines import InProcessEngine
from stobatch.training.engines.base import DeviceRank
from stobatch.training.exact_sum import ExactSum
from stobatch.training.loop import descend
from stobatch.types import Neighbours, Status

CLASSES, COUNT, SIDE, HIDDEN, CLIP = 3, 40, 6, 5, 0.5
RELEVANCE_STEPS, STEPS, BATCH, RELEVANCE_BATCH = 3, 9, 20, 16
ADLM = RELEVANCE_STEPS + 1
"""The first step after the relevances are released."""
Gradients = dict[str, Tensor]


def pictures(count: int = COUNT) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(count + 6, 1, SIDE, SIDE, generator=generator) * 2 - 1
    labels = torch.randint(CLASSES, (count + 6,), generator=generator)
    parts = (inputs[:count], labels[:count], inputs[count:], labels[count:])
    return stobatch.from_tensors(*parts, num_classes=CLASSES)


def settings(**changes: Any) -> RunConfig:
    method = AdLmConfig(
        epsilon=16.0,
        delta=1e-3,
        batch_size=BATCH,
        relevance_steps=RELEVANCE_STEPS,
        relevance_batch_size=RELEVANCE_BATCH,
        relevance_clip_norm=CLIP,
    )
    return RunConfig(
        method=method,
        data=DataConfig(name="tensors"),
        model=ModelConfig(architecture="small_cnn", last_hidden_size=HIDDEN),
        training=TrainingConfig(steps=STEPS, learning_rate=0.01, optimiser="adam", monitor_every=4),
        machine=MachineConfig(threads=1, checkpoint_every=3),
        seed=4,
    ).override_all(changes)


def prepared(
    config: RunConfig | None = None, data: Dataset | None = None, network: Network | None = None
) -> AdLmTrainable:
    config, data, seeds = config or settings(), data or pictures(), Seeds.reproducible(4)
    plan = stobatch.plan(config, dataset=data, network=network)
    fresh = make_network(config, data.info, seeds, network)
    return AdLm().prepare(config, plan, fresh, data.train, seeds)


def plan_of(**changes: Any) -> AdLmPlan:
    plan = stobatch.plan(settings(**changes), dataset=pictures())
    assert isinstance(plan, AdLmPlan)
    return plan


def mnist_plan(**changes: Any) -> AdLmPlan:
    config = RunConfig(method=AdLmConfig(), model=ModelConfig(last_hidden_size=25)).override_all(changes)
    plan = stobatch.plan(config)
    assert isinstance(plan, AdLmPlan)
    return plan


def released(trainable: AdLmTrainable, step: int) -> Gradients:
    """What all processes hear in a step, before anything moves."""
    (task,) = trainable.tasks(step)
    return dict(trainable.gradients(task, step))


def parameters(trainable: AdLmTrainable) -> Gradients:
    return {name: p.detach().clone() for name, p in trainable.network.named_parameters()}


def same(one: Gradients, other: Gradients) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run_steps(trainable: AdLmTrainable, config: RunConfig, steps: range) -> list[torch.optim.Optimizer]:
    engine, optimisers = InProcessEngine(), trainable.optimisers(config)
    for step in steps:
        gradients = trainable.release(step, engine).gradients
        descend(dict(trainable.network.named_parameters()), gradients, optimisers)
        trainable.after_update()
    return optimisers


# The plan.


def test_it_is_registered_with_the_published_settings() -> None:
    assert isinstance(METHODS["adlm"], AdLm)
    config = AdLmConfig()
    assert (config.batch_size, config.input_bound, config.relevance_share, config.input_share) == (
        1800,
        10.0,
        0.25,
        0.25,
    )
    plan = mnist_plan()
    assert plan.input_sensitivity == 2 * 196 * 25 == input_sensitivity(196, 25)
    assert plan.loss_sensitivity == 10 * (25 + 25**2 / 4) == loss_sensitivity(10, 25)


def test_shares_sum_to_the_total_and_give_the_scales() -> None:
    plan = mnist_plan(**{"method.total_epsilon": 2.0, "method.relevance_share": 0.3, "method.input_share": 0.2})
    assert plan.epsilons == pytest.approx((0.6, 0.4, 1.0))
    assert sum(plan.epsilons) == pytest.approx(plan.guarantee.epsilon, rel=1e-15)
    assert plan.input_noise_scale == pytest.approx(9800 / (0.4 * 1800))
    assert plan.loss_noise_scale == pytest.approx(1812.5 / (1.0 * 1800))
    rows = {row.name: row.value for row in plan.rows()}
    assert rows["claimed in total"] == 2.0
    assert rows["steps counted one by one"] == pytest.approx(0.6 + (4002 - 61) * 1.4)
    assert len(rows) == len(plan.rows()), "every row has a name of its own"
    json.dumps(plan.to_dict())


def test_replacing_is_removing_and_adding() -> None:
    plan = mnist_plan()
    part = plan.relevance
    assert part.target_epsilon == plan.epsilons[0] / 2
    assert part.delta * (1 + math.exp(part.target_epsilon)) == pytest.approx(plan.delta, rel=1e-12)
    assert (part.steps, part.expected_batch_size, part.num_examples) == (61, 2048, 60_000)
    assert part.guarantee.status is Status.PROVED
    assert part.guarantee.neighbours is Neighbours.ADD_REMOVE
    assert part.guarantee.epsilon <= part.target_epsilon


@pytest.mark.parametrize("sigma", [0.7, 2.0, 9.0])
def test_the_conversion_covers_a_gaussian_release_exactly(sigma: float) -> None:
    """Without sampling both sides are known: a replacement moves the sum twice as far as a removal."""

    def delta(epsilon: float, mu: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))

    for epsilon in (0.1, 0.5, 1.0, 2.0):
        one = delta(epsilon, 1 / sigma)
        assert delta(2 * epsilon, 2 / sigma) <= one * (1 + math.exp(epsilon))
        assert delta(2 * epsilon, 2 / sigma) > one, "δ has to grow"


def test_it_claims_and_says_what_is_proved_and_what_speaks_against_it() -> None:
    guarantee = plan_of().claim
    assert guarantee.status is Status.CLAIMED
    assert guarantee.neighbours is Neighbours.REPLACE_ONE
    assert (guarantee.epsilon, guarantee.delta, guarantee.unit) == (16.0, 1e-3, "training tuple")
    assert guarantee.source == "AdLM (Phan et al., 2017), with its relevance estimation counted"
    assert "proved to cost ε1 = 4 and all of δ" in guarantee.assumptions[0]
    said = " ".join(guarantee.objections)
    for reason in (
        "shared by all examples",
        "drawn anew in each of 5 steps",
        "labels reach",
        "Δ_h0",
        "tuned",
        "chosen",
    ):
        assert reason in said or reason == "tuned"
    untuned = plan_of(**{"method.tuned_on_private_data": False}).claim
    assert len(untuned.objections) == len(guarantee.objections) - 1


def test_repeated_steps_cost_what_the_estimation_would() -> None:
    plan = plan_of()
    assert plan.after(0) == plan.after(STEPS) == plan.claim
    more = [plan.after(STEPS + again) for again in (1, 3, 9)]
    spent = [plan.claim.epsilon, *(guarantee.epsilon for guarantee in more)]
    assert spent == sorted(set(spent))
    assert all((g.delta, g.status) == (plan.delta, Status.CLAIMED) for g in more)
    assert "3 steps beyond the 9 planned" in more[1].assumptions[-1]
    for again, guarantee in zip((1, 3, 9), more, strict=True):
        half = (guarantee.epsilon - sum(plan.epsilons[1:])) / 2
        mechanism = plan.relevance.mechanism(plan.relevance.steps + again)
        assert mechanism.epsilon(plan.delta / (1 + math.exp(half))) <= half * (1 + 1e-12)
        assert mechanism.epsilon(plan.delta / (1 + math.exp(0.98 * half))) > 0.98 * half, "and not much less would do"


def test_a_budget_that_has_run_away_is_none() -> None:
    assert plan_of(**{"method.total_epsilon": 400.0}).after(20_000).epsilon == math.inf


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"training.steps": RELEVANCE_STEPS + 1}, SettingError, "no more than the 4 that estimate"),
        ({"method.relevance_share": 0.6, "method.input_share": 0.4}, SettingError, "leave nothing"),
        ({"method.relevance_batch_size": COUNT + 1}, SettingError, "relevance_batch_size=41"),
        ({"method.delta": 1 / COUNT}, SettingError, "not below 1 / num_examples"),
        ({"method.total_epsilon": 1e4}, SettingError, "leaves ε1 = 2500"),
        ({"method.batch_size": COUNT + 1}, SettingError, "do not fit"),
        ({"model.architecture": "conv 3 3/2, relu, linear"}, ModelError, "a list of layers"),
        ({"model.architecture": "custom"}, ModelError, "handed over"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_plans_that_make_no_sense_are_refused(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        plan_of(**changes)
    assert getattr(caught.value, "remedy", "")


def test_copies_of_a_record_are_refused() -> None:
    with pytest.raises(SettingError, match="records_per_person"):
        AdLmPlan(**{**plan_of().sizes(), "records_per_person": 2})


def test_one_step_more_than_the_estimation_is_enough() -> None:
    assert plan_of(**{"training.steps": RELEVANCE_STEPS + 2}).private_steps == 1


def test_networks_that_do_not_fit_are_refused() -> None:
    layers = ModelConfig(architecture="conv 3 3/2, relu, linear")
    layered = build(layers, (1, SIDE, SIDE), CLASSES, torch.Generator())
    with pytest.raises(ModelError, match="AdLM cannot train a Layered"):
        AdLm().register_buffers(layered)
    with pytest.raises(ModelError, match="BatchNorm"):
        prepared(settings(**{"model.normalisation": "batch"}))
    config, network = settings(), prepared().network
    with pytest.raises(SettingError, match="the plan is for 40"):
        AdLm().prepare(config, plan_of(), network, pictures(50).train, Seeds.reproducible(4))


def test_there_is_no_certificate() -> None:
    config = settings()
    assert not AdLm().certifies(config)
    with pytest.raises(ModelError, match="no certificate"):
        AdLm().verifiers(config, plan_of(), prepared().network)


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
    with pytest.raises(ModelError, match="not numbers") as caught:
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


# Noise of AdLM.


def seen(trainable: AdLmTrainable, step: int) -> Tensor:
    """What reaches the first layer in a step, less the examples of its batch."""
    inputs = []
    hook = trainable.network.encoder.register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
    released(trainable, step)
    hook.remove()
    rows = trainable.order(step)[:BATCH]
    return torch.cat(inputs) - pictures().train.in_memory().inputs[rows]


def not_laplace(sample: Tensor, scale: float) -> bool:
    """Kolmogorov-Smirnov, with the exact law of its distance."""
    ordered = laplace.cdf(np.sort(sample.double().flatten().numpy()), 0, scale)
    ranks = np.arange(len(ordered) + 1) / len(ordered)
    distance = max((ranks[1:] - ordered).max(), (ordered - ranks[:-1]).max())
    return bool(distance > kstwo.isf(FALSE_ALARM, len(ordered)))


FREE = {"method.input_bound": 1e9}
RELEVANCE = torch.linspace(0, 1, SIDE**2).reshape(1, SIDE, SIDE) ** 4
"""A few inputs matter much."""


def noise_of_steps(budget: str) -> tuple[AdLmTrainable, Tensor, Tensor]:
    """The noise of many steps, and the budgets that it should have; the broken twin forgets them."""
    trainable = prepared(settings(**FREE))
    trainable.estimation.take(RELEVANCE)
    expected = trainable.network.input_budget
    assert isinstance(expected, Tensor)
    expected = expected.clone()
    if budget == "even":
        trainable.estimation.take(torch.ones_like(RELEVANCE))
    return trainable, torch.stack([seen(trainable, step)[0] for step in range(ADLM, ADLM + 400)]), expected


def test_input_noise_has_the_planned_scale_for_each_input() -> None:
    trainable, noise, budget = noise_of_steps("relevant")
    scale = plan_of().input_noise_scale
    assert scale == trainable.plan.input_noise_scale == 2 * 9 * 9 / (4.0 * BATCH)
    assert not not_laplace(noise * budget, scale)
    for part in (budget > 1, budget < 1):
        assert not not_laplace(noise[:, part] * budget[part], scale)


def test_noise_that_forgets_relevances_is_caught() -> None:
    _, noise, budget = noise_of_steps("even")
    scale = plan_of().input_noise_scale
    assert not not_laplace(noise, scale)
    assert not_laplace((noise * budget)[:, budget > 1], scale)
    assert not_laplace((noise * budget)[:, budget < 1], scale)


def test_input_noise_is_shared_by_a_batch_and_fresh_in_a_step() -> None:
    """The objections of the plan: it cancels in differences, and each step has another draw."""
    trainable = prepared(settings(**FREE))
    steps = [seen(trainable, step) for step in range(ADLM, ADLM + 3)]
    for noise in steps:
        assert len(noise) == BATCH
        assert torch.allclose(noise, noise[:1].expand_as(noise), atol=1e-4)
        assert float(noise.std()) > 0.5
    streams = [trainable.input_noise(step).flatten() for step in range(ADLM, ADLM + 200)]
    halves = torch.cat(streams[:100]), torch.cat(streams[100:])
    assert not dependent(list(halves))
    assert dependent([halves[0], halves[0]])
    assert not torch.equal(streams[0], streams[1])


def test_noisy_inputs_are_clipped() -> None:
    trainable = prepared(settings(**{"method.input_bound": 1.5}))
    inputs = []
    trainable.network.encoder.register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
    released(trainable, ADLM)
    assert float(torch.cat(inputs).abs().max()) == 1.5


def test_loss_noise_has_the_planned_scale_for_every_class() -> None:
    trainable = prepared()
    drawn = torch.stack([trainable.loss_noise(step) for step in range(300)])
    scale = CLASSES * (HIDDEN + HIDDEN**2 / 4) / (8.0 * BATCH)
    assert drawn.shape == (300, CLASSES, HIDDEN)
    assert trainable.plan.loss_noise_scale == scale
    assert not not_laplace(drawn, scale)
    assert not_laplace(drawn / 2, scale)
    assert not dependent([drawn[:, 0].flatten(), drawn[:, 1].flatten()])
    assert not dependent([drawn[:150].flatten(), drawn[150:].flatten()])


@pytest.mark.parametrize("form", ["corrected", "published"])
def test_a_step_is_the_gradient_of_the_formula(form: str) -> None:
    trainable = prepared(settings(**{"method.taylor": form}))
    trainable.estimation.take(RELEVANCE)
    found = released(trainable, ADLM + 1)
    train, rows = pictures().train.in_memory(), trainable.order(ADLM + 1)[:BATCH]
    assert len(set(rows.tolist())) == BATCH
    noise = trainable.input_noise(ADLM + 1)
    network, total = trainable.network, torch.zeros(())
    for row in rows.tolist():
        scores = network((train.inputs[row : row + 1] + noise).clamp(-10, 10))[0]
        for k in range(CLASSES):
            z, y = scores[k], float(train.labels[row] == k)
            if form == "corrected":
                total = total + math.log(2) + z / 2 + z**2 / 8 - z * y
            else:
                total = total + z - z * y - abs(z) / 2 + z**2 / 8
    loss = total / BATCH - (trainable.loss_noise(ADLM + 1) * network.head.output.weight).sum()
    expected = torch.autograd.grad(loss, list(network.parameters()))
    for (name, gradient), wanted in zip(found.items(), expected, strict=True):
        assert torch.allclose(gradient, wanted, atol=1e-5), name


def test_labels_reach_the_parameters_below_without_noise() -> None:
    """An objection of the plan: the noise on the loss is in the output layer's gradient alone."""
    trainable = prepared()
    with_noise = released(trainable, ADLM)
    trainable.loss_noise = lambda step: torch.zeros(CLASSES, HIDDEN)  # type: ignore[method-assign]
    without = released(trainable, ADLM)
    moved = {name for name in without if not torch.equal(with_noise[name], without[name])}
    assert moved == {"head.output.weight"}


# What is said to be private.


def told_apart(plan: AdLmPlan, count: int = 60) -> tuple[int, int]:
    """How often an attacker is right about which of two data sets was released, and how often wrong."""
    (release,) = AdLm().releases(plan)
    pair = pair_of_tuples(pictures().train.in_memory())
    scores = [(i % 2, release.score(pair[i % 2], pair, Seeds.reproducible(i))) for i in range(count)]
    right = sum((score > 0) == bool(world) and score != 0 for world, score in scores)
    return right, sum((score > 0) != bool(world) and score != 0 for world, score in scores)


@pytest.mark.parametrize("epsilon", [1.0, 16.0])
def test_the_noisy_batch_gives_a_replaced_tuple_away(epsilon: float) -> None:
    """At ε2 = 0.25 the noise is many times as large as any input, and two data sets are still never mixed up."""
    assert told_apart(plan_of(**{"method.total_epsilon": epsilon})) == (60, 0)


def test_where_all_is_clipped_nothing_is_told_apart() -> None:
    """The broken twin: noise that hides everything behind the bound leaves no decision."""
    assert told_apart(AdLmPlan(**{**plan_of().sizes(), "input_bound": 1e-9})) == (0, 0)


def test_an_audit_of_a_run_refutes_the_claim(tmp_path: Path) -> None:
    small = settings(**{"method.total_epsilon": 1.0})
    run = tmp_path / "refuted"
    train(small.override("audit.release_trials", 200), run)
    stobatch.audit(run, dataset=pictures(), quiet=True)
    assert stobatch.load(run).guarantee.status is Status.REFUTED


# Processes, and restarts.


@pytest.mark.parametrize("step", [0, RELEVANCE_STEPS, ADLM, ADLM + 2])
def test_any_number_of_devices_gives_the_same_bits(step: int) -> None:
    config = settings(**{"method.batch_size": 100, "method.relevance_batch_size": 90})
    trainable = prepared(config, pictures(150))
    alone = released(trainable, step)
    (task,) = trainable.tasks(step)
    for devices in (1, 2, 3):
        total = ExactSum(trainable.targets(step), trainable.grid(step))
        worked = 0
        for device in reversed(range(devices)):
            parts = list(trainable.parts(task, step, DeviceRank(device, devices)))
            worked += bool(parts)
            for part in parts:
                total.add(part)
        assert worked == devices
        assert same(total.mean(1), alone)
    missing = ExactSum(trainable.targets(step), trainable.grid(step))
    for part in trainable.parts(task, step, DeviceRank(0, 2)):
        missing.add(part)
    assert not same(missing.mean(1), alone)


class Stopped(Exception):  # noqa: N818
    """The training was cut off here."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    stobatch.train(settings(), out, dataset=pictures(), quiet=True)
    return out


def train(config: RunConfig, out: Path, *, resume: bool = False) -> stobatch.TrainedModel:
    return stobatch.train(config, out, dataset=pictures(), resume=resume, quiet=True)


@pytest.mark.parametrize("every", [2, 4, 6])
@pytest.mark.parametrize("kept", [True, False], ids=["saved", "lost"])
def test_a_training_that_was_stopped_ends_with_the_same_bits(
    every: int, kept: bool, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the estimation, right after it, and in AdLM; after a checkpoint, and before it is written."""
    config = settings(**{"machine.checkpoint_every": every})
    original = TrainingState.save

    def stopping(state: TrainingState, *arguments: Any) -> None:
        if kept:
            original(state, *arguments)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(TrainingState, "save", stopping)
        with pytest.raises(Stopped):
            train(config, tmp_path / "run")
    model = train(config, tmp_path / "run", resume=True)
    runs = tmp_path / "run", undisturbed
    assert same(*(load_file(run / "model.safetensors") for run in runs))
    assert same(*(checkpoints.tensors(run) for run in runs))
    assert model.accounted_steps == STEPS, "the same bits are the same releases"
    assert model.guarantee == stobatch.load(undisturbed).guarantee


def test_an_undisturbed_training_says_what_its_plan_said(undisturbed: Path) -> None:
    model = stobatch.load(undisturbed)
    assert model.accounted_steps == STEPS
    assert model.guarantee == plan_of().guarantee
    assert not model.certifies


def test_what_is_deployed_has_no_noise(undisturbed: Path) -> None:
    network: Classifier = stobatch.load(undisturbed).network
    assert isinstance(network, Network)
    assert not bool(network.input_noise.any())
    assert not bool(network.hidden_noise.any())
    inputs = pictures().test.inputs
    assert torch.equal(network(inputs), network.head(network.encoder(inputs)))
    assert torch.equal(network(inputs), network(inputs))
    kept = load_file(undisturbed / "model.safetensors")
    assert not bool((kept["input_budget"] == 1).all())
    assert not list((undisturbed / "private").glob("*.safetensors"))


def test_it_learns_digits_where_noise_is_small(tmp_path: Path) -> None:
    config = settings(
        **{
            "data.name": "small_digits",
            "data.train_limit": 2000,
            "data.test_limit": 500,
            "model.last_hidden_size": 16,
            "method.total_epsilon": 300.0,
            "method.delta": 1e-5,
            "method.batch_size": 200,
            "method.relevance_batch_size": 200,
            "method.relevance_steps": 20,
            "training.steps": 140,
            "training.monitor_every": 70,
            "training.monitor_examples": 500,
        }
    )
    stobatch.train(config, tmp_path / "run", quiet=True)
    history = json.loads((tmp_path / "run" / "training.json").read_text())["history"]
    assert history[-1]["test_accuracy"] > 0.6
