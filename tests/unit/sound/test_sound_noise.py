"""The randomness of a sound step: fresh Gaussian noise, Poisson samples, and a stream of its own for every draw.

Statistical tests alarm falsely with probability 1e-9 each, and each has a broken twin that it catches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2
from sound_steps import BATCH, COUNT, flat, pictures, prepared, sampling, settings, step_of
from support.noise_checks import FALSE_ALARM, dependent, normal_of, not_gaussian
from torch import Tensor

from stobatch.data.partition import poisson_sample
from stobatch.seeds import Seeds, Stream
from stobatch.sound import step as sound_module
from stobatch.sound.losses import normal_sampler
from stobatch.sound.step import DpSgdTrainable

# Noise.


def noise_of(trainable: DpSgdTrainable, steps: range) -> list[Tensor]:
    """What is released where no example was drawn, on the scale of the sum."""
    scale = trainable.plan.clip_norm * BATCH
    return [flat(step_of(trainable, step)) * scale for step in steps]


WIDE = "linear 500, linear"
"""20 000 weights: enough of a sample for one step's noise."""


def test_noise_is_fresh_gaussian_and_never_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling(monkeypatch)
    one, other = (prepared(settings(WIDE), seed=seed) for seed in (4, 5))
    streams = [*noise_of(one, range(8)), *noise_of(other, range(2))]
    assert len(streams[0]) == 20_003
    assert not dependent(streams)
    assert one.plan.noise_stddev == one.plan.noise_multiplier * 0.5
    for stream in streams:
        assert not not_gaussian(stream, one.plan.noise_stddev)
    assert not not_gaussian(torch.cat(streams), one.plan.noise_stddev)


class Forgetful(Seeds):
    """The broken twin: the step is no part of the path."""

    def _digest(self, *path: str | int) -> bytes:
        return super()._digest(*(part for part in path if isinstance(part, str)))


def test_noise_that_repeats_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling(monkeypatch)
    trainable = prepared(settings(WIDE))
    trainable.seeds = Forgetful(4, public=True)
    assert dependent(noise_of(trainable, range(3)))


