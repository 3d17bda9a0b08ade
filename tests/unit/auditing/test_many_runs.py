"""The attack on every step: what it adds up is the logarithm of a likelihood ratio, on the real training.

Where the other records' part is known exactly, the attacker's score has a law that can be written down. Statistical
tests compare with that law and alarm falsely with probability 1e-9 each; half of the noise is the broken twin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import kstwo, norm
from torch import Tensor

import stobatch
from stobatch.auditing.many_runs import StepAttack, final_scores, histogram, many_runs_finding
from stobatch.auditing.neighbours import worst_case
from stobatch.baselines.controls import HalfNoiseConfig
from stobatch.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from stobatch.data import Dataset
from stobatch.dp.accounting import PoissonGaussian
from stobatch.dp.canaries import Canaries, GradientCanaries
from stobatch.dp.plan import DpSgdPlan
from stobatch.loading import make_network
from stobatch.methods import method_of
from stobatch.seeds import Seeds
from stobatch.sound.settings import SoundConfig
from stobatch.sound.step import DpSgdTrainable
from stobatch.training import Trainable
from stobatch.training.engines import Gradients
from stobatch.training.loop import train_one
from stobatch.types import Neighbours, Verdict
from stobatch_recipes import recipe

pytestmark = pytest.mark.usefixtures("try_each_network_once")

Floats = NDArray[np.float64]

FALSE_ALARM = 1e-9
CLASSES, COUNT, STEPS = 4, 12, 6
LONG = 30
"""Steps where each counts by itself: a training is prepared once for all of its own."""
DEAD = 0
"""A pixel that is 0 in every record, so that no example ever pulls at its weights."""


def pictures() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.rand(COUNT + 2, 1, 3, 3, generator=generator) * 2 - 1
    inputs[:, 0, 0, DEAD] = 0
    labels = torch.randint(CLASSES, (COUNT + 2,), generator=generator)
    return stobatch.from_tensors(inputs[:COUNT], labels[:COUNT], inputs[COUNT:], labels[COUNT:], num_classes=CLASSES)


def settings(
    batch: int, *, like: type[SoundConfig] = SoundConfig, steps: int = STEPS, epsilon: float = 6.0
) -> RunConfig:
    """Of a batch as large as the data every step takes everyone."""
    method = like(
        epsilon=epsilon, delta=1e-3, batch_size=batch, clip_norm=0.5, natural_weight=1.0, certified_weight=0.0
    )
    return RunConfig(
        method=method,
        data=DataConfig(name="tensors"),
        model=ModelConfig(architecture="linear"),
        training=TrainingConfig(steps=steps, learning_rate=0.5, optimiser="sgd"),
    )


class Trainings:
    """Models with and without a canary, and the attacker's score of each."""

    def __init__(self, config: RunConfig, canary: str) -> None:
        self.config, self.canary, self.data = config, canary, pictures()
        plan = stobatch.plan(config, dataset=self.data)
        assert isinstance(plan, DpSgdPlan)
        self.plan, self.curve = plan, plan.curve
        self.place = GradientCanaries(torch.tensor([DEAD]))
        self.pair = worst_case(self.data.train, Neighbours.ADD_REMOVE)
        self.noiseless = False

    def trainable(self, world: int, seeds: Seeds) -> DpSgdTrainable:
        network = make_network(self.config, self.data.info, seeds, None)
        train = self.pair.pool.take(self.pair.without)
        trainable = method_of(self.config).prepare(self.config, self.plan, network, train, seeds)
        assert isinstance(trainable, DpSgdTrainable)
        if world:
            here, (inputs, labels) = torch.tensor([True]), self.pair.canary
            gradient = self.canary == "gradient"
            trainable.add_canaries(Canaries(here, self.place) if gradient else Canaries(here, None, inputs, labels))
        if self.noiseless:
            trainable.noise_stddev = 0.0
        return trainable

    def contribution(self, step: int, trainable: Trainable) -> Gradients:
        if self.canary == "input":
            return trainable.contributions(*self.pair.canary, step)
        zero = {name: torch.zeros_like(p) for name, p in trainable.network.named_parameters()}
        self.place.add(zero, torch.tensor([0]), step, trainable.per_example_bound)
        return zero

    def attack(self) -> StepAttack:
        others = self.pair.pool.take(self.pair.without)
        return StepAttack(self.curve, self.contribution, (others.inputs, others.labels))

    def scores(self, world: int, count: int) -> Floats:
        """Of whole trainings."""
        found = []
        for index in range(count):
            attack = self.attack()
            train_one(self.trainable(world, Seeds.reproducible(index).child(world)), self.config, attack)
            found.append(attack.total)
        return np.array(found)

    def steps(self, world: int, count: int) -> Floats:
        """Of single steps, each of which is a likelihood ratio of its own."""
        found = []
        for index in range(count):
            watch = _EachStep(self.attack())
            train_one(self.trainable(world, Seeds.reproducible(index).child(world)), self.config, watch)
            found += watch.gains
        return np.array(found)


