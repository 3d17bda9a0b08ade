"""Bounds on ε from one training: how often they err, against exact optima, and what they refuse.

Every simulation has a fixed seed. Had it none, it would raise a false alarm with probability at most 1e-6: bounds that
are too large are counted over repetitions, and refused beyond that quantile of the binomial law of the stated failure.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.special import expit, logit, ndtr, ndtri
from scipy.stats import binom, norm
from support.gaussian_family import GaussianFamily

from stobatch.auditing.lower_bounds import EpsilonBound
from stobatch.auditing.one_run_bounds import (
    DEFAULT_TESTS,
    canaries_needed,
    one_run_bounds,
    require_enough_canaries,
)
from stobatch.auditing.tradeoff_curves import Curve, CurveFamily, PoissonGaussianFamily
from stobatch.dp.accounting import PoissonGaussian, gaussian_epsilon, noise_for
from stobatch.errors import DataError, SettingError

Floats = NDArray[np.float64]
NormalSampler = NDArray[np.bool_]

FALSE_ALARM = 1e-6
DELTA = 1e-5
RATE, STEPS = 0.1, 50


def allowed(repetitions: int, failure: float) -> float:
    return float(binom.isf(FALSE_ALARM, repetitions, failure))


def gaussian_canaries(generator: np.random.Generator, canaries: int, mu: float) -> tuple[Floats, NormalSampler]:
    """Each canary's own coin with noise: μ-GDP."""
    coins = generator.random(canaries) < 0.5
    return mu * coins + generator.normal(0, 1, canaries), coins


def poisson_canaries(generator: np.random.Generator, canaries: int, noise: float) -> tuple[Floats, NormalSampler]:
    """Each canary's own T steps, which take it with probability RATE if it is in; the score is the likelihood ratio."""
    coins = generator.random(canaries) < 0.5
    seen = generator.normal(0, noise, (canaries, STEPS))
    seen += coins[:, None] & (generator.random((canaries, STEPS)) < RATE)
    return np.log(1 - RATE + RATE * np.exp((2 * seen - 1) / (2 * noise**2))).sum(axis=1), coins