@pytest.mark.parametrize("share", [0.8, 1.25])
def test_noise_of_another_size_is_caught(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling(monkeypatch)
    trainable = prepared(settings(WIDE))
    stddev = trainable.plan.noise_stddev
    trainable.noise_stddev = share * stddev
    assert not_gaussian(noise_of(trainable, range(1))[0], stddev)


class Recording(Seeds):
    """Notes which streams are asked for, and of which kind."""

    asked: list[tuple[str | int, ...]]

    def generator(self, *path: str | int) -> torch.Generator:
        self.asked.append(("narrow", *path))
        return super().generator(*path)

    def philox(self, *path: str | int) -> np.random.Generator:
        self.asked.append(("wide", *path))
        return super().philox(*path)

    def stream(self, *path: str | int) -> Stream:
        self.asked.append(("cryptographic", *path))
        return super().stream(*path)


@pytest.mark.parametrize("chunk", [512, 3])
def test_every_draw_of_a_step_has_a_stream_of_its_own(chunk: int) -> None:
    trainable = prepared(settings(**{"method.views_weight": 1.0, "method.smoothing_stddev": 0.3}))
    trainable.chunk = chunk
    seeds = Recording(4, public=True)
    object.__setattr__(seeds, "asked", [])
    trainable.seeds = seeds
    for step in range(3):
        step_of(trainable, step)
    # What privacy rests on comes from a cryptographic stream; view noise is for accuracy alone.
    expected: list[tuple[str | int, ...]] = []
    for step in range(3):
        sample = poisson_sample(COUNT, BATCH / COUNT, Seeds.reproducible(4).stream("step", step, "sample"))
        expected += [("cryptographic", "step", step, "sample"), ("cryptographic", "step", step, "noise")]
        # Views go with a block of the sample, however it is cut: here there is one shard, and one block of it.
        expected += [("narrow", "step", step, "views", 0, 0)] * -(-len(sample) // chunk)
    assert sorted(seeds.asked, key=str) == sorted(expected, key=str)
    assert len(set(seeds.asked)) == 9


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_views_do_not_depend_on_how_a_sample_is_cut(noise: str) -> None:
    """Up to rounding; the broken twin has a stream for each piece."""
    changes = {"method.views_weight": 1.0, "method.smoothing_stddev": 0.3, "method.smoothing_noise": noise}
    config = settings(**changes, **{"method.expected_batch_size": 200, "method.delta": 1e-4})
    found = []
    for chunk in (512, 7, 70):
        trainable = prepared(config, pictures(count=300))
        trainable.chunk = chunk
        found.append(flat(step_of(trainable, 0)))
    assert torch.allclose(found[0], found[1], atol=1e-6)
    assert torch.allclose(found[0], found[2], atol=1e-6)

    def by_piece(stream: Any, rows: slice, device: torch.device) -> Any:
        return normal_sampler(stream(rows.start), device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sound_module, "sampler_by_blocks", by_piece)
        assert not torch.allclose(found[0], flat(step_of(trainable, 0)), atol=1e-4)


def test_samples_views_and_noise_are_independent() -> None:
    seeds = Seeds.reproducible(4)
    owners = [(), ("trainer", 0), ("trainer", 1), ("shard", 0), ("trainer", 1, "shard", 0)]
    paths = [("step", step, purpose) for step in range(1, 4) for purpose in ("sample", "noise")]
    paths += [("step", 0, *owner, purpose) for owner in owners for purpose in ("sample", "noise")]
    sample = [normal_of(seeds.stream(*path), 20_000) for path in paths]
    # As samples take them: chosen with probability a half.
    sample += [
        torch.from_numpy(seeds.stream("step", step, "sample").choose(20_000, 0.5)).double() - 0.5 for step in (7, 8)
    ]
    views = [("step", step, "views", shard, piece) for step in range(2) for shard in range(2) for piece in range(2)]
    sample += [torch.randn(20_000, generator=seeds.generator(*path)) for path in views]
    assert not dependent(sample)
    assert dependent([*sample, sample[1]])


# Samples.


def suspicious(samples: Callable[[int], Tensor], rate: float, count: int = 1000, steps: int = 400) -> list[str]:
    """What is wrong with samples that should be Poisson: their rate, their sizes, pairs, or consecutive steps."""
    taken = torch.zeros(steps, count, dtype=torch.bool)
    for step in range(steps):
        taken[step, samples(step)] = True
    sizes = taken.sum(1).double().numpy()
    # Sizes of 1000 examples are near enough to normal for a dispersion test.
    dispersion = float(((sizes - count * rate) ** 2).sum() / (count * rate * (1 - rate)))
    found = []
    for name, hits, tries, chance in (
        ("rate", int(taken.sum()), taken.numel(), rate),
        ("pairs", int((taken[:, ::2] & taken[:, 1::2]).sum()), taken.numel() // 2, rate**2),
        ("steps", int((taken[::2] & taken[1::2]).sum()), taken.numel() // 2, rate**2),
    ):
        low, high = binom.ppf(FALSE_ALARM / 2, tries, chance), binom.isf(FALSE_ALARM / 2, tries, chance)
        found += [] if low <= hits <= high else [name]
    low, high = chi2.ppf(FALSE_ALARM / 2, steps), chi2.isf(FALSE_ALARM / 2, steps)
    return found + ([] if low <= dispersion <= high else ["sizes"])


RATE = 0.1


def poisson(step: int) -> Tensor:
    return poisson_sample(1000, RATE, Seeds.reproducible(4).stream("step", step, "sample"))


def fixed_size(step: int) -> Tensor:
    return torch.randperm(1000, generator=torch.Generator().manual_seed(step))[:100]


def couples(step: int) -> Tensor:
    first = poisson(step) // 2 * 2
    return torch.cat([first, first + 1])


def test_samples_take_each_example_by_itself_at_the_planned_rate() -> None:
    assert suspicious(poisson, RATE) == []


@pytest.mark.parametrize(
    ("samples", "signs"),
    [
        (fixed_size, {"sizes"}),
        (couples, {"rate", "pairs"}),
        (lambda step: poisson(step // 2), {"steps"}),
        (lambda step: poisson(step)[::2], {"rate"}),
    ],
    ids=["fixed size", "couples", "the same twice", "half the rate"],
)
def test_other_samples_are_caught(samples: Callable[[int], Tensor], signs: set[str]) -> None:
    assert signs <= set(suspicious(samples, RATE))


def test_the_step_draws_from_all_examples_at_the_plans_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, float]] = []

    def noted(count: int, rate: float, generator: np.random.Generator) -> Tensor:
        asked.append((count, rate))
        return poisson_sample(count, rate, generator)

    monkeypatch.setattr(sound_module, "poisson_sample", noted)
    step_of(prepared(settings()), 0)
    assert asked == [(COUNT, BATCH / COUNT)]
