"""SecureSGD's step that releases where the loss is vulnerable: clipped and noised like a gradient, and paid for.

The oracle goes through the sample example by example, in float64. Seeds are fixed: there are no false alarms.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.noise_checks import normal_of
from support.private_steps import BATCH, CLASSES, CLIP, pictures, sampling, settings
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import stobatch
from stobatch.baselines import securesgd as relevance
from stobatch.baselines.dpsgd import DpSgdConfig
from stobatch.baselines.noise_layer_verifier import NoiseLayerVerifier, register_buffers, spread_of
from stobatch.baselines.securesgd import RELEVANCE, SecureSgdAgmConfig, SecureSgdConfig, SecureSgdPlan, VulnerableLayer
from stobatch.config import RunConfig
from stobatch.dp.plan import DpSgdPlan
from stobatch.methods import method_of
from stobatch.models import Network, build
from stobatch.seeds import Seeds
from stobatch.sound.losses import NormalSampler
from stobatch.training.descent import Descent
from stobatch.training.engines import Averaged, Engine, InProcessEngine

UNIT = 1 / BATCH
STEPS = 8
ROUNDING = 1e-4
FAR_BELOW = 1e-3
"""A clipping norm that every example's relevance exceeds, so that bounds are reached."""
PRIVATE: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-3, "batch_size": BATCH, "clip_norm": CLIP}


def secure(**changes: Any) -> RunConfig:
    named = {f"method.{name}": value for name, value in changes.items()}
    return settings("small_cnn").replace(method=SecureSgdConfig(**PRIVATE)).override_all(named)


def bound(config: RunConfig) -> VulnerableLayer:
    """The method with its data and a network whose hidden values matter unequally."""
    data = pictures()
    network = build(config.model, data.info.input_shape, CLASSES, torch.Generator().manual_seed(2))
    register_buffers(network)
    plan = stobatch.plan(config, dataset=data)
    found = method_of(config).prepare(config, plan, network, data.train, Seeds.reproducible(4))
    assert isinstance(found, VulnerableLayer)
    return found


def uneven(shape: tuple[int, ...]) -> Tensor:
    sizes = 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(3))
    return sizes / sizes.square().mean().sqrt()


def released(trainable: VulnerableLayer, step: int | None = None) -> Tensor:
    """What the step tells everybody, without taking it to heart."""
    step = trainable.relevance_step if step is None else step
    (task,) = trainable.tasks(step)
    found = trainable.gradients(task, step)
    assert list(found) == [RELEVANCE]
    return found[RELEVANCE].double()


# The slow step.