def guessed(canaries: int, guesses: int, correct: int) -> tuple[Floats, NormalSampler]:
    """Scores for which so many of the guesses are right; the highest are all included."""
    coins = np.zeros(canaries, dtype=bool)
    coins[-(guesses // 2) :] = True
    coins[: guesses - correct] = True
    rest = np.arange(guesses // 2, canaries - guesses // 2)
    coins[rest[::2]] = True
    return np.arange(canaries, dtype=np.float64), coins


# --- coverage ---


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_randomised_response_is_overrated_as_rarely_as_stated(confidence: float) -> None:
    """ε = 1, and of the half that is guessed each guess is right with just the probability that ε allows: no slack.

    False-alarm rate 1e-6. The twin ignores the confidence: it takes the share of correct guesses for its chance.
    """
    generator = np.random.default_rng(0)
    honest, repetitions, canaries, guesses = expit(1.0), 200, 200, 80
    wrong = twin = 0
    for _ in range(repetitions):
        coins = generator.random(canaries) < 0.5
        answers = np.where(generator.random(canaries) < honest, coins, ~coins).astype(np.float64)
        (bound,) = one_run_bounds(answers, coins, delta=0.0, confidence=confidence, guess_counts=[guesses])
        wrong += bound.epsilon > 1
        twin += float(logit(bound.details.correct_guesses / guesses)) > 1
    assert wrong <= allowed(repetitions, 1 - confidence)
    assert wrong >= repetitions * (1 - confidence) / 4
    assert twin > allowed(repetitions, 0.05)


def test_gaussian_canaries_are_overrated_as_rarely_as_stated() -> None:
    """False-alarm rate 1e-6. The twin takes each guess for a test of its own canary: correct with chance Φ(μ/2)."""
    generator = np.random.default_rng(0)
    truth, repetitions = gaussian_epsilon(1.0, 1, DELTA), 60
    wrong = twin = 0
    found = []
    for _ in range(repetitions):
        canaries = gaussian_canaries(generator, 300, 1.0)
        bounds = one_run_bounds(*canaries, delta=DELTA, confidence=0.8, family=GaussianFamily())
        wrong += any(bound.epsilon > truth for bound in bounds)
        shares = np.array(bounds[1].details.correct_guesses_of_each) / bounds[1].details.guesses_tried
        mu = 2 * float(ndtri(min(shares.max(), 0.999)))
        twin += gaussian_epsilon(1 / mu, 1, DELTA) > truth
        found.append([bound.epsilon for bound in bounds])
    assert wrong <= allowed(repetitions, 0.2)
    assert twin > allowed(repetitions, 0.2)
    any_mechanism, gaussian = np.median(found, axis=0)
    assert 0.5 < any_mechanism < gaussian


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 3.0])
def test_poisson_sampled_canaries_are_overrated_as_rarely_as_stated(epsilon: float) -> None:
    """False-alarm rate 1e-6. The twins: a mechanism with half the noise it claims, and each guess a test of its own."""
    generator = np.random.default_rng(0)
    family, noise, repetitions = PoissonGaussianFamily(RATE, STEPS), noise_for(epsilon, DELTA, RATE, STEPS), 25
    honest = PoissonGaussian(RATE, noise, STEPS)
    wrong = broken = twin = 0
    for _ in range(repetitions):
        bounds, of_broken = (
            one_run_bounds(
                *poisson_canaries(generator, 1000, drawn),
                delta=DELTA, confidence=0.8, guess_counts=[200], family=family,
            )
            for drawn in (noise, noise / 2)
        )  # fmt: skip
        wrong += any(bound.epsilon > epsilon for bound in bounds)
        broken += any(bound.epsilon > epsilon for bound in of_broken)
        error = np.array([1 - bounds[1].details.correct_guesses / 200])
        twin += bool(honest.trade_off(error) > error)
    assert wrong <= allowed(repetitions, 0.2)
    assert broken > allowed(repetitions, 0.2)
    assert twin > allowed(repetitions, 0.2)


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_delta_is_not_mistaken_for_epsilon(confidence: float) -> None:
    """(0, 0.05)-DP: each coin is told with probability 0.05. False-alarm rate 1e-6; the twin ignores δ."""
    generator = np.random.default_rng(0)
    repetitions, found, twin = 100, 0, 0
    for _ in range(repetitions):
        coins = generator.random(400) < 0.5
        told = np.where(generator.random(400) < 0.05, np.where(coins, np.inf, -np.inf), 0.0)
        bounds = [
            one_run_bounds(told, coins, delta=delta, confidence=confidence, guess_counts=[20]) for delta in (0.05, 0.0)
        ]
        found += bounds[0][0].epsilon > 0
        twin += bounds[1][0].epsilon > 0
    assert found <= allowed(repetitions, 1 - confidence)
    assert twin > allowed(repetitions, 1 - confidence)


@pytest.mark.parametrize("family", [GaussianFamily(), PoissonGaussianFamily(0.5, 2)])
def test_the_order_of_equal_scores_betrays_nothing(family: CurveFamily) -> None:
    """Scores without any information, in an order that tells all: a stable sort would guess every coin."""
    coins = np.arange(400) >= 200
    bounds = one_run_bounds(np.zeros(400), coins, delta=DELTA, confidence=0.95, family=family)
    assert [bound.epsilon for bound in bounds] == [0.0, 0.0]


# --- against optima ---


def tangents_of_gaussian(mu: float) -> tuple[Floats, Floats]:
    """Slopes and intercepts of lines that touch 1 - f from above."""
    touch = norm.cdf(np.linspace(-8, 8, 801))
    slope = np.exp(-mu * norm.ppf(touch) - mu**2 / 2)
    return slope, ndtr(norm.ppf(touch) + mu) - slope * touch


def tangents_of_one_step(rate: float, noise: float) -> tuple[Floats, Floats]:
    """The same for one Poisson-sampled step in both directions: TPR <= e^ε FPR + δ(ε) and its mirror, in closed form.

    The best event of either direction cuts the outcome where the likelihood ratio is e^ε, or e^-ε.
    """
    growth = np.exp(np.linspace(0, 12, 801))

    def below(ratio: Floats) -> tuple[Floats, Floats]:
        """The probabilities without and with the record that the likelihood ratio is smaller."""
        with np.errstate(divide="ignore"):
            cut = 0.5 + noise**2 * np.log(np.maximum(ratio - 1 + rate, 0) / rate)
        without = ndtr(cut / noise)
        return without, (1 - rate) * without + rate * ndtr((cut - 1) / noise)

    (without, with_), (mirrored_without, mirrored_with) = below(growth), below(1 / growth)
    delta = np.maximum(1 - with_ - growth * (1 - without), mirrored_without - growth * mirrored_with)
    return np.concatenate((growth, 1 / growth)), np.concatenate((delta, 1 - (1 - delta) / growth))


def most_probable(tangents: tuple[Floats, Floats], canaries: int, guesses: int, correct: int) -> float:
    """The largest P[C >= correct] that the inequalities of f-DP allow, by linear programming over the law of C.

    The concave curve is replaced by many tangents, which lie above it: the optimum is never too small.
    """
    slope, intercept = tangents
    counts = np.arange(guesses + 1)
    rows, limits = [], []
    for count in range(1, guesses + 1):
        rightly = np.where(counts >= count, counts, 0) / canaries
        wrongly = np.where(counts >= count - 1, guesses - counts, 0) / canaries
        rows.append(rightly - slope[:, None] * wrongly)
        limits.append(intercept)
    goal = -(counts >= correct).astype(np.float64)
    found = linprog(
        goal, np.concatenate(rows), np.concatenate(limits), np.ones((1, guesses + 1)), [1.0], method="highs"
    )
    return -float(found.fun)


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct"), [(10, 10, 9), (10, 10, 10), (40, 12, 11), (40, 12, 12), (200, 8, 8)]
)
@pytest.mark.parametrize("mu", [0.2, 0.7])
def test_the_gaussian_bound_is_the_optimum_of_its_inequalities(
    canaries: int, guesses: int, correct: int, mu: float
) -> None:
    """At the confidence that the optimum leaves, the bound is μ itself."""
    failure = most_probable(tangents_of_gaussian(mu), canaries, guesses, correct)
    bounds = one_run_bounds(
        *guessed(canaries, guesses, correct),
        delta=0.01, confidence=1 - 2 * failure, guess_counts=[guesses], family=GaussianFamily(),
    )  # fmt: skip
    assert bounds[1].details.correct_guesses == correct
    assert bounds[1].epsilon == pytest.approx(gaussian_epsilon(1 / mu, 1, 0.01), rel=1e-4)