class _EachStep:
    """What each step adds to the attacker's score."""

    def __init__(self, attack: StepAttack) -> None:
        self.attack, self.gains = attack, list[float]()

    def see(self, step: int, trainable: Trainable, released: Gradients) -> None:
        before = self.attack.total
        self.attack.see(step, trainable, released)
        self.gains.append(self.attack.total - before)


def not_normal(sample: Floats, mean: float, stddev: float) -> bool:
    """Kolmogorov-Smirnov, with the exact law of its distance."""
    ordered = norm.cdf(np.sort(sample), mean, stddev)
    ranks = np.arange(len(ordered) + 1) / len(ordered)
    distance = max((ranks[1:] - ordered).max(), (ordered - ranks[:-1]).max())
    return bool(distance > kstwo.isf(FALSE_ALARM, len(ordered)))


# Without noise.


@pytest.mark.slow
@pytest.mark.parametrize(("canary", "batch"), [("gradient", 9), ("gradient", COUNT), ("input", COUNT)])
def test_without_noise_the_two_sides_fall_apart(canary: str, batch: int) -> None:
    """Of a sample that may miss the canary in every step, once in 4^6 trainings, the seeds here have none."""
    trainings = Trainings(settings(batch), canary)
    trainings.noiseless = True
    without, with_ = (trainings.scores(world, 8) for world in (0, 1))
    assert without.max() < with_.min()
    assert without.max() - without.min() < 1e-4
    # With the planned noise, and the same everything else, they overlap.
    trainings.noiseless = False
    without, with_ = (trainings.scores(world, 20) for world in (0, 1))
    assert without.max() > with_.min()


def test_without_noise_the_score_is_known_exactly() -> None:
    """Everyone is sampled: a step shows nothing, or exactly the canary, ±1/2 in the exponent."""
    trainings = Trainings(settings(COUNT), "gradient")
    trainings.noiseless = True
    expected = STEPS / (2 * trainings.curve.noise_multiplier**2)
    assert trainings.scores(0, 2) == pytest.approx([-expected] * 2, rel=1e-4)
    assert trainings.scores(1, 2) == pytest.approx([expected] * 2, rel=1e-4)


def test_without_noise_a_sample_that_misses_the_canary_counts_against_it() -> None:
    trainings = Trainings(settings(6), "gradient")
    trainings.noiseless = True
    half = 1 / (2 * trainings.curve.noise_multiplier**2)
    missed, taken = (np.log(0.5 + 0.5 * np.exp(sign * half)) for sign in (-1, 1))
    found = trainings.steps(1, 8)
    assert np.isclose(found[:, None], [missed, taken], rtol=1e-4).any(1).all()
    assert {round(float(value), 3) for value in found} == {round(missed, 3), round(taken, 3)}


# With noise: the law of the score.