def relevance_of(network: Network, inputs: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
    """|∂loss/∂h| of one example, by differentiating through a shift of its hidden values."""
    shift = torch.zeros_like(noise).requires_grad_()
    loss = F.cross_entropy(network.head(network.encoder(inputs) + noise + shift), labels)
    (slope,) = torch.autograd.grad(loss, shift)
    return slope[0].abs()


def slow_release(trainable: VulnerableLayer) -> Tensor:
    """(Σ clipped relevances + noise)/(C B), with the streams that the step has names for."""
    plan, seeds, step = trainable.plan, trainable.seeds, trainable.relevance_step
    assert isinstance(trainable.config, SecureSgdConfig)
    network, shape = copy.deepcopy(trainable.network).double(), trainable.relevance_shape
    (tossed,) = seeds.stream("step", step, "sample").blocks(plan.num_examples)
    rows = [row for row, coin in enumerate(tossed.tolist()) if coin / 2**64 < BATCH / plan.num_examples]
    assert 2 <= len(rows) < 64, "one block of coins, and more than one example"
    coins = torch.randn((64, *shape), generator=seeds.generator("step", step, "views", 0, 0)).double()
    total = torch.zeros(shape, dtype=torch.float64)
    for place, row in enumerate(rows):
        inputs, labels = trainable.reader.fetch(torch.tensor([row]))
        noise = coins[place : place + 1] * trainable.config.layer_stddev * spread_of(network)
        found = relevance_of(network, inputs.double(), labels, noise)
        total += found * min(1.0, plan.clip_norm / float(found.norm()))
    drawn = normal_of(seeds.stream("step", step, "noise"), math.prod(shape)).view(shape)
    return (total + plan.noise_multiplier * plan.clip_norm * drawn) / (plan.clip_norm * BATCH)


def agree(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=ROUNDING, atol=1e-6)


@pytest.mark.parametrize("clip_norm", [FAR_BELOW, CLIP], ids=["all clipped", "hardly any"])
@pytest.mark.parametrize("even", [True, False], ids=["even noise", "uneven noise"])
def test_the_step_releases_clipped_relevances_and_noise(clip_norm: float, even: bool) -> None:
    trainable = bound(secure(clip_norm=clip_norm))
    if not even:
        spread_of(trainable.network).copy_(uneven(trainable.relevance_shape))
    assert trainable.relevance_step == int(0.3 * STEPS)
    assert agree(released(trainable), slow_release(trainable))


@pytest.mark.parametrize("mistake", ["no clipping", "no layer noise", "signed", "half the noise"])
def test_other_releases_are_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twins of the test above, and of the bound below."""
    trainable = bound(secure(clip_norm=FAR_BELOW))
    expected = slow_release(trainable)
    if mistake == "no clipping":
        monkeypatch.setattr(relevance, "clipping_weights", lambda norms, _: torch.ones_like(norms))
    elif mistake == "no layer noise":
        spread_of(trainable.network).zero_()
    elif mistake == "half the noise":
        trainable.noise_stddev /= 2
    else:
        monkeypatch.setattr(Tensor, "abs", lambda values: values)
    assert not agree(released(trainable), expected)


@pytest.mark.parametrize("chunk", [512, 3])
def test_how_a_sample_is_cut_does_not_matter(chunk: int) -> None:
    trainable = bound(secure())
    trainable.chunk = chunk
    assert agree(released(trainable), slow_release(trainable))


def test_other_steps_release_gradients() -> None:
    trainable = bound(secure())
    for step in set(range(STEPS)) - {trainable.relevance_step}:
        assert trainable.targets(step).keys() == trainable.parameters.keys()
        assert trainable.release(step, InProcessEngine()).gradients.keys() == trainable.parameters.keys()


# What one example can do.


ROWS = (1, 4, 9, 16, 20)


def last_one_moves(trainable: VulnerableLayer, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> float:
    """By removing the last of a sample: the others keep their places, and so their layer noise."""
    with monkeypatch.context() as patch:
        sampling(patch, *rows)
        whole = released(trainable)
        sampling(patch, *rows[:-1])
        return float((whole - released(trainable)).norm())


def most_moved(trainable: VulnerableLayer, monkeypatch: pytest.MonkeyPatch) -> float:
    turns = [ROWS[place:] + ROWS[:place] for place in range(len(ROWS))]
    return max(last_one_moves(trainable, turn, monkeypatch) for turn in turns)


def test_an_example_moves_the_release_by_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    trainable = bound(secure(clip_norm=FAR_BELOW))
    assert trainable.per_example_bound == UNIT
    assert 0.99 * UNIT <= most_moved(trainable, monkeypatch) <= (1 + ROUNDING) * UNIT
    # The broken twin: what is not clipped moves it by many.
    monkeypatch.setattr(relevance, "clipping_weights", lambda norms, _: torch.ones_like(norms))
    assert most_moved(trainable, monkeypatch) > 5 * UNIT


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("everywhere", [True, False], ids=["all values", "one value"])
def test_an_example_whose_relevance_is_no_number_adds_nothing(
    value: float, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainable = bound(secure(clip_norm=FAR_BELOW))
    sampling(monkeypatch, *ROWS[:-1])
    without = released(trainable)
    original = trainable.relevances

    def spoilt(inputs: Tensor, labels: Tensor, coins: NormalSampler) -> Tensor:
        found = original(inputs, labels, coins)
        found[(-1,) if everywhere else (-1, 2, 1, 0)] = value
        return found

    sampling(monkeypatch, *ROWS)
    whole = released(trainable)
    monkeypatch.setattr(trainable, "relevances", spoilt)
    assert agree(released(trainable), without)
    assert not agree(whole, without)


def test_relevances_that_float32_can_hardly_hold_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their squares are beyond float32: a norm taken there would be endless, and the example left out or worse."""
    trainable = bound(secure(clip_norm=FAR_BELOW))
    original = trainable.relevances
    monkeypatch.setattr(trainable, "relevances", lambda *given: original(*given) * 1e35)
    assert 0.99 * UNIT <= most_moved(trainable, monkeypatch) <= (1 + ROUNDING) * UNIT


# What becomes of it.


class Telling(Engine):
    """Says the same whatever was computed."""

    def __init__(self, told: Tensor) -> None:
        self.told = told

    def average(self, *_: Any, **__: Any) -> Averaged:
        return Averaged({RELEVANCE: self.told}, stopping=False)

    def exchange(self, topic: str, text: str) -> list[str]:
        return [text]


def spread_after(told: Tensor, even_share: float) -> Tensor:
    trainable = bound(secure(even_share=even_share))
    trainable.release(trainable.relevance_step, Telling(told.reshape(trainable.relevance_shape)))
    return spread_of(trainable.network).double().flatten()


HIDDEN = 36
"""Four maps of 3x3 values."""


@pytest.mark.parametrize("even_share", [0.1, 0.5, 0.9])
def test_the_noise_follows_what_was_released(even_share: float) -> None:
    told = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5))
    spread = spread_after(told, even_share)
    assert float(spread.square().mean()) == pytest.approx(1, abs=1e-6)
    assert float(spread.min()) >= even_share**0.5 * (1 - 1e-6)
    # Noise may have made a mean of sizes negative; such values get the least there is.
    assert torch.allclose(spread[told <= 0], torch.tensor(even_share).double().sqrt())
    order = told.argsort()
    assert bool((spread[order].diff() >= 0).all())
    positive = told[order] > 0
    assert bool((spread[order][positive].diff() > 0).all())
    # In closed form: a share is even, the rest is in proportion.
    rest = told.clamp(min=0).double()
    assert torch.allclose(spread.square(), even_share + (1 - even_share) * rest / rest.mean(), rtol=1e-5)