@pytest.mark.parametrize(("canaries", "guesses", "correct"), [(10, 10, 10), (40, 12, 11), (40, 12, 12)])
@pytest.mark.parametrize(("rate", "noise"), [(0.5, 0.9), (0.2, 0.7)])
def test_the_poisson_bound_is_next_to_the_optimum_of_its_inequalities(
    canaries: int, guesses: int, correct: int, rate: float, noise: float
) -> None:
    """At the confidence that the optimum leaves, the bound is the ε of that noise, less at most 1%. A q of 1 is not it.

    Adding and removing differ here, so the test sees whether the curve is read in the right direction.
    """
    failure = most_probable(tangents_of_one_step(rate, noise), canaries, guesses, correct)
    bounds, twins = (
        one_run_bounds(
            *guessed(canaries, guesses, correct),
            delta=0.01, confidence=1 - 2 * failure, guess_counts=[guesses], family=PoissonGaussianFamily(q, 1),
        )
        for q in (rate, 1.0)
    )  # fmt: skip
    truth = PoissonGaussian(rate, noise, 1).epsilon(0.01)
    assert 0.99 * truth <= bounds[1].epsilon <= truth
    assert not 0.99 * truth <= twins[1].epsilon <= truth


@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize(("canaries", "mu"), [(100, 2.5), (1000, 0.3), (1000, 1.0)])
def test_with_every_record_in_every_step_the_poisson_family_is_the_gaussian(
    canaries: int, mu: float, steps: int
) -> None:
    """Within 1%, and never above: three thousandths are for the accountant, the rest for its grids."""
    scores = gaussian_canaries(np.random.default_rng(1), canaries, mu)
    exact, found = (
        one_run_bounds(*scores, delta=DELTA, confidence=0.95, family=family)[1].epsilon
        for family in (GaussianFamily(), PoissonGaussianFamily(1.0, steps))
    )
    assert exact > 0
    assert 0.99 * exact <= found <= exact


def test_the_poisson_bound_sees_a_third_of_the_leak() -> None:
    """ε = 3 at 1e-5; 1000 canaries of which 200 are guessed show 1 of it in the median over 15 audits."""
    generator = np.random.default_rng(2)
    family, noise = PoissonGaussianFamily(RATE, STEPS), noise_for(3.0, DELTA, RATE, STEPS)
    found = [
        one_run_bounds(
            *poisson_canaries(generator, 1000, noise),
            delta=DELTA, confidence=0.95, guess_counts=[200], family=family,
        )
        for _ in range(15)
    ]  # fmt: skip
    any_mechanism, poisson = np.median([[bound.epsilon for bound in both] for both in found], axis=0)
    assert poisson > 1.0 > any_mechanism


