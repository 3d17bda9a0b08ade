"""What the published proof calls private, told apart every time; with noise of its own for each tuple, never.

The published mechanism adds one draw to everything, so the attacks leave no room for luck: all of hundreds of trials.
The twins below draw afresh for every tuple, class or example, at the same scale. Where the noise is so large that
neighbours look alike, an attacker who is right more often than a fair coin by 1e-9 would be a fault of the harness.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import binom
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import stobatch
from stobatch.auditing.releases import pair_of_tuples, release_finding
from stobatch.data import Examples
from stobatch.dp.noise import laplace
from stobatch.errors import DataError
from stobatch.methods import Release, Tuples
from stobatch.models.affine import DenseEncoder
from stobatch.published.losses import reconstruction_gradient
from stobatch.published.plan import PublishedPlan
from stobatch.published.training import EncoderStep, LabelCoefficients, PerturbedInputs, Published
from stobatch.results import Finding
from stobatch.seeds import Seeds
from stobatch.types import Verdict
from stobatch_recipes import audit

FALSE_ALARM = 1e-9
TRIALS = 200


def plan_for(epsilon: float = 0.2) -> PublishedPlan:
    plan = stobatch.plan(audit.published(epsilon))
    assert isinstance(plan, PublishedPlan)
    return plan


def digits(count: int = 40) -> Examples:
    generator = torch.Generator().manual_seed(1)
    return Examples(torch.rand(count, 1, 8, 8, generator=generator) * 2 - 1, torch.arange(count) % 10, 10)


def scores(
    release: Release, trials: int = TRIALS, pair: tuple[Tuples, Tuples] | None = None
) -> list[NDArray[np.float64]]:
    pair = pair or pair_of_tuples(digits())
    root = Seeds.reproducible(11)
    found = [
        [release.score(pair[world], pair, root.child(world, index)) for index in range(trials // 2)] for world in (0, 1)
    ]
    return [np.array(side) for side in found]


def found_by(release: Release, trials: int = TRIALS) -> Finding:
    return release_finding(release, *scores(release, trials), plan_for().guarantee, 0.95)


def lucky(right: int, trials: int) -> bool:
    """Whether a coin is right so often. Sides that are alike but not symmetric vary less than a fair coin."""
    return bool(binom.ppf(FALSE_ALARM / 2, trials, 0.5) <= right <= binom.isf(FALSE_ALARM / 2, trials, 0.5))


@pytest.mark.parametrize("kind", [PerturbedInputs, LabelCoefficients, EncoderStep])
def test_every_release_of_the_published_mechanism_is_told_apart_each_time(kind: type[Release]) -> None:
    found = found_by(kind(plan_for()))  # type: ignore[call-arg]
    assert found.details.right == found.details.trials == TRIALS
    assert found.verdict is Verdict.REFUTED
    assert f"{TRIALS} of {TRIALS} told apart" in found.statement
    assert found.details.claimed_epsilon == pytest.approx(0.2)
    assert found.instrument == "release"
    (bound,) = found.details.bounds
    assert bound.epsilon > 2.5


@pytest.mark.parametrize("epsilon", [0.11, 0.2, 1.0, 10.0])
def test_no_amount_of_shared_noise_hides_a_tuple(epsilon: float) -> None:
    """The claim is about ε; what is told apart does not depend on it."""
    for release in Published().releases(plan_for(epsilon)):
        without, with_ = scores(release, 40)
        assert without.max() < 0 < with_.min(), release.name


def test_the_method_names_the_statements_that_it_refutes() -> None:
    releases = Published().releases(plan_for())
    assert [(release.name, release.source) for release in releases] == [
        ("perturbed inputs", "Lemma 3"),
        ("label coefficients", "Theorem 3"),
        ("a step on θ1", "Theorem 1"),
    ]
    assert all(release.attack for release in releases)


def test_the_other_releases_look_at_what_they_say() -> None:
    """A pair that differs in labels alone shows in the label coefficients, and in nothing made of inputs."""
    first, second = pair_of_tuples(digits())
    labels_only = (first, Tuples(first.inputs, second.labels))
    inputs_only = (first, Tuples(second.inputs, first.labels))
    for release, blind in ((PerturbedInputs(plan_for()), labels_only), (EncoderStep(plan_for()), labels_only)):
        without, with_ = scores(release, 40, blind)
        assert not without.any()
        assert not with_.any()
    assert all(side.all() for side in scores(LabelCoefficients(plan_for()), 40, labels_only))
    # Zero on both sides is no decision, and counts as none.
    nothing = release_finding(
        PerturbedInputs(plan_for()), *scores(PerturbedInputs(plan_for()), 40, labels_only), plan_for().guarantee, 0.95
    )
    assert nothing.details.right == 0
    assert nothing.verdict is Verdict.CONSISTENT
    assert all(side.all() for side in scores(PerturbedInputs(plan_for()), 40, inputs_only))


# Twins with fresh noise.


def further(found: Tensor, first: Tensor, second: Tensor) -> float:
    return float((found - first).norm() - (found - second).norm())


@dataclass(frozen=True)
class InputsWithNoiseOfTheirOwn(Release):
    """x̄ = x + χ with a draw for each tuple."""

    plan: PublishedPlan
    name, source, attack = "fresh inputs", "none", "the difference of two perturbed inputs"

    def score(self, own: Tuples, pair: tuple[Tuples, Tuples], seeds: Seeds) -> float:
        noise = laplace(tuple(own.inputs.shape), self.plan.input_noise_scale, seeds.generator("noise", "input"))
        released = own.inputs + noise
        first, second = (tuples.inputs[-1] - tuples.inputs[0] for tuples in pair)
        return further(released[-1] - released[0], first, second)


@dataclass(frozen=True)
class CoefficientsWithNoiseOfTheirOwn(Release):
    """Σ h y_k + χ with a draw for each class."""

    plan: PublishedPlan
    name, source, attack = "fresh coefficients", "none", "the difference of two classes' coefficients"

    def score(self, own: Tuples, pair: tuple[Tuples, Tuples], seeds: Seeds) -> float:
        size, classes = self.plan.last_hidden_size, self.plan.num_classes
        hidden = torch.rand(len(own.labels), size, generator=torch.Generator().manual_seed(0)) * 2 - 1

        def coefficients(labels: Tensor) -> Tensor:
            return F.one_hot(labels, classes).float().t() @ hidden / self.plan.batch_size

        noise = laplace((classes, size), self.plan.label_noise_scale, seeds.generator("noise", "label"))
        released = coefficients(own.labels) + noise
        one, other = (int(tuples.labels[-1]) for tuples in pair)
        first, second = (coefficients(tuples.labels) for tuples in pair)
        return further(released[other] - released[one], first[other] - first[one], second[other] - second[one])


@dataclass(frozen=True)
class StepWithNoiseOfItsOwn(Release):
    """∇R̄ with a draw for each example: the noise is of full rank."""

    plan: PublishedPlan
    name, source, attack = "fresh step", "none", "a rank test"

    def score(self, own: Tuples, pair: tuple[Tuples, Tuples], seeds: Seeds) -> float:
        shape = tuple(own.inputs.shape)
        encoder = DenseEncoder(shape[1:], 32).double()
        generator = torch.Generator().manual_seed(0)
        encoder.weight.data = torch.randn(encoder.weight.shape, generator=generator, dtype=torch.float64)
        encoder.limit_columns(self.plan.encoder_norm_bound)
        shift = laplace(shape, self.plan.input_noise_scale, seeds.generator("noise", "input")).double()
        with torch.no_grad():
            noisy = own.inputs.double() + shift
            gradient = reconstruction_gradient(encoder, noisy, encoder(noisy))
            first, second = (EncoderStep._second_singular(gradient, encoder, tuples) for tuples in pair)
        return first - second


@pytest.mark.parametrize("kind", [InputsWithNoiseOfTheirOwn, CoefficientsWithNoiseOfTheirOwn, StepWithNoiseOfItsOwn])
def test_with_fresh_noise_the_same_attack_finds_nothing(kind: type[Release]) -> None:
    found = found_by(kind(plan_for()), 600)  # type: ignore[call-arg]
    assert lucky(found.details.right, 600)
    assert found.verdict is Verdict.CONSISTENT
    assert not lucky(600, 600)


def test_the_twins_differ_in_their_noise_alone() -> None:
    """With next to none, every twin is told apart as well: it is the fresh noise that hides the tuple."""
    quiet = plan_for(90.0)
    for twin in (InputsWithNoiseOfTheirOwn(quiet), StepWithNoiseOfItsOwn(quiet)):
        without, with_ = scores(twin, 40)
        assert (without < 0).mean() + (with_ > 0).mean() > 1.5, twin.name


# The pair.


def test_the_pair_differs_in_its_last_tuple() -> None:
    first, second = pair_of_tuples(digits())
    assert len(first.labels) == len(second.labels) == 16
    assert torch.equal(first.inputs[:-1], second.inputs[:-1])
    assert torch.equal(first.labels[:-1], second.labels[:-1])
    assert not torch.equal(first.inputs[-1], second.inputs[-1])
    assert int(second.labels[-1]) == (int(first.labels[-1]) + 1) % 10
    assert len(pair_of_tuples(digits(3))[0].labels) == 3
    with pytest.raises(DataError, match="at least two records"):
        pair_of_tuples(digits(1))