@pytest.mark.parametrize("size", [1e-20, 1e30])
def test_only_the_ratios_of_what_was_released_matter(size: float) -> None:
    told = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(5)) + 0.1
    assert torch.allclose(spread_after(told * size, 0.5), spread_after(told, 0.5), rtol=1e-5)


@pytest.mark.parametrize(("told", "even_share"), [(-1.0, 0.5), (0.0, 0.5), (2.0, 0.5), (None, 1.0)])
def test_the_noise_stays_even_where_nothing_stands_out(told: float | None, even_share: float) -> None:
    values = torch.arange(HIDDEN).float() if told is None else torch.full((HIDDEN,), told)
    assert torch.equal(spread_after(values, even_share), torch.ones(HIDDEN).double())


def test_the_spread_is_taken_from_the_release_and_stays_as_it_is() -> None:
    trainable = bound(secure())
    told = released(trainable)
    engine = InProcessEngine()
    for step in range(STEPS):
        before = spread_of(trainable.network).clone()
        trainable.release(step, engine)
        assert torch.equal(before, spread_of(trainable.network)) == (step != trainable.relevance_step)
    assert torch.equal(spread_of(trainable.network).double().flatten(), spread_after(told.float(), 0.5))


def test_parameters_momentum_and_average_stay_where_they_are() -> None:
    """With all that a descent remembers: the step is none."""
    config = secure(momentum=0.9, relevance_after=0.5)
    trainable = bound(config)
    optimisers, engine = trainable.optimisers(config), InProcessEngine()
    parameters = dict(trainable.network.named_parameters())
    descent = Descent(config.training, parameters, optimisers)

    def make(step: int) -> None:
        descent.step(step, trainable.release(step, engine).gradients)

    def state() -> list[Tensor]:
        kept = [value for own in optimisers[0].state.values() for value in own.values()]
        return [value.detach().clone() for value in (*parameters.values(), *kept)]

    for step in range(STEPS):
        before = state()
        make(step)
        if step:
            stays = [torch.equal(one, other) for one, other in zip(before, state(), strict=True)]
            assert all(stays) if step == trainable.relevance_step == 4 else not any(stays)


def test_afterwards_the_first_layer_may_shrink_for_its_new_noise_and_nothing_else_moves() -> None:
    trainable = bound(secure())
    trainable.network.encoder.weight.data.mul_(10)
    trainable.after_update()
    before = {name: p.detach().clone() for name, p in trainable.network.named_parameters()}
    told = torch.zeros(trainable.relevance_shape)
    told[1:] = 1.0
    trainable.release(trainable.relevance_step, Telling(told))
    trainable.after_update()
    for name, parameter in trainable.network.named_parameters():
        if name == "encoder.weight":
            ratio = parameter.detach() / before[name]
            assert 0.7 < float(ratio.mean()) < 0.999, "the first map has less noise now"
            assert torch.allclose(ratio, ratio.mean(), rtol=1e-5)
        else:
            assert torch.equal(parameter, before[name])