@pytest.mark.parametrize("family", [GaussianFamily(), PoissonGaussianFamily(0.1, 50), PoissonGaussianFamily(1.0, 1)])
def test_no_curve_demands_more_errors_than_guessing_however_small_the_rate(family: CurveFamily) -> None:
    """A curve that took 1 - TPR would see rates below 1e-16 too large, or not at all."""
    demanded: list[Floats] = []
    rates = 10.0 ** -np.arange(0, 19, 0.3)

    def refuted(curve: Curve) -> bool:
        demanded.append(np.array([curve(float(rate)) for rate in rates]))
        return len(demanded) < 4

    family.most_refuted(refuted, DELTA)
    assert len(demanded) > 10
    assert all((found >= 0).all() and (found <= rates * (1 + 1e-9)).all() for found in demanded)


def p_value_by_hand(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The worst F of the theorem, 0 or one value i: by a loop over all i."""
    chance = expit(epsilon)
    tails = [float(binom.sf(correct - i - 1, guesses, chance)) for i in range(canaries + 1)]
    return tails[0] + 2 * canaries * delta * max((tails[i] - tails[0]) / i for i in range(1, canaries + 1))


@pytest.mark.parametrize("delta", [1e-6, 1e-4, 2e-3])
@pytest.mark.parametrize(("canaries", "guesses", "correct"), [(50, 50, 45), (300, 60, 58), (300, 30, 30), (64, 20, 17)])
def test_any_mechanisms_bound_is_where_the_p_value_meets_the_failure(
    canaries: int, guesses: int, correct: int, delta: float
) -> None:
    scores = guessed(canaries, guesses, correct)
    (bound,) = one_run_bounds(*scores, delta=delta, confidence=0.95, guess_counts=[guesses])
    p_value = p_value_by_hand(canaries, guesses, correct, bound.epsilon, delta)
    assert bound.details.correct_guesses == correct
    if bound.epsilon > 0:
        assert p_value == pytest.approx(0.05, rel=1e-6)
        assert p_value <= 0.05
    else:
        assert p_value > 0.05


def test_without_delta_a_perfect_attacker_reaches_the_closed_form() -> None:
    """k right guesses of k: q^k = failure."""
    (bound,) = one_run_bounds(*guessed(100, 100, 100), delta=0.0, confidence=0.95, guess_counts=[100])
    assert bound.epsilon == pytest.approx(float(logit(0.05 ** (1 / 100))), rel=1e-9)


# --- what is tried, and what is written down ---


@pytest.mark.parametrize(
    ("family", "name"), [(GaussianFamily(), "one_run_gaussian"), (PoissonGaussianFamily(0.5, 2), "one_run_poisson")]
)
def test_all_tests_share_the_failure_probability(family: CurveFamily, name: str) -> None:
    scores, coins = gaussian_canaries(np.random.default_rng(0), 1000, 3.0)
    bounds = one_run_bounds(scores, coins, delta=DELTA, confidence=0.95, family=family)
    assert [bound.name for bound in bounds] == ["one_run", name]
    assert bounds[0].assumes == "" != bounds[1].assumes
    for bound in bounds:
        assert bound.details.guesses_tried == (1000, 200, 50)
        assert bound.details.failure_of_each_test == pytest.approx(0.05 / DEFAULT_TESTS)
    guesses = bounds[0].details.guesses
    (alone,) = one_run_bounds(scores, coins, delta=DELTA, confidence=1 - 0.05 / DEFAULT_TESTS, guess_counts=[guesses])
    assert alone.epsilon == pytest.approx(bounds[0].epsilon)
    assert json.loads(json.dumps(bounds[1].to_dict()))["epsilon_at_least"] == bounds[1].epsilon


@pytest.mark.parametrize("family", [GaussianFamily(), PoissonGaussianFamily(RATE, STEPS)])
@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_one_search_finds_the_best_of_a_search_for_each_number_of_guesses(family: CurveFamily, mu: float) -> None:
    scores, coins = gaussian_canaries(np.random.default_rng(0), 1000, mu)

    def found(counts: list[int], confidence: float) -> tuple[EpsilonBound, ...]:
        return one_run_bounds(scores, coins, delta=DELTA, confidence=confidence, guess_counts=counts, family=family)

    counts = [1000, 400, 100]
    alone = [found([guesses], 1 - 0.05 / 3) for guesses in counts]
    for together, each in zip(found(counts, 0.95), zip(*alone, strict=True), strict=True):
        best = max(each, key=lambda bound: bound.epsilon)
        assert together.epsilon == pytest.approx(best.epsilon, rel=1e-9)
        assert together.details.guesses == best.details.guesses
        assert together.details.correct_guesses == best.details.correct_guesses


def test_few_canaries_are_all_guessed() -> None:
    scores, coins = gaussian_canaries(np.random.default_rng(0), 31, 3.0)
    (bound,) = one_run_bounds(scores, coins, delta=0.0, confidence=0.95)
    assert bound.details.guesses_tried == (30, 20, 20)


# --- refusals ---


@pytest.mark.parametrize(
    ("scores", "included"),
    [
        ([0.0, np.nan, 1.0], [True, False, True]),
        ([0.0, 1.0, 2.0], [True, False]),
        ([0.0, 1.0], [0, 2]),
        ([0.0], [True]),
        (np.arange(100), np.ones(100)),
    ],
    ids=["nan", "lengths", "no coin", "one", "unfair"],
)
def test_canaries_that_cannot_be_used_are_refused(scores: Floats, included: NormalSampler) -> None:
    with pytest.raises(DataError):
        one_run_bounds(scores, included, delta=DELTA, confidence=0.95)


@pytest.mark.parametrize("counts", [[], [1], [10, 7]])
def test_numbers_of_guesses_are_checked(counts: list[int]) -> None:
    with pytest.raises(SettingError, match="guess_counts"):
        one_run_bounds(*guessed(6, 6, 6), delta=DELTA, confidence=0.95, guess_counts=counts)


@pytest.mark.parametrize("family", [GaussianFamily(), PoissonGaussianFamily(0.5, 2)])
def test_gaussian_noise_has_no_delta_of_zero(family: CurveFamily) -> None:
    with pytest.raises(SettingError, match="delta=0"):
        one_run_bounds(*guessed(6, 6, 6), delta=0.0, confidence=0.95, family=family)


# --- how many canaries ---


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-4])
@pytest.mark.parametrize("epsilon", [0.0, 0.2, 1.0, 3.0])
def test_fewer_canaries_are_too_few(epsilon: float, delta: float) -> None:
    needed = canaries_needed(epsilon, delta=delta, confidence=0.95)

    def reached(canaries: int) -> float:
        """By the same number of tests, all of which guess every canary."""
        perfect = guessed(canaries, canaries - canaries % 2, canaries - canaries % 2)
        counts = [canaries] * DEFAULT_TESTS
        return one_run_bounds(*perfect, delta=delta, confidence=0.95, guess_counts=counts)[0].epsilon

    assert reached(needed) > epsilon
    assert reached(needed - 1) <= epsilon
    assert reached(needed - 2) <= epsilon


def test_the_search_for_canaries_agrees_with_trying_every_number() -> None:
    for delta, confidence in ((1e-5, 0.95), (5e-4, 0.9), (2e-3, 0.8)):
        for epsilon in (0.5, 1.5, 2.5):
            limit = (1 - confidence) / DEFAULT_TESTS
            enough = (n for n in range(2, 160, 2) if p_value_by_hand(n, n, n, epsilon, delta) < limit)
            if (first := next(enough, None)) is not None:
                assert canaries_needed(epsilon, delta=delta, confidence=confidence) == first
            else:
                with pytest.raises(SettingError, match="no number of canaries"):
                    canaries_needed(epsilon, delta=delta, confidence=confidence)


def test_too_few_canaries_are_refused_with_the_number_needed() -> None:
    require_enough_canaries(100, 3.0, delta=1e-5, confidence=0.95)
    with pytest.raises(SettingError, match=r"99 canaries can never show an epsilon above 3\..*100 canaries"):
        require_enough_canaries(99, 3.0, delta=1e-5, confidence=0.95)
    with pytest.raises(SettingError, match=r"6 canaries can never show an epsilon above 0\..*100 canaries"):
        require_enough_canaries(6, 3.0, delta=1e-5, confidence=0.95)


def test_an_epsilon_that_delta_hides_from_one_training_is_refused() -> None:
    with pytest.raises(SettingError, match="many trainings"):
        require_enough_canaries(10**6, 8.0, delta=1e-5, confidence=0.95)
    assert canaries_needed(8.0, delta=1e-9, confidence=0.95) == pytest.approx(
        math.log(0.05 / DEFAULT_TESTS) / math.log(expit(8.0)), rel=0.01
    )
