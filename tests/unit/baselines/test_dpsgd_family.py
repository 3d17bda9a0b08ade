"""DP-SGD and its relatives: a step is what a slow loop over the sample says, and one example moves it by one unit.

The loop is written from the method's description, example by example and in float64; it shares no code with training
but the names of the random streams. Nothing here is left to chance: seeds are fixed, so there are no false alarms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.noise_checks import normal_of
from support.private_steps import BATCH, CLASSES, CLIP, COUNT, flat, pictures, prepared, sampling, settings, step_of
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import stobatch
from stobatch.baselines.dpsgd import DpAdversarialConfig, DpSgdConfig, DpSmoothingConfig
from stobatch.config import MethodConfig, RunConfig
from stobatch.data import Dataset
from stobatch.dp.clipping import Batch, ClippedSum, Losses
from stobatch.models import Classifier
from stobatch.sound.losses import Adversarial, CrossEntropy, Objective, Ramp
from stobatch.sound.step import DpSgdTrainable

UNIT = 1 / BATCH
ROUNDING = 1e-4
"""Sums are of 32 bits: bounds hold up to this share."""
FAR_BELOW = 0.02
"""A clipping norm that every gradient here exceeds many times, so that bounds are reached."""
PRIVATE: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-3, "batch_size": BATCH, "clip_norm": CLIP}
NATURAL: dict[str, Any] = {"method.natural_weight": 1.0, "method.certified_weight": 0.0}
STEPS = (0, 3, 7)

Loss = Callable[[nn.Module, Tensor, Tensor, int], Tensor]
"""Of one example (a batch of one) that stands at some place of the sample."""


def config_of(method: MethodConfig, **changes: Any) -> RunConfig:
    return settings().replace(method=method).override_all(changes)


def natural_loss(network: nn.Module, inputs: Tensor, labels: Tensor, place: int) -> Tensor:
    return F.cross_entropy(network(inputs), labels)


# The slow step.


def sample_of(trainable: DpSgdTrainable, step: int) -> list[int]:
    """Each example by a coin of its own."""
    plan = trainable.plan
    (tossed,) = trainable.seeds.stream("step", step, "sample").blocks(plan.num_examples)
    rate = plan.expected_batch_size / plan.num_examples
    return [row for row, coin in enumerate(tossed.tolist()) if coin / 2**64 < rate]


def gradient_of(loss: Tensor, network: nn.Module) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(network.parameters()))])


def shortened(gradient: Tensor, most: float) -> Tensor:
    return gradient * min(1.0, most / float(gradient.norm()))


def contributions(trainable: DpSgdTrainable, rows: list[int], loss: Loss) -> Tensor:
    """Each example's clipped gradient, a row for each; the parameters one after another."""
    network = copy.deepcopy(trainable.network).double()
    found = []
    for place, row in enumerate(rows):
        inputs, labels = trainable.reader.fetch(torch.tensor([row]))
        gradient = gradient_of(loss(network, inputs.double(), labels, place), network)
        found.append(shortened(gradient, trainable.plan.clip_norm))
    return torch.stack(found)


def noise_of(trainable: DpSgdTrainable, step: int) -> Tensor:
    """Drawn from the step's stream, one parameter after another."""
    count = sum(p.numel() for p in trainable.network.parameters())
    drawn = normal_of(trainable.seeds.stream("step", step, "noise"), count)
    return drawn * trainable.plan.noise_multiplier * trainable.plan.clip_norm


def slow_step(trainable: DpSgdTrainable, step: int, loss: Loss) -> Tensor:
    """(Σ clipped gradients + noise)/(C B)."""
    total = contributions(trainable, sample_of(trainable, step), loss).sum(0) + noise_of(trainable, step)
    return total / (trainable.plan.clip_norm * trainable.plan.expected_batch_size)


def agree(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=ROUNDING, atol=1e-6)


# What a chosen sample releases.


class Samples:
    """A step whose sample is chosen. View noise goes by the place in the sample, so the last example is removed."""

    def __init__(self, trainable: DpSgdTrainable, monkeypatch: pytest.MonkeyPatch, step: int = 7) -> None:
        self.trainable, self.patch, self.step = trainable, monkeypatch, step

    def released(self, *rows: int) -> Tensor:
        sampling(self.patch, *rows)
        return flat(step_of(self.trainable, self.step))

    def moved_by_last(self, *rows: int) -> float:
        return float((self.released(*rows) - self.released(*rows[:-1])).norm())

    def most_moved(self, rows: tuple[int, ...] = (1, 4, 9, 16, 20)) -> float:
        """By removing one of them, each in its turn."""
        turns = [rows[place:] + rows[:place] for place in range(len(rows))]
        return max(self.moved_by_last(*turn) for turn in turns)