# A whole training.


@pytest.mark.parametrize("after", [0.0, 0.3, 0.99])
def test_a_training_learns_and_keeps_where_the_noise_goes(after: float, tmp_path: Path) -> None:
    config = secure(relevance_after=after)
    trained = stobatch.train(config, tmp_path / "run", dataset=pictures(), quiet=True)
    loaded = stobatch.load(tmp_path / "run")
    assert isinstance(trained.network, Network)
    assert isinstance(loaded.network, Network)
    spread = spread_of(trained.network)
    assert float(spread.std()) > 0.05, "the noise is still even"
    assert torch.equal(spread, spread_of(loaded.network))
    assert torch.equal(spread, load_file(tmp_path / "run" / "model.safetensors")["noise_spread"])
    # It is one of the planned steps, and counted as one.
    assert trained.accounted_steps == loaded.accounted_steps == STEPS
    assert loaded.guarantee.epsilon == loaded.plan.guarantee.epsilon <= 3.0
    # What votes are taken under is what was learnt.
    (verifier,) = loaded.verifiers()
    assert isinstance(verifier, NoiseLayerVerifier)
    assert isinstance(config.method, SecureSgdConfig)
    expected = config.method.layer_stddev * spread.double()
    assert torch.allclose(verifier.noise.stddev, expected, rtol=1e-6)  # type: ignore[attr-defined]


@pytest.mark.parametrize("steps", [2, 8, 100])
@pytest.mark.parametrize("like", [SecureSgdConfig, SecureSgdAgmConfig])
def test_it_costs_what_dpsgd_costs(like: type[SecureSgdAgmConfig], steps: int) -> None:
    data = pictures()
    config = settings("small_cnn").override("training.steps", steps)
    ours = stobatch.plan(config.replace(method=like(**PRIVATE)), dataset=data)
    theirs = stobatch.plan(config.replace(method=DpSgdConfig(**PRIVATE)), dataset=data)
    assert isinstance(ours, SecureSgdPlan)
    assert isinstance(theirs, DpSgdPlan)
    assert ours.noise_stddev == theirs.noise_stddev
    assert [ours.spent(count) for count in range(steps + 1)] == [theirs.spent(count) for count in range(steps + 1)]
    assert ours.guarantee.epsilon == theirs.guarantee.epsilon
    assert ours.after(steps + 3).epsilon == theirs.after(steps + 3).epsilon
    said = [line for line in ours.guarantee.assumptions if line not in theirs.guarantee.assumptions]
    assert len(said) == (like is SecureSgdConfig), "that a step is something else is said"


@pytest.mark.parametrize(
    ("after", "steps", "expected"), [(0.0, 8, 0), (0.3, 12, 3), (0.999, 8, 7), (0.9, 2, 1), (1 - 2**-53, 1000, 999)]
)
def test_the_step_is_one_of_those_that_are_made(after: float, steps: int, expected: int) -> None:
    config = secure(relevance_after=after).override("training.steps", steps)
    assert bound(config).relevance_step == expected


def test_an_audit_of_steps_can_ask_for_the_contributions_of_this_one() -> None:
    trainable = bound(secure())
    train = pictures().train.in_memory()
    found = trainable.contributions(train.inputs[:3], train.labels[:3], trainable.relevance_step)
    assert list(found) == [RELEVANCE]


@pytest.mark.slow
@pytest.mark.usefixtures("try_each_network_once")
@pytest.mark.parametrize("canary", ["input", "gradient"])
def test_an_attacker_who_sees_all_steps_sees_this_one(canary: str, tmp_path: Path) -> None:
    """28 trainings refute nothing that holds; a step that could not be attacked would end in an error."""
    data = {"data.name": "small_digits", "data.train_limit": 64, "data.test_limit": 20, "method.delta": 1e-3}
    audit = {"audit.instruments": ("many_runs",), "audit.view": "steps", "audit.trainings": 28, "audit.canary": canary}
    config = secure().override_all({**data, **audit, "method.expected_batch_size": 16})
    document = stobatch.audit(tmp_path / "audit", config=config, seed=1, quiet=True).to_dict()
    assert [finding["verdict"] for finding in document["findings"]] == ["consistent"]