@pytest.mark.slow
@pytest.mark.parametrize("canary", ["gradient", "input"])
def test_where_everyone_is_sampled_the_score_is_normal_with_half_its_variance_as_mean(canary: str) -> None:
    """log LR ~ N(∓T/2σ², T/σ²): the law of a likelihood ratio between N(0, σ²) and N(1, σ²), T times.

    Of the input canary too: its own gradient changes from step to step, but each has length one after clipping.
    """
    trainings = Trainings(settings(COUNT), canary)
    information = STEPS / trainings.curve.noise_multiplier**2
    for world, sign in ((0, -1), (1, 1)):
        scores = trainings.scores(world, 60)
        assert not not_normal(scores, sign * information / 2, np.sqrt(information))
        # It is not the law of the other side, nor one of other noise: the test would see it.
        assert not_normal(scores, -sign * information / 2, np.sqrt(information))


def noise_behind(gains: Floats, curve: PoissonGaussian) -> Floats:
    """What stood along the canary, in its units, undoing log(1 - q + q exp((s - ½)/σ²))."""
    q, variance = curve.sampling_rate, curve.noise_multiplier**2
    found: Floats = variance * np.log((np.exp(gains) - 1 + q) / q) + 0.5
    return found


@pytest.mark.slow
def test_half_noise_has_another_law() -> None:
    for batch in (6, COUNT):
        right, half = (
            Trainings(settings(batch, like=like, steps=LONG), "gradient") for like in (SoundConfig, HalfNoiseConfig)
        )
        stddev = right.curve.noise_multiplier
        assert not not_normal(noise_behind(right.steps(0, 12), right.curve), 0, stddev)
        found = noise_behind(half.steps(0, 12), half.curve)
        assert not_normal(found, 0, stddev)
        assert not not_normal(found, 0, stddev / 2)


def mean_of_ratios(gains: Floats, curve: PoissonGaussian, most: float) -> tuple[float, float]:
    """The mean of exp(gain), cut at `most`, and how far Bernstein lets it stray from its expectation, which is 1.

    Each ratio is 1 - q + q exp((s - ½)/σ²) with s ~ N(0, σ²): of mean 1 and variance q² (e^(1/σ²) - 1). What the cut
    takes away is computed from the same law and given back.
    """
    q, sigma = curve.sampling_rate, curve.noise_multiplier
    ratios, chance = np.minimum(np.exp(gains), most), np.log(2 / FALSE_ALARM)
    variance = q**2 * np.expm1(1 / sigma**2)
    allowed = np.sqrt(2 * variance * chance / len(ratios)) + most * chance / (3 * len(ratios))
    at = sigma**2 * np.log((most - 1 + q) / q) + 0.5
    beyond = q * norm.sf(at, 1, sigma) + (1 - q - most) * norm.sf(at, 0, sigma)
    return float(ratios.mean() + beyond), float(allowed)


@pytest.mark.slow
def test_a_likelihood_ratio_is_one_on_average_under_the_first_world() -> None:
    """E₀[LR] = 1, whatever the sampling rate; with half of the noise it is far below."""
    epsilon = PoissonGaussian(6 / COUNT, 1.0, LONG).epsilon(1e-3)
    right, half = (
        Trainings(settings(6, like=like, steps=LONG, epsilon=epsilon), "gradient")
        for like in (SoundConfig, HalfNoiseConfig)
    )
    assert right.curve.noise_multiplier == pytest.approx(1.0, abs=0.1)
    mean, allowed = mean_of_ratios(right.steps(0, 30), right.curve, most=6.0)
    assert abs(mean - 1) <= allowed < 0.2
    mean, allowed = mean_of_ratios(half.steps(0, 60), half.curve, most=6.0)
    assert mean < 1 - allowed


def test_no_score_overflows() -> None:
    """A step a thousand deviations away counts a million, not infinity."""
    curve = PoissonGaussian(0.5, 0.01, 3)

    class Far(_Still):
        def contributions(self, inputs: Tensor, labels: Tensor, step: int) -> Gradients:
            return {"weight": torch.zeros(2)}

    for seen, expected in ((100.0, 99.5 / 1e-4 + np.log(0.5)), (-100.0, np.log(0.5))):
        attack = StepAttack(curve, lambda *_: {"weight": torch.tensor([0.25, 0.0])}, (torch.zeros(1), torch.zeros(1)))
        attack.see(0, Far(), {"weight": torch.tensor([seen * 0.25, 7.0])})
        assert attack.total == pytest.approx(expected, rel=1e-6)


