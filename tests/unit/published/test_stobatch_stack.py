"""Models that are trained side by side end where each of them would have ended alone.

`OneByOne`, which runs Algorithm 1 or 4 as it is written, is the measure. In float64 only the order of sums differs,
and over all steps that stays below 1e-9; in float32 it stays below 3e-5 for a few steps. Later a single sign of a
gradient near zero may send an attack, and with it a whole training, another way: that is rounding, not another
mechanism, and why the long comparison is in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stobatch.config import RunConfig
from stobatch.data import DatasetInfo, Examples
from stobatch.models import Network, build, from_layers, initialise
from stobatch.models.affine import DenseEncoder
from stobatch.published.plan import PublishedPlan
from stobatch.published.settings import PublishedConfig
from stobatch.published.stack import PublishedStack
from stobatch.published.training import Published
from stobatch.registry import METHODS
from stobatch.seeds import Seeds
from stobatch.training.loop import OneByOne
from stobatch_recipes import recipe

SHAPE, CLASSES, POOL, COUNT, MODELS, STEPS = (1, 8, 8), 4, 60, 48, 3, 13
EXACT, ROUNDED = 1e-9, 3e-5

Make = Callable[[RunConfig, Seeds], Network]


def settings(**changes: Any) -> RunConfig:
    tiny = {"method.batch_size": 8, "model.last_hidden_size": 12, "training.steps": STEPS, "method.total_epsilon": 50.0}
    return recipe("audit.published").override_all({**tiny, **changes})


def built(config: RunConfig, seeds: Seeds) -> Network:
    network = build(config.model, SHAPE, CLASSES, seeds.generator("initial weights"))
    assert isinstance(network, Network)
    return network


def from_dense_layers(config: RunConfig, seeds: Seeds) -> Network:
    body = nn.Sequential(nn.ReLU(), nn.Linear(10, 12), nn.Tanh())
    network = from_layers(nn.Linear(64, 10), body, nn.Linear(12, CLASSES), SHAPE)
    assert isinstance(network.encoder, DenseEncoder)
    initialise(network, seeds.generator("initial weights"))
    return network


def with_padding_that_fits_no_stride(config: RunConfig, seeds: Seeds) -> Network:
    """8 + 2·2 - 3 is no multiple of 2: the last pixels are read by fewer neurons."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(3 * 25, 12))
    network = from_layers(nn.Conv2d(1, 3, 3, stride=2, padding=2), body, nn.Linear(12, CLASSES), SHAPE)
    initialise(network, seeds.generator("initial weights"))
    return network


@dataclass(frozen=True)
class Both:
    """The same trainings, made both ways."""

    stack: PublishedStack
    alone: OneByOne
    probe: Tensor

    def train(self) -> Both:
        for models in (self.stack, self.alone):
            shares: list[float] = []
            models.train(shares.append)
            assert sum(shares) == pytest.approx(1)
        return self

    def distances(self) -> list[float]:
        """Of each model: the furthest apart of all parameters and all scores."""
        apart = (self.stack.logits(self.probe) - self.alone.logits(self.probe)).abs().flatten(1).amax(1)
        for model, network in enumerate(self.alone.networks):
            for name, value in network.named_parameters():
                apart[model] = torch.maximum(apart[model], (self.stack.tensors[name][model] - value).abs().max())
        return apart.tolist()


def prepared(
    config: RunConfig, make: Make = built, dtype: torch.dtype = torch.float64, *, twin: str | None = None
) -> Both:
    """`twin` is what the stack gets in another order than the models that are trained alone."""
    generator = torch.Generator().manual_seed(5)
    pool = Examples(
        torch.rand(POOL, *SHAPE, generator=generator) * 2 - 1,
        torch.randint(CLASSES, (POOL,), generator=generator),
        CLASSES,
    )
    members = torch.stack([torch.randperm(POOL, generator=generator)[:COUNT] for _ in range(MODELS)])
    seeds = [Seeds.reproducible(7).child(model) for model in range(MODELS)]
    info = DatasetInfo("made up", SHAPE, CLASSES, COUNT, 1, tuple("abcd"))
    method, plan = Published(), Published().plan(config, info, make(config, seeds[0]))

    def networks() -> list[Network]:
        return [make(config, each).to(dtype) for each in seeds]

    alone = (
        method.prepare(config, plan, network, pool.take(own), each)
        for network, own, each in zip(networks(), members, seeds, strict=True)
    )
    stack = _stack(config, plan, networks(), pool, members, seeds, twin)
    return Both(stack, OneByOne(config, alone, MODELS), pool.inputs[:9])


def _stack(
    config: RunConfig,
    plan: PublishedPlan,
    networks: list[Network],
    pool: Examples,
    members: Tensor,
    seeds: list[Seeds],
    twin: str | None,
) -> PublishedStack:
    if twin is None:
        stack = Published().stack(config, plan, networks, pool, members, seeds)
        assert isinstance(stack, PublishedStack)
        return stack
    method = config.method
    assert isinstance(method, PublishedConfig)
    noises = [Published.draw_noise(method, plan, net, each) for net, each in zip(networks, seeds, strict=True)]
    # The first model stays as it is, the other two are exchanged.
    swapped = [0, 2, 1]
    if twin == "noise":
        noises = [noises[model] for model in swapped]
    elif twin == "members":
        members = members[swapped]
    elif twin == "seeds":
        seeds = [seeds[model] for model in swapped]
    else:
        networks = [networks[model] for model in swapped]
    return PublishedStack(config, method, networks, noises, pool, members, seeds)


