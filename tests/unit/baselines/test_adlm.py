"""AdLM's noise on inputs and on the loss, what it gives away, and trainings that are shared or stopped.

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
from adlm_steps import (
    ADLM,
    BATCH,
    CLASSES,
    HIDDEN,
    RELEVANCE_STEPS,
    SIDE,
    STEPS,
    pictures,
    plan_of,
    prepared,
    released,
    same,
    settings,
    train,
)
from safetensors.torch import load_file
from scipy.stats import kstwo, laplace
from support import checkpoints
from support.noise_checks import FALSE_ALARM, dependent
from torch import Tensor

import stobatch
from stobatch.auditing.releases import pair_of_tuples
from stobatch.baselines.adlm import AdLm, AdLmTrainable
from stobatch.baselines.adlm_plan import AdLmPlan
from stobatch.models import Classifier, Network
from stobatch.seeds import Seeds
from stobatch.training.checkpoint import TrainingState
from stobatch.training.engines.base import DeviceRank
from stobatch.training.exact_sum import ExactSum
from stobatch.types import Status

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