class _Still(Trainable):
    """A training of which an attacker needs the unit alone."""

    per_example_bound = 0.25
    optimisers = tasks = parts = after_update = save_private = monitor = None  # type: ignore[assignment]


# The trained model.


def test_the_score_of_a_trained_model_is_its_preference_for_the_canarys_label() -> None:
    logits = torch.randn(5, 1, 10, generator=torch.Generator().manual_seed(0))
    data = stobatch.from_tensors(
        torch.zeros(12, 1, 3, 3), torch.arange(12) % 10, torch.zeros(1, 1, 3, 3), torch.tensor([0])
    )
    replaced, added = (worst_case(data.train, relation) for relation in Neighbours)
    assert final_scores(logits, replaced) == pytest.approx((logits[:, 0, 1] - logits[:, 0, 0]).numpy(), rel=1e-6)
    shares = logits[:, 0].softmax(1)[:, 1].log()
    assert final_scores(logits, added) == pytest.approx(shares.numpy(), rel=1e-5)


# The finding.


def finding(without: Floats, with_: Floats, **changes: Any) -> Any:
    trainings = Trainings(settings(6), "gradient")
    named = {"view": "steps", "canary": "gradient", "confidence": 0.95, "pair": trainings.pair, **changes}
    return many_runs_finding(without, with_, trainings.plan.guarantee, trainings.curve, **named)


def test_a_perfect_attack_refutes_and_a_blind_one_does_not() -> None:
    generator = np.random.default_rng(1)
    refuted = finding(np.full(6000, -1.0), np.full(6000, 1.0))
    assert refuted.verdict is Verdict.REFUTED
    assert "6000 + 6000 models trained on two add-or-remove-one neighbours" in refuted.statement
    assert "where 6 is proved" in refuted.statement
    blind = finding(generator.normal(size=500), generator.normal(size=500))
    assert blind.verdict is Verdict.CONSISTENT
    for found in (refuted, blind):
        assert found.about == "privacy"
        assert found.instrument == "many_runs"
        assert "every noisy step" in found.threat_model
        assert [bound.name for bound in found.details.bounds] == ["clopper_pearson", "poisson_family"]
        assert found.details.records == COUNT
        assert found.confidence == 0.95


def test_a_finding_tells_no_single_score() -> None:
    """Counts in forty bins, whose ends are quantiles of both sides together."""
    generator = np.random.default_rng(2)
    without, with_ = generator.normal(size=700), generator.normal(1, size=700)
    without[0], with_[0] = -np.inf, np.inf
    drawn = histogram(without, with_)
    assert len(drawn.edges) == 41
    assert sum(drawn.without) == sum(drawn.with_) == 700
    assert np.isfinite(drawn.edges).all()
    same = histogram(np.zeros(5), np.zeros(5))
    assert sum(same.without) == 5


def test_findings_of_one_call_share_the_false_alarm_rate(tmp_path: Path) -> None:
    """Three releases are three tests: each is held to a third of the failure probability, and its bound says so."""
    overrides = {"audit.release_trials": 400, "audit.confidence": 0.94}
    config = recipe("audit.published")
    (alone,) = stobatch.audit(
        tmp_path / "one", config=config, quiet=True, seed=1,
        overrides={**overrides, "audit.instruments": ["many_runs"], "audit.trainings": 64},
    ).findings  # fmt: skip
    assert alone.confidence == pytest.approx(0.94)
    findings = stobatch.audit(
        tmp_path / "three", config=config, quiet=True, seed=1, overrides={**overrides, "audit.instruments": ["release"]}
    ).findings
    for finding in findings:
        (bound,) = finding.bounds
        assert finding.confidence == bound.confidence == pytest.approx(0.98)
        assert bound.details.failure_of_each_rate == pytest.approx(0.01)
