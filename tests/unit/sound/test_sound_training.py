"""A step of the sound method: fresh noise, Poisson samples, one bounded contribution per example, a public denominator.

Statistical tests alarm falsely with probability 1e-9 each, and each has a broken twin that it catches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2
from support.noise_checks import FALSE_ALARM, dependent, normal_of, not_gaussian
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import stobatch
from stobatch.bounds.boxes import Box, worst_case_scores
from stobatch.config import DataConfig, MachineConfig, ModelConfig, RunConfig, TrainingConfig
from stobatch.data import Dataset
from stobatch.data.partition import poisson_sample
from stobatch.dp import clipping as per_example
from stobatch.dp.plan import DpSgdPlan, OpenPlan
from stobatch.errors import ModelError, RunError, SettingError, StobatchError
from stobatch.models import Classifier, Layered, build
from stobatch.models import network as normalisation
from stobatch.seeds import Seeds, Stream
from stobatch.sound import step as sound_module
from stobatch.sound.losses import Adversarial, CrossEntropy, IntervalBounds, NoisyViews, Objective, Ramp, normal_sampler
from stobatch.sound.method import Sound
from stobatch.sound.settings import SoundConfig, view_noise
from stobatch.sound.step import AveragedSGD, DpSgdTrainable

CLASSES, COUNT, BATCH = 3, 24, 8
LAYERS = "squash 2 0 0.4, conv 3 3/2, relu, linear"
Gradients = dict[str, Tensor]


def pictures(side: int = 6, count: int = COUNT, seed: int = 0) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count + 6, 1, side, side, generator=generator) * 2 - 1
    labels = torch.randint(CLASSES, (count + 6,), generator=generator)
    parts = (inputs[:count], labels[:count], inputs[count:], labels[count:])
    return stobatch.from_tensors(*parts, num_classes=CLASSES)


def settings(architecture: str = LAYERS, **changes: Any) -> RunConfig:
    method = SoundConfig(
        epsilon=3.0, delta=1e-3, batch_size=BATCH, warm_up=0.0, ramp=0.5, attack_steps=2, clip_norm=0.5
    )
    return RunConfig(
        method=method,
        data=DataConfig(name="tensors"),
        model=ModelConfig(architecture=architecture, last_hidden_size=5, normalisation="none"),
        training=TrainingConfig(steps=8, learning_rate=0.5, optimiser="sgd", monitor_every=4),
        machine=MachineConfig(threads=1, checkpoint_every=3),
        seed=4,
    ).override_all(changes)


def prepared(config: RunConfig, data: Dataset | None = None, seed: int = 4) -> DpSgdTrainable:
    data = data or pictures()
    network = build(config.model, data.info.input_shape, CLASSES, torch.Generator().manual_seed(2))
    return Sound().prepare(config, stobatch.plan(config, dataset=data), network, data.train, Seeds.reproducible(seed))


def step_of(trainable: DpSgdTrainable, step: int) -> Gradients:
    (task,) = trainable.tasks(step)
    return dict(trainable.gradients(task, step))


def flat(gradients: Gradients) -> Tensor:
    return torch.cat([value.flatten() for value in gradients.values()]).double()


def sampling(monkeypatch: pytest.MonkeyPatch, *rows: int) -> None:
    """Make every sample consist of these examples."""
    monkeypatch.setattr(sound_module, "poisson_sample", lambda *_: torch.tensor(rows, dtype=torch.long))


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
        torch.from_numpy(seeds.stream("step", step, "sample").chosen(20_000, 0.5)).double() - 0.5 for step in (7, 8)
    ]
    views = [("step", step, "views", shard, piece) for step in range(2) for shard in range(2) for piece in range(2)]
    sample += [torch.randn(20_000, generator=seeds.generator(*path)) for path in views]
    assert not dependent(sample)
    assert dependent([*sample, sample[1]])


# The released gradient.


def oracle(trainable: DpSgdTrainable, step: int) -> Gradients:
    """(Σ min(1, C/‖g_i‖) g_i + noise)/(C B), example by example, with draws named by the seeds."""
    plan, network, seeds = trainable.plan, trainable.network, trainable.seeds
    sample = poisson_sample(plan.num_examples, plan.sampling_rate, seeds.stream("step", step, "sample"))
    share = Ramp(0.0, 0.5).share(step / plan.steps)
    assert isinstance(network, Layered)
    parameters = dict(network.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for row in sample.tolist():
        inputs, labels = trainable.reader.fetch(torch.tensor([row]))
        worst = worst_case_scores(network.layers, Box.around(inputs, 0.2 * share), labels)
        natural, certified = F.cross_entropy(network(inputs), labels), F.cross_entropy(worst, labels)
        loss = (1 - 0.5 * share) * natural + 0.5 * share * certified
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        length = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        for name, gradient in zip(parameters, gradients, strict=True):
            total[name] += min(1.0, plan.clip_norm / length) * gradient
    noise = normal_of(seeds.stream("step", step, "noise"), sum(p.numel() for p in parameters.values()))
    own = noise.split([p.numel() for p in parameters.values()])
    return {
        name: (value + drawn.view(value.shape) * plan.noise_stddev).to(value) / (plan.clip_norm * BATCH)
        for (name, value), drawn in zip(total.items(), own, strict=True)
    }


@pytest.mark.parametrize("step", [0, 2, 7])
@pytest.mark.parametrize("chunk", [512, 3])
def test_the_released_gradient_is_the_clipped_sum_with_noise_over_a_constant(step: int, chunk: int) -> None:
    trainable = prepared(settings())
    trainable.chunk = chunk
    assert torch.allclose(flat(step_of(trainable, step)), flat(oracle(trainable, step)), rtol=1e-4, atol=1e-6)


def test_an_empty_sample_releases_noise_over_the_same_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling(monkeypatch)
    trainable = prepared(settings())
    released, planned = flat(step_of(trainable, 3)), trainable.plan.noise_stddev
    noise = normal_of(trainable.seeds.stream("step", 3, "noise"), len(released)) * planned
    assert torch.allclose(released.double(), noise / (0.5 * BATCH), rtol=1e-6, atol=1e-9 * planned)
    assert released.all()


def test_the_denominator_does_not_depend_on_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """What two examples add together is what they add alone; with the realised size below it would be half."""
    trainable = prepared(settings())

    def released(*rows: int) -> Tensor:
        sampling(monkeypatch, *rows)
        return flat(step_of(trainable, 7))

    nothing = released()
    alone = [released(row) - nothing for row in range(COUNT)]
    assert torch.allclose(released(3, 11) - nothing, alone[3] + alone[11], atol=1e-6)
    assert torch.allclose(released(*range(COUNT)) - nothing, sum(alone, torch.zeros(())), atol=1e-5)
    assert max(float(part.norm()) for part in alone) > 0.99 / BATCH


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


# What one example can do.


MIXTURES: dict[str, dict[str, Any]] = {
    "natural": {"natural_weight": 1.0, "certified_weight": 0.0},
    "natural and certified": {},
    "certified": {"natural_weight": 0.0, "certified_weight": 1.0},
    "adversarial": {"certified_weight": 0.0, "adversarial_weight": 1.0},
    "gaussian views": {"certified_weight": 0.0, "views_weight": 1.0, "smoothing_stddev": 0.4},
    "laplace views": {"views_weight": 1.0, "smoothing_stddev": 0.4, "smoothing_noise": "laplace", "num_views": 3},
    "everything": {
        "natural_weight": 0.3,
        "certified_weight": 0.3,
        "adversarial_weight": 0.3,
        "views_weight": 0.3,
        "smoothing_stddev": 0.4,
    },
}
PAPER = {"certified_weight": 0.0, "adversarial_weight": 0.5, "reconstruction_weight": 0.5}
PAPER_VIEWS = {**PAPER, "views_weight": 0.5, "smoothing_stddev": 0.4}
CASES = [
    *[pytest.param(LAYERS, "none", changes, id=name) for name, changes in MIXTURES.items()],
    pytest.param("mnist_cnn", "none", PAPER_VIEWS, id="mnist_cnn"),
    pytest.param("mnist_cnn", "reference", PAPER, id="mnist_cnn, reference"),
    pytest.param("mnist_cnn", "group", PAPER, id="mnist_cnn, group"),
]


class Steps:
    """One step with chosen samples. View noise goes with the example, as in the proof: who else is there is nothing
    to it."""

    def __init__(self, trainable: DpSgdTrainable, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        self.trainable, self.patch, self.step = trainable, monkeypatch, step
        self.nothing = self.released()

    def released(self, *rows: int) -> Tensor:
        sampling(self.patch, *rows)
        calls: list[int] = []

        def coins(shape: tuple[int, ...]) -> Tensor:
            calls.append(1)
            everyone = torch.randn(COUNT, *shape[1:], generator=torch.Generator().manual_seed(len(calls)))
            return everyone[list(rows)]

        self.patch.setattr(sound_module, "sampler_by_blocks", lambda *_: coins)
        return flat(step_of(self.trainable, self.step))

    def contribution(self, *rows: int) -> Tensor:
        return self.released(*rows) - self.nothing


@pytest.fixture
def few_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalisation, "NUM_ANCHORS", 4)


def trainable_for(architecture: str, normal: str, changes: dict[str, Any], clip_norm: float = 0.05) -> DpSgdTrainable:
    named = {f"method.{name}": value for name, value in changes.items()}
    config = settings(architecture, **named, **{"method.clip_norm": clip_norm, "model.normalisation": normal})
    return prepared(config, pictures(12 if architecture == "mnist_cnn" else 6))


SAMPLE = (1, 4, 9, 16, 20)


def largest_change(steps: Steps) -> tuple[float, float]:
    """By removing an example of the sample, and by replacing it with one from outside."""
    whole = steps.released(*SAMPLE)
    removed, replaced = [], []
    for place in range(len(SAMPLE)):
        rest = SAMPLE[:place] + SAMPLE[place + 1 :]
        removed.append(float((whole - steps.released(*rest)).norm()))
        replaced.append(float((whole - steps.released(*rest, 0)).norm()))
    return max(removed), max(replaced)


@pytest.mark.usefixtures("few_anchors")
@pytest.mark.parametrize(("architecture", "normal", "changes"), CASES)
@pytest.mark.parametrize("step", [2, 7])
def test_an_example_moves_a_step_by_one_clipped_contribution(
    architecture: str, normal: str, changes: dict[str, Any], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C is far below typical gradients, so the bound is reached; step 2 is half way up the ramp."""
    steps = Steps(trainable_for(architecture, normal, changes), monkeypatch, step)
    removed, replaced = largest_change(steps)
    assert 0.99 / BATCH <= removed <= 1.001 / BATCH
    assert replaced <= 2.001 / BATCH


