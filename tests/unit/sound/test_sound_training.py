"""A step of the sound method releases one bounded contribution per example, with noise, over a public denominator."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sound_steps import BATCH, CLASSES, COUNT, LAYERS, Gradients, flat, pictures, prepared, sampling, settings, step_of
from support.noise_checks import normal_of
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.bounds.boxes import TrainingBox, worst_case_scores
from stobatch.data.partition import poisson_sample
from stobatch.dp import clipping as per_example
from stobatch.errors import ModelError
from stobatch.models import Classifier, Layered
from stobatch.models import network as normalisation
from stobatch.sound import settings as sound_settings
from stobatch.sound import step as sound_module
from stobatch.sound.losses import Ramp, normal_sampler
from stobatch.sound.step import DpSgdTrainable

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
        worst = worst_case_scores(network.layers, TrainingBox.around(inputs, 0.2 * share), labels)
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


# What one example can do.


MIXTURES: dict[str, dict[str, Any]] = {
    "natural": {"natural_weight": 1.0, "certified_weight": 0.0},
    "natural and certified": {},
    "certified": {"natural_weight": 0.0, "certified_weight": 1.0},
    "small box": {"box_loss": "sabr", "box_share": 0.4},
    "mixed scores": {"natural_weight": 0.0, "box_loss": "cc_ibp"},
    "mixed losses": {"natural_weight": 0.0, "box_loss": "mtl_ibp", "box_share": 0.7},
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

        def normal(shape: tuple[int, ...]) -> Tensor:
            calls.append(1)
            everyone = torch.randn(COUNT, *shape[1:], generator=torch.Generator().manual_seed(len(calls)))
            return everyone[list(rows)]

        self.patch.setattr(sound_module, "sampler_by_blocks", lambda *_: normal)
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
    assert not others_change(trainable_for(architecture, normal, changes))


def others_change(trainable: DpSgdTrainable) -> bool:
    network, rows = trainable.network, torch.tensor(SAMPLE)
    found, given = [], trainable.reader.kept[0]
    for replacement in (given[1], torch.ones_like(given[1]), -given[2]):
        inputs, labels = trainable.reader.fetch(rows)
        inputs[0] = replacement
        labels[0] = (labels[0] + len(found)) % CLASSES
        normal = normal_sampler(torch.Generator().manual_seed(3), torch.device("cpu"))
        batch, losses = trainable.objective.prepare(network, inputs, labels, 1.0, normal)
        found.append([*(entry[1:] for entry in batch), trainable.clip(network, losses, batch, 0.05).norms[1:]])
    return any(not torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("loss", ["sabr", "cc_ibp", "mtl_ibp"])
def test_attacks_that_begin_at_the_mean_of_the_batch_are_caught(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: a starting point that several examples share carries each into the contributions of others."""
    own = sound_settings._craft_points

    def shared(steps: int, chunk: int, network: Classifier, inputs: Tensor, labels: Tensor, radius: float) -> Tensor:
        towards = (inputs.mean(0) - inputs).clamp(-radius / 2, radius / 2)
        return own(steps, chunk, network, inputs + towards, labels, radius / 2)

    monkeypatch.setattr(sound_settings, "_craft_points", shared)
    assert others_change(trainable_for(LAYERS, "none", {"box_loss": loss}))


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
    monkeypatch.setattr(sound_module, "clipper_for", lambda *_, **__: per_example.clipped_sum_by_example)
    config = settings("mnist_cnn", **{"method.certified_weight": 0.0, "machine.memory_mb": 16})
    trainable = prepared(config, pictures(12))
    formed = sum(p.numel() * 4 for p in trainable.network.parameters())
    assert trainable.clip is per_example.clipped_sum_by_example
    assert trainable.chunk * formed <= 16 * 2**20 // 4


def test_parameters_that_have_run_away_are_named() -> None:
    trainable = prepared(settings())
    with torch.no_grad():
        next(trainable.network.parameters()).fill_(math.nan)
    with pytest.raises(ModelError, match="NaN or infinite") as caught:
        trainable.after_update()
    assert "learning_rate" in caught.value.remedy
