"""Descent as people do it: random views, class weights and Adam, inside one clipped contribution or after the noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binom
from sound_steps import BATCH, CLASSES, COUNT, flat, pictures, prepared, sampling, settings, step_of
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import stobatch
from stobatch.dp import clipping
from stobatch.errors import SettingError
from stobatch.models import build_layered
from stobatch.sound.averaged import AveragedAdam
from stobatch.sound.losses import RandomViews, normal_sampler, sampler_by_blocks
from stobatch.sound.settings import noisy_views
from stobatch.sound.step import DpSgdTrainable
from stobatch.training.checkpoint import load_optimiser, optimiser_tensors

FALSE_ALARM = 1e-9
ALL = {"method.augmentations": ["crop", "flip", "noise"], "method.augmented_views": 3, "method.certified_weight": 0.0}
STEP = 2


def normal(seed: int = 0) -> Any:
    return normal_sampler(torch.Generator().manual_seed(seed), torch.device("cpu"))


def image(count: int = 1) -> Tensor:
    return torch.linspace(-1, 1, 36).view(1, 1, 6, 6).repeat(count, 1, 1, 1)


def test_nothing_named_changes_nothing() -> None:
    inputs, labels = image(3), torch.arange(3)
    found = RandomViews((), 1, 2, 0.1).draw(inputs, labels, normal())
    assert found[0] is inputs
    assert found[1] is labels


def test_every_shift_and_mirror_image_is_equally_likely() -> None:
    """25 moves and 2 sides over 20,000 views; a false alarm has probability below 1e-9."""
    count, most = 20_000, 2
    moved, labels = RandomViews(("crop",), count, most, 0.0).draw(image(), torch.tensor([1]), normal())
    assert labels.tolist() == [1] * count
    padded = F.pad(image(), (2, 2, 2, 2), mode="replicate")
    windows = padded.unfold(2, 6, 1).unfold(3, 6, 1).reshape(25, 36)
    which = (moved.flatten(1)[:, None] == windows[None]).all(2)
    assert which.sum(1).tolist() == [1] * count
    share = FALSE_ALARM / 100
    low, high = binom.ppf(share, count, 1 / 25), binom.isf(share, count, 1 / 25)
    assert low <= int(which.sum(0).min()) <= int(which.sum(0).max()) <= high
    assert not low <= 0, "a shift that never happens would be seen"
    flipped, _ = RandomViews(("flip",), count, 0, 0.0).draw(image(), torch.tensor([1]), normal())
    mirrored = int((flipped == image().flip(3)).flatten(1).all(1).sum())
    assert binom.ppf(share, count, 0.5) <= mirrored <= binom.isf(share, count, 0.5)


def test_noisy_views_stay_in_the_range() -> None:
    noisy, _ = RandomViews(("noise",), 50, 0, 0.5).draw(image(), torch.tensor([1]), normal())
    assert float(noisy.abs().max()) <= 1
    inside = (noisy - image())[:, :, 2:4]
    assert 0.4 < float(inside.std()) < 0.6


def oracle(trainable: DpSgdTrainable, rows: list[int], step: int = STEP) -> Tensor:
    """Σ over examples of the clipped mean gradient of its views, example by example, with the step's own normal."""
    from functools import partial

    plan, parameters = trainable.plan, list(trainable.network.parameters())
    inputs, labels = trainable.reader.fetch(torch.tensor(rows))
    views, num = trainable.views, trainable.views.num
    names = partial(trainable.seeds.generator, "step", step, "views", 0)
    drawn, _ = views.draw(inputs, labels, sampler_by_blocks(names, slice(0, num * len(rows)), torch.device("cpu")))
    weights = torch.ones(CLASSES) if trainable.class_weights is None else trainable.class_weights
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for place, label in enumerate(labels.tolist()):
        own = drawn[place * num : (place + 1) * num]
        loss = 0.5 * weights[label] * F.cross_entropy(trainable.network(own), torch.full((num,), label))
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)]).double()
        total += min(1.0, plan.clip_norm / float(gradient.norm())) * gradient
    return total / (plan.clip_norm * BATCH)


def contributed(trainable: DpSgdTrainable, monkeypatch: pytest.MonkeyPatch, *rows: int) -> Tensor:
    sampling(monkeypatch)
    nothing = flat(step_of(trainable, STEP))
    sampling(monkeypatch, *rows)
    return flat(step_of(trainable, STEP)) - nothing


