"""The same counts give the same bounds as jax-privacy, written by others from the same papers.

Its auditor takes scores and a threshold; scores of 0 and 1 with the threshold 0.5 hand it our counts as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.gaussian_family import GaussianFamily

from stobatch.auditing.lower_bounds import EpsilonBound, two_sided_bounds
from stobatch.auditing.one_run_bounds import one_run_bounds

auditing: Any = pytest.importorskip("jax_privacy.auditing")

DELTA, CONFIDENCE = 1e-5, 0.95
ROOT = 2e-6
"""The root finding of jax-privacy stops within 1e-6."""


def auditor(true_positives: int, positives: int, false_positives: int, negatives: int) -> Any:
    """One that has seen scores of 1 for what is guessed to be in, and 0 for the rest."""

    def scores(ones: int, total: int) -> NDArray[np.float64]:
        return np.repeat([1.0, 0.0], [ones, total - ones])

    return auditing.CanaryScoreAuditor(scores(true_positives, positives), scores(false_positives, negatives))


def many_runs(mu: float, seed: int) -> tuple[EpsilonBound, ...]:
    generator = np.random.default_rng(seed)
    scores = generator.normal(0, 1, 1000), generator.normal(mu, 1, 1000)
    return two_sided_bounds(*scores, delta=DELTA, confidence=CONFIDENCE, family=GaussianFamily())


def of_counts(bound: EpsilonBound) -> Any:
    found = bound.details
    return auditor(found.true_positives, found.trials_with, found.false_positives, found.trials_without)


@pytest.mark.parametrize("mu", [1.0, 2.0, 6.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_clopper_pearson(mu: float, seed: int) -> None:
    bound = many_runs(mu, seed)[0]
    theirs = of_counts(bound).epsilon_clopper_pearson(
        2 * bound.details.failure_of_each_rate,
        delta=DELTA,
        one_sided=False,
        threshold_strategy=auditing.Explicit(0.5),
    )
    assert bound.epsilon == pytest.approx(theirs, rel=1e-9)
    assert bound.epsilon > 0


@pytest.mark.parametrize("mu", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_gaussian_family(mu: float, seed: int) -> None:
    """Theirs pays for three thresholds, of which two guess always the same: three times the failure, then."""
    bound = many_runs(mu, seed)[1]
    theirs = of_counts(bound).epsilon_from_gdp(6 * bound.details.failure_of_each_rate, DELTA)
    assert bound.epsilon == pytest.approx(theirs, rel=1e-9, abs=ROOT)
    assert bound.epsilon > 0


@pytest.mark.parametrize("delta", [1e-7, 1e-5, 1e-4])
@pytest.mark.parametrize(("canaries", "mu"), [(100, 3.0), (400, 1.0), (1000, 2.0)])
def test_one_run(canaries: int, mu: float, delta: float) -> None:
    generator = np.random.default_rng(0)
    coins = generator.random(canaries) < 0.5
    scores = mu * coins + generator.normal(0, 1, canaries)
    bounds = one_run_bounds(scores, coins, delta=delta, confidence=CONFIDENCE, family=GaussianFamily())
    assert len(bounds) == 2
    for bound in bounds:
        found = bound.details
        compared = []
        for guesses, correct in zip(found.guesses_tried, found.correct_guesses_of_each, strict=True):
            rest, wrong = canaries - guesses, guesses - correct
            same = auditor(correct, correct + rest // 2, wrong, wrong + rest - rest // 2)
            measure = same.epsilon_one_run if bound.name == "one_run" else same.epsilon_one_run_fdp
            compared.append(measure(found.failure_of_each_test, delta, threshold_strategy=auditing.Explicit(0.5)))
        assert bound.epsilon == pytest.approx(max(compared), abs=ROOT)
        assert bound.epsilon > 0