# Plain DP-SGD.


@pytest.mark.parametrize("step", STEPS)
def test_dpsgd_releases_the_bits_of_the_sound_method_without_its_other_losses(step: int) -> None:
    dpsgd = flat(step_of(prepared(config_of(DpSgdConfig(**PRIVATE))), step))
    assert torch.equal(dpsgd, flat(step_of(prepared(settings(**NATURAL)), step)))
    assert not agree(dpsgd, flat(step_of(prepared(settings()), 7))), "the other losses do nothing: this test is blind"


def test_dpsgd_trains_the_model_of_the_sound_method_without_its_other_losses(tmp_path: Path) -> None:
    configs = {"dpsgd": config_of(DpSgdConfig(**PRIVATE)), "sound": settings(**NATURAL)}
    models = {
        name: stobatch.train(config, tmp_path / name, dataset=pictures(), quiet=True)
        for name, config in configs.items()
    }
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in configs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert models["dpsgd"].guarantee == models["sound"].guarantee


@pytest.mark.parametrize("clip_norm", [FAR_BELOW, CLIP, 50.0], ids=["all clipped", "some", "none"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_dpsgd_is_the_slow_step(step: int, clip_norm: float) -> None:
    trainable = prepared(config_of(DpSgdConfig(**PRIVATE), **{"method.clip_norm": clip_norm}))
    assert agree(flat(step_of(trainable, step)), slow_step(trainable, step, natural_loss))


def test_the_slow_step_tells_a_longer_contribution_and_other_noise() -> None:
    """The broken twins: twice the norm, half the noise, another denominator."""
    right = prepared(config_of(DpSgdConfig(**PRIVATE)))
    expected = slow_step(right, 3, natural_loss)
    for name in ("clip_norm", "noise_stddev"):
        trainable = prepared(config_of(DpSgdConfig(**PRIVATE)))
        setattr(trainable, name, {"clip_norm": 2 * CLIP, "noise_stddev": right.noise_stddev / 2}[name])
        assert not agree(flat(step_of(trainable, 3)), expected), name
    realised = len(sample_of(right, 3))
    assert realised != BATCH
    assert not agree(flat(step_of(right, 3)) * BATCH / realised, expected)


# Clipping the mean of a batch, as released comparisons do.


def clip_the_mean(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedSum:
    """B times the mean gradient of the batch, each weight tensor clipped to C and biases left alone (REFERENCE, 33)."""
    parameters = dict(network.named_parameters())
    gradients = torch.autograd.grad(losses(network, batch).mean(), list(parameters.values()))
    clipped = {
        name: BATCH * (shortened(gradient, clip_norm) if gradient.ndim > 1 else gradient)
        for (name, _), gradient in zip(parameters.items(), gradients, strict=True)
    }
    return ClippedSum(clipped, torch.zeros(len(batch[0])))


OUTLIER = COUNT - 1


def faint_pictures_and_one_outlier() -> Dataset:
    """All but one are nearly blank and alike; the last is as bright as can be, and of the class nobody else has."""
    data = pictures()
    train = data.train.in_memory()
    inputs, labels = 0.02 * train.inputs, torch.zeros_like(train.labels)
    inputs[OUTLIER], labels[OUTLIER] = 1.0, CLASSES - 1
    test = data.test
    return stobatch.from_tensors(inputs, labels, test.inputs, test.labels, num_classes=CLASSES)


@pytest.mark.parametrize("clip_norm", [FAR_BELOW, CLIP])
def test_an_outlier_moves_a_step_by_one_unit_and_a_clipped_mean_by_many(
    clip_norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (0, 3, 5, 8, 12, 17, 21, OUTLIER)
    config = config_of(DpSgdConfig(**PRIVATE), **{"method.clip_norm": clip_norm})
    sound, broken = (prepared(config, faint_pictures_and_one_outlier()) for _ in range(2))
    broken.clip = clip_the_mean
    moved = Samples(sound, monkeypatch).moved_by_last(*rows)
    assert 0.99 * UNIT <= moved <= (1 + ROUNDING) * UNIT
    assert Samples(broken, monkeypatch).moved_by_last(*rows) > BATCH / 2 * UNIT
    # With nobody in the sample both release the same noise.
    assert torch.equal(*(Samples(each, monkeypatch).released() for each in (sound, broken)))


# Adversarial training.


ADVERSARIAL = DpAdversarialConfig(**PRIVATE, warm_up=0.0, ramp=0.5, attack_steps=3, radius=0.3, natural_weight=0.4)


def own_attack(network: nn.Module, inputs: Tensor, labels: Tensor, radius: float, steps: int) -> Tensor:
    """Equal steps along the sign of the gradient, within the box and the range."""
    points = inputs
    for _ in range(steps):
        points = points.detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(network(points), labels), points)
        points = points + radius / steps * slope.sign()
        points = torch.maximum(torch.minimum(points, inputs + radius), inputs - radius).clamp(-1, 1)
    return points.detach()


def both_losses(share: float, config: DpAdversarialConfig = ADVERSARIAL) -> Loss:
    def loss(network: nn.Module, inputs: Tensor, labels: Tensor, place: int) -> Tensor:
        attacked = own_attack(network, inputs, labels, share * config.radius, config.attack_steps)
        weight = share * (1 - config.natural_weight)
        natural, adversarial = (F.cross_entropy(network(points), labels) for points in (inputs, attacked))
        return (1 - weight) * natural + weight * adversarial

    return loss


@pytest.mark.parametrize(("step", "share"), [(0, 0.0), (2, 0.5), (3, 0.75), (4, 1.0), (7, 1.0)])
def test_an_adversarial_step_is_the_slow_step_with_each_examples_own_attack(step: int, share: float) -> None:
    trainable = prepared(config_of(ADVERSARIAL))
    released = flat(step_of(trainable, step))
    assert agree(released, slow_step(trainable, step, both_losses(share)))
    if share:
        assert not agree(released, slow_step(trainable, step, natural_loss))
        assert not agree(released, slow_step(trainable, step, both_losses(share / 2)))


def attack_on_the_batch(network: Classifier, inputs: Tensor, labels: Tensor, radius: float) -> Tensor:
    """The broken twin: one direction for all, against the mean loss."""
    points = inputs.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(network(points), labels), points)
    return (inputs + radius * slope.mean(0, keepdim=True).sign()).clamp(-1, 1)


def test_whom_else_a_sample_has_is_nothing_to_an_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(trainable: DpSgdTrainable) -> float:
        """How far what two add together is from what they add alone."""
        samples = Samples(trainable, monkeypatch)
        nothing = samples.released()
        alone = sum(samples.released(row) - nothing for row in (2, 11))
        return float((samples.released(2, 11) - nothing - alone).norm())

    config = config_of(ADVERSARIAL, **{"method.clip_norm": 50.0})
    sound, broken = prepared(config), prepared(config)
    mixing = Adversarial(ADVERSARIAL.radius, attack_on_the_batch)
    broken.objective = Objective(((0.4, CrossEntropy()), (0.6, mixing)), Ramp(0.0, 0.5))
    assert lacking(sound) < 1e-6 * UNIT
    assert lacking(broken) > 1e-4 * UNIT


def test_natural_and_adversarial_loss_are_clipped_as_one_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    trainable = prepared(config_of(ADVERSARIAL, **{"method.clip_norm": FAR_BELOW}))
    assert 0.99 * UNIT <= Samples(trainable, monkeypatch).most_moved() <= (1 + ROUNDING) * UNIT

    # The broken twin: a clipped vector for each of the two.
    def attacked_only(network: nn.Module, inputs: Tensor, labels: Tensor, place: int) -> Tensor:
        points = own_attack(network, inputs, labels, ADVERSARIAL.radius, ADVERSARIAL.attack_steps)
        return F.cross_entropy(network(points), labels)

    parts = [contributions(trainable, [1, 4, 9], loss) for loss in (natural_loss, attacked_only)]
    assert float((parts[0] + parts[1]).norm(dim=1).max()) / (FAR_BELOW * BATCH) > 1.9 * UNIT


def test_attacks_begin_after_the_warm_up_and_are_whole_after_the_ramp() -> None:
    """Eight steps: natural ones up to the second, whole attacks from the sixth."""
    ramped = prepared(config_of(ADVERSARIAL, **{"method.warm_up": 0.25, "method.ramp": 0.5}))
    at_once = prepared(config_of(ADVERSARIAL, **{"method.warm_up": 0.0, "method.ramp": 0.0}))
    natural = prepared(config_of(DpSgdConfig(**PRIVATE)))
    for step in range(8):
        released, weakest, strongest = (flat(step_of(each, step)) for each in (ramped, natural, at_once))
        assert torch.equal(released, weakest) == (step <= 2), step
        assert torch.equal(released, strongest) == (step >= 6), step


# Smoothing.


def views_of(trainable: DpSgdTrainable, step: int) -> Callable[[int], Tensor]:
    """The noise of the views at a place of the sample: a block of 64 places draws it together."""
    config = trainable.config
    assert isinstance(config, DpSmoothingConfig)
    shape = (64, config.num_views, *trainable.network.input_shape)
    blocks: dict[int, Tensor] = {}

    def noise(place: int) -> Tensor:
        block, row = divmod(place, 64)
        if block not in blocks:
            stream = trainable.seeds.generator("step", step, "views", 0, block)
            drawn = torch.randn(shape, generator=stream) * config.smoothing_stddev
            if config.smoothing_noise == "laplace":
                # A normal number times the length of a vector of two, over √2, has Laplace's law.
                pair = [torch.randn(shape, generator=stream) for _ in range(2)]
                drawn = drawn * torch.hypot(*pair) / 2**0.5
            blocks[block] = drawn
        return blocks[block][row].double()

    return noise


def mean_over_views(trainable: DpSgdTrainable, step: int) -> Loss:
    noise = views_of(trainable, step)

    def loss(network: nn.Module, inputs: Tensor, labels: Tensor, place: int) -> Tensor:
        each = [F.cross_entropy(network(inputs + view), labels) for view in noise(place)]
        return torch.stack(each).mean()

    return loss


def smoothing(num_views: int, **changes: Any) -> RunConfig:
    return config_of(DpSmoothingConfig(**PRIVATE, num_views=num_views), **changes)


@pytest.mark.parametrize("num_views", [1, 4])
@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
@pytest.mark.parametrize("clip_norm", [CLIP, 50.0], ids=["clipped", "whole"])
def test_a_smoothing_step_is_the_slow_step_with_the_same_coins(num_views: int, noise: str, clip_norm: float) -> None:
    """Gradients that are not clipped tell a mean over views from a sum."""
    trainable = prepared(smoothing(num_views, **{"method.smoothing_noise": noise, "method.clip_norm": clip_norm}))
    released = flat(step_of(trainable, 3))
    assert agree(released, slow_step(trainable, 3, mean_over_views(trainable, 3)))
    assert not agree(released, slow_step(trainable, 3, natural_loss))
    # The coins of another step would not do.
    assert not agree(released, slow_step(trainable, 3, mean_over_views(trainable, 4)))


def test_views_of_a_large_sample_are_those_of_their_places() -> None:
    """Of 200 examples some 100 are drawn: two blocks of coins, cut into four pieces by a pass."""
    config = smoothing(2, **{"method.expected_batch_size": 100, "method.delta": 1e-4})
    trainable = prepared(config, pictures(count=200))
    assert len(sample_of(trainable, 0)) > 64
    assert agree(flat(step_of(trainable, 0)), slow_step(trainable, 0, mean_over_views(trainable, 0)))


@pytest.mark.parametrize("num_views", [1, 4])
def test_however_many_views_an_example_moves_a_step_by_one_unit(
    num_views: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainable = prepared(smoothing(num_views, **{"method.clip_norm": FAR_BELOW}))
    assert 0.99 * UNIT <= Samples(trainable, monkeypatch).most_moved() <= (1 + ROUNDING) * UNIT

    # The broken twin: every view is an example of its own.
    def one_view(number: int) -> Loss:
        noise = views_of(trainable, 7)
        return lambda network, inputs, labels, place: F.cross_entropy(network(inputs + noise(place)[number]), labels)

    apart = torch.stack([contributions(trainable, [1, 4, 9], one_view(number)) for number in range(num_views)]).sum(0)
    assert float(apart.norm(dim=1).max()) / (FAR_BELOW * BATCH) > 0.8 * num_views * UNIT