@pytest.mark.parametrize("chunk", [512, 9, 3])
@pytest.mark.parametrize("clip_norm", [0.01, 5.0])
def test_the_views_of_an_example_are_one_contribution(
    chunk: int, clip_norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainable = prepared(settings(**ALL, **{"method.clip_norm": clip_norm}))
    trainable.chunk = chunk
    rows = [1, 4, 9, 16, 20]
    found = contributed(trainable, monkeypatch, *rows)
    assert torch.allclose(found, oracle(trainable, rows), rtol=1e-3, atol=1e-5)


def largest(trainable: DpSgdTrainable, monkeypatch: pytest.MonkeyPatch) -> float:
    return max(float(contributed(trainable, monkeypatch, row).norm()) for row in range(COUNT)) * BATCH


def test_an_example_moves_a_step_by_one_contribution_whatever_its_views(monkeypatch: pytest.MonkeyPatch) -> None:
    trainable = prepared(settings(**ALL, **{"method.clip_norm": 0.01}))
    assert 0.99 <= largest(trainable, monkeypatch) <= 1.001


def test_views_clipped_one_by_one_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    trainable = prepared(settings(**ALL, **{"method.clip_norm": 0.01}))

    def apart(network: Any, losses: Any, batch: Any, clip_norm: float) -> clipping.ClippedSum:
        rows = tuple(entry.flatten(0, 1) for entry in batch)

        def natural(network: Any, batch: Any) -> Tensor:
            return F.cross_entropy(network(batch[0]), batch[1], reduction="none")

        return clipping.clipped_sum_in_one_pass(network, natural, rows, clip_norm)

    trainable.clip = apart
    assert largest(trainable, monkeypatch) > 1.5


def test_several_equal_views_are_refused() -> None:
    with pytest.raises(SettingError, match="would all be the same"):
        stobatch.plan(settings(**{"method.augmented_views": 4}), dataset=pictures())


def test_class_weights_weigh_losses_before_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed = {"method.class_weights": [0.5, 1.0, 3.0], "method.certified_weight": 0.0}
    trainable = prepared(settings(**weighed, **{"method.clip_norm": 50.0}))
    assert torch.allclose(contributed(trainable, monkeypatch, 1, 4, 9), oracle(trainable, [1, 4, 9]), rtol=1e-3)
    plain = prepared(settings(**{"method.certified_weight": 0.0, "method.clip_norm": 50.0}))
    for row in range(6):
        ratio = contributed(trainable, monkeypatch, row).norm() / contributed(plain, monkeypatch, row).norm()
        label = int(plain.reader.fetch(torch.tensor([row]))[1])
        assert float(ratio) == pytest.approx([0.5, 1.0, 3.0][label], rel=1e-3)
    tight = prepared(settings(**weighed, **{"method.clip_norm": 0.01}))
    assert 0.99 <= largest(tight, monkeypatch) <= 1.001


@pytest.mark.parametrize("steps", [1, 7])
def test_adam_is_adam_on_what_was_released(steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(5, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    own, reference = AveragedAdam([ours], lr=0.1, decay=0.9), torch.optim.Adam([theirs], lr=0.1)
    average = start.clone()
    for step in range(steps):
        gradient = torch.randn(5, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        own.step()
        reference.step()
        decay = min(0.9, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * ours.detach()
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    kept = {name: value.clone() for name, value in optimiser_tensors(own, "").items()}
    assert torch.allclose(kept["0.average"], average, rtol=1e-5)
    other = AveragedAdam([torch.nn.Parameter(ours.detach().clone())], lr=0.1, decay=0.9)
    load_optimiser(other, kept)
    for rule in (own, other):
        (parameter,) = rule.param_groups[0]["params"]
        parameter.grad = torch.ones(5)
        rule.step()
    assert torch.equal(own.param_groups[0]["params"][0], other.param_groups[0]["params"][0])


def test_a_training_with_all_of_it_costs_what_one_without_costs(tmp_path: Path) -> None:
    """Views, weights, Adam and persons: ε follows from sampling, noise and steps alone."""
    everything = {**ALL, "method.class_weights": [1.0, 2.0, 1.0], "training.optimiser": "adam", "method.momentum": 0.0}
    config, data = settings(**everything, **{"training.learning_rate": 0.01}), pictures()
    model = stobatch.train(config, tmp_path / "run", dataset=data, quiet=True)
    plain = stobatch.plan(settings(), dataset=data)
    assert model.claim.epsilon == plain.claim.epsilon
    assert model.claim.unit == "training example"
    assert stobatch.load(tmp_path / "run").config == model.config


def moved(examples: Tensor, labels: Tensor, num_views: int, radius: float, steps: int) -> tuple[Tensor, Tensor]:
    """Noisy views of the same draws without and with a shift."""
    term = noisy_views("gaussian", 0.25, num_views, radius, steps)
    still = noisy_views("gaussian", 0.25, num_views)
    network = build_layered("conv 4 3/2, relu, linear", tuple(examples.shape[1:]), 3, torch.Generator().manual_seed(1))
    drawn = torch.randn(5, num_views, *examples.shape[1:], generator=torch.Generator().manual_seed(2))
    (views,), (plain,) = (one.prepare(network, examples, labels, 1.0, lambda s: drawn[: s[0]]) for one in (term, still))
    losses = [float(still.losses(network, examples, labels, (each,), 1.0).detach().mean()) for each in (plain, views)]
    assert losses[1] > losses[0]
    return plain, views


@pytest.mark.parametrize("steps", [1, 3])
def test_views_are_moved_against_their_example_together_and_no_farther_than_the_radius(steps: int) -> None:
    examples = torch.rand(5, 1, 6, 6, generator=torch.Generator().manual_seed(0)) * 2 - 1
    labels = torch.tensor([0, 1, 2, 0, 1])
    plain, views = moved(examples, labels, 3, 0.5, steps)
    shifts = views - plain
    assert torch.allclose(shifts, shifts[:, :1].expand_as(shifts), atol=1e-6)
    assert bool((shifts[:, 0].flatten(1).norm(dim=1) <= 0.5 * (1 + 1e-4)).all())
    alone, apart = moved(examples[:1], labels[:1], 3, 0.5, steps)
    assert torch.allclose((apart - alone)[0], shifts[0], atol=1e-5)  # no other example has a say