def clipped_term_by_term(network: nn.Module, losses: Any, batch: Any, clip_norm: float) -> per_example.ClippedSum:
    """The broken twin: an example's points are clipped one by one, so that it counts twice."""
    parts = []
    for entry in (batch[0], batch[2]):

        def natural(network: nn.Module, batch: Any) -> Tensor:
            return F.cross_entropy(network(batch[0]), batch[1], reduction="none")

        parts.append(per_example.clipped_sum_in_one_pass(network, natural, (entry, batch[1]), clip_norm))
    total = {name: value + parts[1].gradients[name] for name, value in parts[0].gradients.items()}
    return per_example.ClippedSum(total, parts[0].norms)


def test_clipping_each_point_apart_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    trainable = trainable_for(LAYERS, "none", MIXTURES["adversarial"])
    trainable.clip = clipped_term_by_term
    assert largest_change(Steps(trainable, monkeypatch, 7))[0] > 1.5 / BATCH


@pytest.mark.usefixtures("few_anchors")
@pytest.mark.parametrize(("architecture", "normal", "changes"), CASES)
def test_no_example_reaches_what_another_is_made_into(architecture: str, normal: str, changes: dict[str, Any]) -> None:
    """Bit for bit: adversarial points, views and lengths of gradients of the others stay when one is exchanged."""
    trainable = trainable_for(architecture, normal, changes)
    network, rows = trainable.network, torch.tensor(SAMPLE)
    found, given = [], trainable.reader.kept[0]
    for replacement in (given[1], torch.ones_like(given[1]), -given[2]):
        inputs, labels = trainable.reader.fetch(rows)
        inputs[0] = replacement
        labels[0] = (labels[0] + len(found)) % CLASSES
        coins = normal_sampler(torch.Generator().manual_seed(3), torch.device("cpu"))
        batch, losses = trainable.objective.prepare(network, inputs, labels, 1.0, coins)
        found.append([*(entry[1:] for entry in batch), trainable.clip(network, losses, batch, 0.05).norms[1:]])
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@pytest.mark.usefixtures("few_anchors")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("architecture", "normal", "changes"), CASES)
def test_an_example_without_a_finite_gradient_adds_nothing(
    architecture: str, normal: str, changes: dict[str, Any], bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops nobody, either: a training that ends in an error because of one example would tell of it."""
    trainable = trainable_for(architecture, normal, changes)
    steps = Steps(trainable, monkeypatch, 7)
    without = steps.contribution(*SAMPLE[1:])
    trainable.reader.kept[0][SAMPLE[0]] = bad
    with_it = steps.contribution(*SAMPLE)
    assert with_it.isfinite().all()
    # Infinity is clamped to the edge of the range by boxes and squashes; what is then finite is clipped like any other.
    allowed = 1e-5 if math.isnan(bad) else 1.001 / BATCH
    assert float((with_it - without).norm()) <= allowed


def test_statistics_of_reference_layers_follow_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training sees the network that will be deployed: loading takes the statistics at the parameters' values."""
    monkeypatch.setattr(normalisation, "NUM_ANCHORS", 4)
    trainable = trainable_for("mnist_cnn", "reference", PAPER)
    with torch.no_grad():
        next(trainable.network.parameters()).mul_(3)
    trainable.after_update()
    inputs = trainable.reader.kept[0][:3]
    seen = trainable.network(inputs)
    trainable.network.calibrate()
    assert torch.equal(seen, trainable.network(inputs))


def test_formed_gradients_fit_the_memory(few_anchors: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound_module, "clipper_for", lambda *_: per_example.clipped_sum_by_example)
    config = settings("mnist_cnn", **{"method.certified_weight": 0.0, "machine.memory_mb": 16})
    trainable = prepared(config, pictures(12))
    formed = sum(p.numel() * 4 for p in trainable.network.parameters())
    assert trainable.clip is per_example.clipped_sum_by_example
    assert trainable.chunk * formed <= 16 * 2**20 // 4


def test_parameters_that_have_run_away_are_named() -> None:
    trainable = prepared(settings())
    with torch.no_grad():
        next(trainable.network.parameters()).fill_(math.nan)
    with pytest.raises(ModelError, match="not numbers any more") as caught:
        trainable.after_update()
    assert "learning_rate" in caught.value.remedy


# The objective along the ramp.


def losses_at(objective: Objective, network: Layered, progress: float, inputs: Tensor, labels: Tensor) -> Tensor:
    coins = normal_sampler(torch.Generator().manual_seed(0), torch.device("cpu"))
    batch, losses = objective.prepare(network, inputs, labels, progress, coins)
    return losses(network, batch)


@pytest.mark.parametrize(
    ("progress", "share"), [(0.0, 0.0), (0.19, 0.0), (0.2, 0.0), (0.325, 0.25), (0.45, 0.5), (0.7, 1.0), (1.0, 1.0)]
)
def test_hard_terms_and_their_radius_grow_and_cross_entropy_has_the_rest(progress: float, share: float) -> None:
    data = pictures()
    network = build(settings().model, (1, 6, 6), CLASSES, torch.Generator().manual_seed(2))
    assert isinstance(network, Layered)
    inputs, labels = data.train.inputs[:5], data.train.labels[:5]
    radii: list[float] = []

    def attack(network: Classifier, inputs: Tensor, labels: Tensor, radius: float) -> Tensor:
        radii.append(radius)
        return (inputs + radius).clamp(-1, 1)

    views = NoisyViews(lambda shape, coins: torch.full(shape, 0.1), 2)
    terms = ((0.4, CrossEntropy()), (0.5, IntervalBounds(0.2)), (0.7, Adversarial(0.3, attack)), (0.2, views))
    found = losses_at(Objective(terms, Ramp(0.2, 0.5)), network, progress, inputs, labels)

    def natural(points: Tensor) -> Tensor:
        return F.cross_entropy(network(points), labels, reduction="none")

    worst = worst_case_scores(network.layers, Box.around(inputs, share * 0.2), labels)
    expected = (0.4 + (1 - share) * (0.5 + 0.7)) * natural(inputs)
    expected = expected + share * 0.5 * F.cross_entropy(worst, labels, reduction="none")
    expected = expected + share * 0.7 * natural((inputs + share * 0.3).clamp(-1, 1)) + 0.2 * natural(inputs + 0.1)
    assert torch.allclose(found, expected, rtol=1e-5)
    assert radii == ([] if share == 0 else [pytest.approx(share * 0.3)])


def test_a_ramp_without_length_is_a_step() -> None:
    assert [Ramp(0.3, 0.0).share(progress) for progress in (0.0, 0.29, 0.3, 1.0)] == [0.0, 0.0, 1.0, 1.0]
    assert Ramp(1.0, 0.5).share(0.999) == 0.0


def test_adversarial_points_are_worse_and_inside_the_ball() -> None:
    trainable = prepared(settings(**{"method.adversarial_weight": 1.0, "method.certified_weight": 0.0}))
    inputs, labels = trainable.reader.kept
    coins = normal_sampler(torch.Generator(), torch.device("cpu"))
    (given, _, points), _ = trainable.objective.prepare(trainable.network, inputs, labels, 1.0, coins)
    assert torch.equal(given, inputs)
    assert float((points - inputs).abs().max()) <= 0.2 + 1e-6
    assert float(points.abs().max()) <= 1
    assert not points.requires_grad
    before, after = (F.cross_entropy(trainable.network(x), labels, reduction="none") for x in (inputs, points))
    assert (after >= before - 1e-6).float().mean() > 0.9


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_views_carry_the_noise_that_votes_are_taken_under(kind: str) -> None:
    """The same law: by the quantiles of a large sample, within six standard errors."""
    config = settings(**{"method.smoothing_stddev": 0.5, "method.smoothing_noise": kind, "method.views_weight": 1.0})
    method = config.method
    assert isinstance(method, SoundConfig)
    assert method.noise is not None
    coins = normal_sampler(torch.Generator().manual_seed(0), torch.device("cpu"))
    ours = view_noise(method.smoothing_noise, method.smoothing_stddev, (200_000,), coins)
    theirs = method.noise.draw((200_000,), torch.Generator().manual_seed(1))
    assert float(ours.std()) == pytest.approx(0.5, rel=0.02)
    distance = max(
        abs(float((ours < at).double().mean() - (theirs < at).double().mean())) for at in np.linspace(-2, 2, 41)
    )
    assert distance < 6 * math.sqrt(0.5 / 200_000)


# Descent with an average.


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_descent_is_torchs_and_the_average_follows_the_released_parameters(momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(40, 7, generator=generator, dtype=torch.float64)
    ours, theirs = (nn.Parameter(torch.ones(7, dtype=torch.float64)) for _ in range(2))
    averaged = AveragedSGD([ours], lr=0.1, momentum=momentum, decay=0.8)
    plain = torch.optim.SGD([theirs], lr=0.1, momentum=momentum)
    average = theirs.detach().clone()
    for count, gradient in enumerate(gradients):
        for parameter, optimiser in ((ours, averaged), (theirs, plain)):
            parameter.grad = gradient.clone()
            optimiser.step()
        assert torch.allclose(ours, theirs, atol=1e-12)
        # Nothing enters the average but the parameters, which are released.
        decay = min(0.8, (1 + count) / (10 + count))
        average = decay * average + (1 - decay) * theirs.detach()
    assert not torch.allclose(ours, average, atol=1e-3)
    averaged.adopt_average()
    assert torch.allclose(ours, average, atol=1e-12)
    adopted = ours.detach().clone()
    averaged.adopt_average()
    assert torch.equal(ours, adopted)


def test_an_average_without_steps_leaves_the_parameters() -> None:
    parameter = nn.Parameter(torch.ones(3))
    AveragedSGD([parameter], lr=0.1, momentum=0.0, decay=0.9).adopt_average()
    assert torch.equal(parameter, torch.ones(3))


def test_the_average_survives_a_checkpoint() -> None:
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    one, other = (AveragedSGD([p], lr=0.3, momentum=0.5, decay=0.9) for p in parameters)
    gradients = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    for gradient in gradients[:5]:
        parameters[0].grad = gradient
        one.step()
    other.load_state_dict(one.state_dict())
    parameters[1].data.copy_(parameters[0].data)
    for gradient in gradients[5:]:
        for parameter, optimiser in zip(parameters, (one, other), strict=True):
            parameter.grad = gradient
            optimiser.step()
    one.adopt_average()
    other.adopt_average()
    assert torch.equal(*parameters)


# Refusals.


def with_dropout() -> Layered:
    torch.manual_seed(0)
    return Layered([nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, CLASSES)], (1, 6, 6))


def with_batch_norm() -> Layered:
    torch.manual_seed(0)
    return Layered([nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, CLASSES)], (1, 6, 6))


REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "batch norm": ({"model.architecture": "mnist_cnn", "model.normalisation": "batch"}, "BatchNorm", "reference"),
    "adam": ({"training.optimiser": "adam"}, "not for method 'sound'", "optimiser=sgd"),
    "unreachable": ({"method.epsilon": 1e-9, "method.delta": 1e-12}, "out of reach", "fewer steps"),
    "loose": ({"method.delta": 1 / COUNT}, "not below 1 / num_examples", "or less"),
    "large batch": ({"method.expected_batch_size": COUNT + 1}, "does not fit", "from 1 to 24"),
    "certified": ({"model.architecture": "mnist_cnn"}, "plain stack of layers", "certified_weight=0"),
    "reconstruction": ({"method.reconstruction_weight": 1.0}, "with an encoder", "reconstruction_weight=0"),
    "no loss": ({"method.natural_weight": 0.0, "method.certified_weight": 0.0}, "no loss", "natural_weight=1"),
    "views": ({"method.views_weight": 1.0}, "no noise", "smoothing_stddev"),
    "no bounds": ({"model.architecture": "conv 2 3, groupnorm 1, linear"}, "GroupNorm", "without the certified loss"),
}


@pytest.mark.parametrize(("changes", "message", "remedy"), REFUSALS.values(), ids=REFUSALS)
def test_what_the_proof_leaves_out_is_refused_before_anything_is_written(
    changes: dict[str, Any], message: str, remedy: str, tmp_path: Any
) -> None:
    data = pictures(12 if changes.get("model.architecture") == "mnist_cnn" else 6)
    with pytest.raises(StobatchError, match=message) as caught:
        stobatch.train(settings().override_all(changes), tmp_path / "run", dataset=data, quiet=True)
    assert remedy in caught.value.remedy
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("network", "message"), [(with_dropout, "mixes examples or draws"), (with_batch_norm, "Batch")]
)
def test_layers_that_mix_or_draw_are_refused(network: Callable[[], Layered], message: str, tmp_path: Any) -> None:
    config = settings("custom")
    with pytest.raises(ModelError, match=message):
        stobatch.train(config, tmp_path / "run", dataset=pictures(), network=network(), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_plan_for_other_data_is_refused() -> None:
    config = settings()
    plan = stobatch.plan(config, dataset=pictures(count=COUNT + 1))
    network = build(config.model, (1, 6, 6), CLASSES, torch.Generator())
    with pytest.raises(SettingError, match=r"plan is for 25 training examples, the data have 24"):
        Sound().prepare(config, plan, network, pictures().train, Seeds.reproducible(1))


def test_augmented_copies_are_refused() -> None:
    data = pictures()
    info = type(data.info)(**{**vars(data.info), "copies": 4})
    with pytest.raises(SettingError, match="records_per_person=4"):
        Sound().plan(settings(), info, None)


@pytest.mark.parametrize("change", [{"method.epsilon": 2.0}, {"method.clip_norm": 0.7}, {"training.steps": 9}])
def test_a_run_is_not_resumed_under_another_plan(change: dict[str, float], tmp_path: Any) -> None:
    stobatch.train(settings(), tmp_path / "run", dataset=pictures(), quiet=True)
    with pytest.raises(RunError, match="holds configuration"):
        stobatch.train(settings(**change), tmp_path / "run", dataset=pictures(), resume=True, quiet=True)


def test_a_run_is_not_resumed_with_other_data(tmp_path: Any) -> None:
    stobatch.train(settings(), tmp_path / "run", dataset=pictures(), quiet=True)
    with pytest.raises(RunError, match="other training data"):
        stobatch.train(settings(), tmp_path / "run", dataset=pictures(seed=1), resume=True, quiet=True)


# What is promised after more steps than planned.


def test_steps_that_were_repeated_are_paid_for() -> None:
    plan = stobatch.plan(settings(), dataset=pictures())
    assert isinstance(plan, DpSgdPlan)
    for counted in (0, 5, 8):
        assert plan.after(counted) == plan.claim
    more = plan.after(11)
    assert more.epsilon == plan.mechanism(11).epsilon(plan.delta) > plan.claim.epsilon
    assert more.assumptions[:-1] == plan.claim.assumptions
    assert "3 steps beyond the 8 planned are counted" in more.assumptions[-1]
    assert plan.after(12).epsilon > more.epsilon


def test_a_plan_without_steps_to_count_stays_as_it_is() -> None:
    plan = OpenPlan(100, 10, "vanilla")
    assert plan.after(1000) == plan.guarantee