ALGORITHM_4 = {"method.schedule": "stochastic", "method.trainers_per_step": 2}
CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "Algorithm 1": (built, {}),
    "Algorithm 4, one trainer": (built, {**ALGORITHM_4, "method.trainers_per_step": 1}),
    "Algorithm 4, two trainers": (built, ALGORITHM_4),
    "Algorithm 4, all trainers": (built, {**ALGORITHM_4, "method.trainers_per_step": 3}),
    "no normalisation": (built, {"model.normalisation": "none"}),
    "group normalisation": (built, {"model.normalisation": "group"}),
    "label noise per class": (built, {"method.label_noise": "per_class"}),
    "three attack steps": (built, {"method.train_attack_steps": 3, "method.train_attack_max_radius": 1.0}),
    "adversarial examples count twice": (built, {"method.adversarial_weight": 2.0}),
    "no adversarial examples": (built, {"method.adversarial_weight": 0.0}),
    "loss as printed": (built, {"method.taylor": "published"}),
    "plain descent of the head": (built, {"training.optimiser": "sgd"}),
    "learning rate that grows and falls": (built, {"training.schedule": "cosine", "training.warm_up": 0.2}),
    "tight bound on θ1": (built, {"method.encoder_norm_bound": 0.3}),
    "dense encoder": (from_dense_layers, {}),
    "uneven convolution": (with_padding_that_fits_no_stride, {}),
    "everything": (
        built,
        {
            **ALGORITHM_4,
            "model.normalisation": "group",
            "method.label_noise": "per_class",
            "method.train_attack_steps": 3,
            "method.train_attack_max_radius": 0.7,
            "method.adversarial_weight": 0.5,
        },
    ),
}


@pytest.mark.parametrize(("make", "changes"), CASES.values(), ids=CASES)
def test_a_stack_ends_where_each_model_ends_alone(make: Make, changes: dict[str, Any]) -> None:
    both = prepared(settings(**changes), make)
    before = both.stack.logits(both.probe)
    both.train()
    assert max(both.distances()) < EXACT
    # The models have learnt something, and each something else: equal because idle would be no agreement.
    after = both.stack.logits(both.probe)
    assert after.dtype == torch.float64
    assert float((after - before).abs().flatten(1).amax(1).min()) > 0.05
    assert min(float((after[one] - after[other]).abs().max()) for one, other in ((0, 1), (0, 2), (1, 2))) > 0.05


@pytest.mark.parametrize(("make", "changes"), CASES.values(), ids=CASES)
def test_in_single_precision_a_few_steps_agree_up_to_rounding(make: Make, changes: dict[str, Any]) -> None:
    both = prepared(settings(**changes, **{"training.steps": 4}), make, torch.float32).train()
    assert both.stack.logits(both.probe).dtype == torch.float32
    assert max(both.distances()) < ROUNDED


@pytest.mark.parametrize("twin", ["noise", "members", "seeds", "networks"])
def test_a_stack_that_takes_one_model_for_another_is_caught(twin: str) -> None:
    """After one step already, and by the short comparison too; the model that was left alone still agrees."""
    config = settings(**ALGORITHM_4, **{"training.steps": 1})
    for dtype, tolerance in ((torch.float64, EXACT), (torch.float32, ROUNDED)):
        untouched, *exchanged = prepared(config, dtype=dtype, twin=twin).train().distances()
        assert untouched < tolerance
        assert min(exchanged) > 20 * tolerance


def test_a_stack_that_descends_at_a_constant_rate_is_caught() -> None:
    """The twin reads the settings without their schedule; everything else is the same."""
    falling, constant = (prepared(settings(**{"training.schedule": schedule})) for schedule in ("linear", "constant"))
    twin = Both(constant.stack, falling.alone, falling.probe).train()
    assert min(twin.distances()) > 1e6 * EXACT


def test_every_model_keeps_the_bound_on_its_encoder() -> None:
    both = prepared(settings(**{"method.encoder_norm_bound": 0.3})).train()
    sizes = both.stack.tensors["encoder.weight"].flatten(2).abs().sum(2)
    assert float(sizes.max()) <= 0.3
    assert float(sizes.max()) > 0.299


@pytest.mark.parametrize("ensemble", [("mim",), ("madry",), ("ifgsm", "mim"), ("ifgsm", "mim", "madry")])
def test_other_ensembles_are_not_stacked(ensemble: tuple[str, ...]) -> None:
    assert _asked(settings(**{"method.attack_ensemble": list(ensemble), "method.batch_size": 6}), "cpu") is None


def test_other_devices_are_not_stacked() -> None:
    """A device without numbers stands for a GPU."""
    assert isinstance(_asked(settings(), "cpu"), PublishedStack)
    assert _asked(settings(), "meta") is None


def test_other_methods_are_not_stacked() -> None:
    info = DatasetInfo("made up", SHAPE, CLASSES, 64, 1, tuple("abcd"))
    for name, method in METHODS.items():
        if name == "published":
            continue
        config = settings().replace(method=method.config_class())
        network, seeds = built(settings(), Seeds.reproducible(1)), Seeds.reproducible(1)
        pool = Examples(torch.zeros(2, *SHAPE), torch.zeros(2, dtype=torch.long), CLASSES)
        plan = Published().plan(settings(), info, None)
        assert method.stack(config, plan, [network], pool, torch.tensor([[0, 1]]), [seeds]) is None


def _asked(config: RunConfig, device: str) -> Any:
    info = DatasetInfo("made up", SHAPE, CLASSES, COUNT, 1, tuple("abcd"))
    pool = Examples(torch.zeros(COUNT, *SHAPE), torch.zeros(COUNT, dtype=torch.long), CLASSES)
    network, seeds = built(config, Seeds.reproducible(1)).to(device), Seeds.reproducible(1)
    members = torch.arange(COUNT).unsqueeze(0)
    return Published().stack(config, Published().plan(config, info, None), [network], pool, members, [seeds])
