"""Bounds on ε from many trainings: how often they err, how tight they are, and what they refuse.

Every simulation has a fixed seed. Had it none, it would raise a false alarm with probability at most 1e-6: bounds that
are too large are counted over repetitions, and refused beyond that quantile of the binomial law of the stated failure.
A confidence of one half leaves the bounds the least slack, so there a mistake shows soonest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom
from support.gaussian_family import GaussianFamily

from stobatch.auditing.lower_bounds import (
    area_under_curve,
    require_enough_trainings,
    trainings_needed,
    two_sided_bounds,
)
from stobatch.auditing.tradeoff_curves import AnyMechanism, Family, PoissonGaussianFamily
from stobatch.dp.accounting import PoissonGaussian, gaussian_epsilon
from stobatch.errors import DataError, SettingError
from stobatch.votes.confidence import clopper_pearson

Floats = NDArray[np.float64]
Sampler = Callable[[np.random.Generator, int], tuple[Floats, Floats]]

FALSE_ALARM = 1e-6
DELTA = 1e-5
RATE, NOISE, STEPS = 0.5, 1.0, 4


def allowed(repetitions: int, failure: float) -> float:
    return float(binom.isf(FALSE_ALARM, repetitions, failure))


def samples(sampler: Sampler, repetitions: int, trainings: int) -> list[tuple[Floats, Floats]]:
    generator = np.random.default_rng(1)
    return [sampler(generator, trainings) for _ in range(repetitions)]


def laplace(generator: np.random.Generator, trainings: int) -> tuple[Floats, Floats]:
    """ε = 1, which every threshold outside of [0, 1] attains."""
    return generator.laplace(0, 1, trainings), generator.laplace(1, 1, trainings)


def randomised_response(generator: np.random.Generator, trainings: int) -> tuple[Floats, Floats]:
    """ε = 1."""
    honest = math.e / (1 + math.e)
    without, with_ = generator.random((2, trainings)) < [[1 - honest], [honest]]
    return without.astype(float), with_.astype(float)


def gaussian(generator: np.random.Generator, trainings: int) -> tuple[Floats, Floats]:
    """μ = 1, at every threshold."""
    return generator.normal(0, 1, trainings), generator.normal(1, 1, trainings)


def poisson_sampled(generator: np.random.Generator, trainings: int) -> tuple[Floats, Floats]:
    """The likelihood ratio of all steps, with and without a record that each step takes with probability RATE."""
    noise = generator.normal(0, NOISE, (2, trainings, STEPS))
    noise[1] += generator.random((trainings, STEPS)) < RATE
    without, with_ = np.log(1 - RATE + RATE * np.exp((2 * noise - 1) / (2 * NOISE**2))).sum(axis=2)
    return without, with_


def gives_away(generator: np.random.Generator, trainings: int) -> tuple[Floats, Floats]:
    """(0, 0.1)-DP: it tells all with probability 0.1, and nothing otherwise."""
    without, with_ = generator.random((2, trainings)) < 0.1
    return np.where(without, -np.inf, 0.0), np.where(with_, np.inf, 0.0)


def on_the_same_half(without: Floats, with_: Floats, family: Family, delta: float, failure: float | None) -> float:
    """A broken twin: it chooses the threshold by the errors that it then counts; without a failure, by bare rates."""
    thresholds = np.unique(np.concatenate((without, with_)))[:, None]
    errors = (without >= thresholds).sum(axis=1), (with_ < thresholds).sum(axis=1)
    fpr, fnr = (
        (wrong + 0.5) / (len(side) + 1) if failure is None else clopper_pearson(wrong, len(side), failure / 2)[1]
        for wrong, side in zip(errors, (without, with_), strict=True)
    )
    best = family.strongest(fpr, fnr, delta)
    return family.epsilon(float(fpr[best]), float(fnr[best]), delta)


# --- coverage ---


@pytest.mark.parametrize("sampler", [laplace, randomised_response], ids=["laplace", "randomised response"])
@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_any_mechanisms_bound_is_too_large_as_rarely_as_stated(sampler: Sampler, confidence: float) -> None:
    """False-alarm rate 1e-6."""
    draws = samples(sampler, 300, 200)
    bounds = [two_sided_bounds(*scores, delta=0.0, confidence=confidence)[0].epsilon for scores in draws]
    assert sum(bound > 1 for bound in bounds) <= allowed(300, 1 - confidence)
    assert np.median(bounds) > 0.2


def test_choosing_and_testing_on_the_same_half_is_caught() -> None:
    """The twin."""
    draws = samples(laplace, 150, 400)
    twins = [on_the_same_half(*scores, AnyMechanism(), 0.0, failure=0.5) for scores in draws]
    assert sum(twin > 1 for twin in twins) > allowed(150, 0.5)


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_delta_is_not_mistaken_for_epsilon(confidence: float) -> None:
    """False-alarm rate 1e-6; the twin ignores δ. What the attacker returns here is infinite."""
    draws = samples(gives_away, 200, 200)

    def found(delta: float) -> int:
        return sum(two_sided_bounds(*scores, delta=delta, confidence=confidence)[0].epsilon > 0 for scores in draws)

    assert found(0.1) <= allowed(200, 1 - confidence)
    assert found(0.0) > allowed(200, 1 - confidence)


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_the_bounds_with_a_gaussian_family_are_too_large_together_as_rarely_as_stated(confidence: float) -> None:
    """False-alarm rate 1e-6."""
    truth = gaussian_epsilon(1.0, 1, DELTA)
    bounds = [
        two_sided_bounds(*scores, delta=DELTA, confidence=confidence, family=GaussianFamily())
        for scores in samples(gaussian, 300, 200)
    ]
    assert sum(any(bound.epsilon > truth for bound in both) for both in bounds) <= allowed(300, 1 - confidence)
    assert np.median([both[1].epsilon for both in bounds]) > 1


def test_a_gaussian_family_on_the_same_half_is_caught() -> None:
    """The twin."""
    draws = samples(gaussian, 100, 400)
    twins = [on_the_same_half(*scores, GaussianFamily(), DELTA, failure=0.5) for scores in draws]
    assert sum(twin > gaussian_epsilon(1.0, 1, DELTA) for twin in twins) > allowed(100, 0.5)


@pytest.mark.slow
def test_the_bounds_with_a_poisson_family_are_too_large_together_as_rarely_as_stated() -> None:
    """False-alarm rate 1e-6; the twin ignores the confidence and uses one half for both.

    The twin is too large every time, where 10 of 12 are allowed, so half of the draws are enough for it.
    """
    truth = PoissonGaussian(RATE, NOISE, STEPS).epsilon(DELTA)
    family = PoissonGaussianFamily(RATE, STEPS)
    draws = samples(poisson_sampled, 24, 200)
    bounds = [two_sided_bounds(*scores, delta=DELTA, confidence=0.8, family=family) for scores in draws]
    assert sum(any(bound.epsilon > truth for bound in both) for both in bounds) <= allowed(24, 0.2)
    assert np.median([both[1].epsilon for both in bounds]) > 1
    twins = [on_the_same_half(*scores, family, DELTA, failure=None) for scores in draws[:12]]
    assert sum(twin > truth for twin in twins) > allowed(12, 0.2)


# --- tightness ---


@pytest.mark.parametrize("held_out", [50, 501])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.01])
def test_a_perfect_attacker_reaches_the_closed_form(held_out: int, delta: float) -> None:
    """0 errors of h: both rates are at most 1 - failure^(1/h)."""
    scores = np.zeros(2 * held_out), np.ones(2 * held_out)
    (bound,) = two_sided_bounds(*scores, delta=delta, confidence=0.95)
    rate = 1 - 0.025 ** (1 / held_out)
    assert bound.epsilon == pytest.approx(math.log((1 - delta - rate) / rate), rel=1e-9)
    assert bound.details.true_positives == bound.details.trials_with == held_out
    assert bound.details.false_positives == 0


def test_two_bounds_share_the_failure_probability() -> None:
    first, second = two_sided_bounds(np.zeros(200), np.ones(200), delta=DELTA, confidence=0.95, family=GaussianFamily())
    rate = 1 - 0.0125 ** (1 / 100)
    assert first.epsilon == pytest.approx(math.log((1 - DELTA - rate) / rate), rel=1e-9)
    assert second.epsilon == pytest.approx(gaussian_epsilon(-0.5 / ndtri(rate), 1, DELTA), rel=1e-9)
    assert first.details.failure_of_each_rate == second.details.failure_of_each_rate == pytest.approx(0.0125)
    assert (first.name, second.name) == ("clopper_pearson", "gaussian_family")
    assert first.assumes == "" != second.assumes


def test_a_family_sees_much_of_a_small_leak() -> None:
    """μ = 0.72 costs ε = 3.00 at 1e-5; 2000 trainings a side show 2 of it in the median over 101 audits."""
    generator = np.random.default_rng(3)
    scores = [(generator.normal(0, 1, 2000), generator.normal(0.72, 1, 2000)) for _ in range(101)]
    found = [two_sided_bounds(*both, delta=DELTA, confidence=0.95, family=GaussianFamily()) for both in scores]
    any_mechanism, family = np.median([[bound.epsilon for bound in both] for both in found], axis=0)
    assert gaussian_epsilon(1 / 0.72, 1, DELTA) == pytest.approx(3.0, abs=0.01)
    assert family > 2.0 > 2 * any_mechanism


def test_the_mirrored_direction_is_found() -> None:
    """A model that betrays D, and never D': guesses of D are surer than those of D'."""
    generator = np.random.default_rng(0)
    without = np.where(generator.random(800) < 0.5, -1.0, 0.0)
    (bound,) = two_sided_bounds(without, np.zeros(800), delta=0.0, confidence=0.95)
    assert bound.details.direction == "without"
    assert bound.epsilon > 3
    (mirrored,) = two_sided_bounds(np.zeros(800), -without, delta=0.0, confidence=0.95)
    assert mirrored.details.direction == "with"
    assert mirrored.epsilon > 3


# --- families ---


@given(fpr=st.floats(1e-6, 1), fnr=st.floats(1e-6, 1), delta=st.sampled_from([1e-8, 1e-5, 1e-2]))
def test_the_gaussian_family_is_the_curve_through_the_pair(fpr: float, fnr: float, delta: float) -> None:
    mu = -float(ndtri(fpr) + ndtri(fnr))
    expected = gaussian_epsilon(1 / mu, 1, delta) if mu > 1e-9 else 0.0
    assert GaussianFamily().epsilon(fpr, fnr, delta) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(fpr=st.floats(1e-9, 1), fnr=st.floats(1e-9, 1), delta=st.floats(0, 0.5))
def test_any_mechanism_takes_the_better_of_both_directions(fpr: float, fnr: float, delta: float) -> None:
    both = [(1 - delta - fnr) / fpr, (1 - delta - fpr) / fnr]
    expected = max(0.0, *(math.log(ratio) for ratio in both if ratio > 0)) if max(both) > 0 else 0.0
    assert AnyMechanism().epsilon(fpr, fnr, delta) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("family", [AnyMechanism(), GaussianFamily(), PoissonGaussianFamily(0.5, 2)])
def test_a_pair_that_guessing_reaches_says_nothing(family: Family) -> None:
    assert family.epsilon(0.4, 0.6, DELTA) == family.epsilon(1.0, 1.0, DELTA) == family.epsilon(0.0, 1.0, DELTA) == 0


def test_without_a_single_error_there_is_no_limit() -> None:
    assert AnyMechanism().epsilon(0.0, 0.5, DELTA) == GaussianFamily().epsilon(0.5, 0.0, DELTA) == math.inf
    most = PoissonGaussian(0.5, 0.1, 1).epsilon(DELTA)
    assert PoissonGaussianFamily(0.5, 1).epsilon(0.0, 0.2, DELTA) == pytest.approx(most, rel=0.01)


@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize("pair", [(0.01, 0.9), (0.2, 0.3), (0.001, 0.3), (0.45, 0.5)])
def test_with_every_record_in_every_step_the_poisson_family_is_the_gaussian(
    pair: tuple[float, float], steps: int
) -> None:
    exact = GaussianFamily().epsilon(*pair, DELTA)
    assert 0.985 * exact <= PoissonGaussianFamily(1.0, steps).epsilon(*pair, DELTA) <= exact


def one_step(rate: float, noise: float, cut: Floats) -> tuple[Floats, Floats]:
    """Both error rates of the best tests of one step, which cut the outcome in two: in closed form."""
    negative = (1 - rate) * ndtr(cut / noise) + rate * ndtr((cut - 1) / noise)
    return ndtr(-cut / noise), negative


@pytest.mark.parametrize("rate", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0])
def test_the_trade_off_of_one_step_lies_below_every_test_and_touches_the_best(rate: float, noise: float) -> None:
    fpr, fnr = one_step(rate, noise, np.linspace(0.5 - 4 * noise, 0.5 + 4 * noise, 1500))
    mechanism = PoissonGaussian(rate, noise, 1)
    for one, other in ((fpr, fnr), (fnr, fpr)):
        assert (mechanism.trade_off(one) <= other).all()
    gap = np.minimum(fnr - mechanism.trade_off(fpr), fpr - mechanism.trade_off(fnr))
    assert gap.min() < 1e-5


@pytest.mark.parametrize("rate", [0.2, 0.9])
def test_the_poisson_family_finds_the_noise_of_one_step(rate: float) -> None:
    truth = PoissonGaussian(rate, 0.7, 1).epsilon(DELTA)
    fpr, fnr = one_step(rate, 0.7, np.linspace(-2, 3, 26))
    family = PoissonGaussianFamily(rate, 1)
    found = [family.epsilon(float(a), float(b), DELTA) for a, b in zip(fpr, fnr, strict=True)]
    assert 0.98 * truth <= max(found) <= truth


def test_an_optimistic_curve_is_caught() -> None:
    """The twin takes the trade-off of twice the noise."""
    fpr, fnr = one_step(0.5, 1.0, np.linspace(-2, 3, 101))
    assert (PoissonGaussian(0.5, 2.0, 1).trade_off(fpr) > fnr).any()


# --- awkward scores ---


@pytest.mark.parametrize("family", [None, GaussianFamily(), PoissonGaussianFamily(0.5, 2)])
@pytest.mark.parametrize(
    ("without", "with_"),
    [
        ([0.0] * 50, [0.0] * 50),
        ([np.inf] * 50, [np.inf] * 50),
        ([1.0, 2.0], [3.0, 4.0]),
        ([1.0, 2.0, 3.0], [4.0, 5.0]),
    ],
    ids=["constant", "infinite", "two", "odd"],
)
def test_scores_that_tell_nothing_give_zero(without: list[float], with_: list[float], family: Family | None) -> None:
    bounds = two_sided_bounds(without, with_, delta=DELTA, confidence=0.95, family=family)
    assert [bound.epsilon for bound in bounds] == [0.0] * (1 if family is None else 2)


@pytest.mark.parametrize(
    ("low", "high"), [(-np.inf, np.inf), (0.0, np.inf), (-np.inf, 0.0), (1.0, np.nextafter(1, 2)), (-1e308, 1e308)]
)
def test_any_two_scores_are_told_apart(low: float, high: float) -> None:
    (bound,) = two_sided_bounds(np.full(100, low), np.full(100, high), delta=0.0, confidence=0.95)
    assert bound.details.false_positives == 0
    assert bound.details.true_positives == 50


def test_a_threshold_lies_between_the_scores_of_a_clear_cut() -> None:
    """Had it been one of the scores, about half of the audits would see an error."""
    generator = np.random.default_rng(0)
    for _ in range(20):
        (bound,) = two_sided_bounds(
            generator.uniform(0, 1, 100), generator.uniform(2, 3, 100), delta=0.0, confidence=0.95
        )
        assert (bound.details.false_positives, bound.details.true_positives) == (0, 50)


def test_a_fixed_threshold_uses_every_training() -> None:
    """Nothing is chosen, so nothing is held back: all trainings are counted."""
    without, with_ = np.array([-1.0] * 90 + [1.0] * 10), np.array([-1.0] * 20 + [1.0] * 80)
    (bound,) = two_sided_bounds(without, with_, delta=0.0, confidence=0.95, threshold=0.0)
    fpr, fnr = beta.ppf(0.975, 11, 90), beta.ppf(0.975, 21, 80)
    assert (bound.details.trials_without, bound.details.false_positives) == (100, 10)
    assert (bound.details.trials_with, bound.details.true_positives) == (100, 80)
    assert bound.epsilon == pytest.approx(math.log((1 - fnr) / fpr))
    assert bound.details.chosen_on == "nothing: fixed beforehand"


@pytest.mark.parametrize(("mean_noise", "too_large"), [(1.0, False), (0.5, True)], ids=["right", "half the noise"])
def test_bounds_at_a_fixed_threshold_cover(mean_noise: float, too_large: bool) -> None:
    """Likelihood ratios of N(0, 1) against N(1, 1): both bounds at once above the truth in at most 20% of 200 audits.

    False alarm: the count is allowed to reach the 1 - 1e-6 quantile of a binomial. The twin has half of the noise.
    """
    truth, repeats, generator = gaussian_epsilon(1.0, 1, DELTA), 200, np.random.default_rng(5)
    allowed = int(binom.isf(1e-6, repeats, 0.2))
    misses = 0
    for _ in range(repeats):
        without, with_ = (generator.normal(mean, mean_noise, 300) - 0.5 for mean in (0.0, 1.0))
        bounds = two_sided_bounds(without, with_, delta=DELTA, confidence=0.8, family=GaussianFamily(), threshold=0.0)
        misses += any(bound.epsilon > truth for bound in bounds)
    assert (misses > allowed) is too_large


def test_an_audit_can_be_repeated_and_written_down() -> None:
    scores = samples(gaussian, 1, 100)[0]
    first, again, other = (
        two_sided_bounds(*scores, delta=DELTA, confidence=0.9, family=GaussianFamily(), split_seed=seed)
        for seed in (0, 0, 1)
    )
    assert first == again
    assert first[0].details != other[0].details
    written = json.loads(json.dumps(first[1].to_dict()))
    assert written["epsilon_at_least"] == first[1].epsilon
    assert "threshold" not in json.dumps(written)


@pytest.mark.parametrize("scores", [[], [1.0], [[1.0, 2.0]], [0.0, np.nan]], ids=["none", "one", "two-d", "nan"])
def test_scores_that_cannot_be_used_are_refused(scores: list[float]) -> None:
    for sides in ((scores, [1.0, 2.0]), ([1.0, 2.0], scores)):
        with pytest.raises(DataError, match=r"shape|not a number"):
            two_sided_bounds(*sides, delta=DELTA, confidence=0.95)


@pytest.mark.parametrize("delta", [-0.1, 1.0, math.nan])
def test_a_delta_that_is_no_probability_is_refused(delta: float) -> None:
    with pytest.raises(SettingError, match="delta"):
        two_sided_bounds([1.0, 2.0], [1.0, 2.0], delta=delta, confidence=0.95)


def test_gaussian_noise_has_no_delta_of_zero() -> None:
    with pytest.raises(SettingError, match="delta=0"):
        two_sided_bounds([1.0, 2.0], [1.0, 2.0], delta=0.0, confidence=0.95, family=GaussianFamily())


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0, math.nan])
def test_a_confidence_that_is_no_probability_is_refused(confidence: float) -> None:
    with pytest.raises(SettingError, match="confidence"):
        two_sided_bounds([1.0, 2.0], [1.0, 2.0], delta=0.0, confidence=confidence)


def test_a_family_checks_its_settings() -> None:
    with pytest.raises(SettingError, match="sampling_rate"):
        PoissonGaussianFamily(1.5, 10)
    with pytest.raises(SettingError, match="steps"):
        PoissonGaussianFamily(0.5, 0)


# --- how many trainings ---


@pytest.mark.parametrize("bounds", [1, 2])
@pytest.mark.parametrize("delta", [1e-5, 0.2])
@pytest.mark.parametrize("epsilon", [0.0, 0.2, 1.0, 3.3])
def test_one_training_less_is_too_few(epsilon: float, delta: float, bounds: int) -> None:
    needed = trainings_needed(epsilon, delta=delta, confidence=0.95, bounds=bounds)
    family = GaussianFamily() if bounds == 2 else None

    def reached(trainings: int) -> float:
        scores = np.zeros(trainings), np.ones(trainings)
        return two_sided_bounds(*scores, delta=delta, confidence=0.95, family=family)[0].epsilon

    assert reached(needed) > epsilon
    assert reached(needed + 1) > epsilon
    assert reached(needed - 1) <= epsilon


def test_too_few_trainings_are_refused_with_the_number_needed() -> None:
    require_enough_trainings(1099, 5.0, delta=1e-5, confidence=0.95)
    with pytest.raises(SettingError, match=r"1098 trials per side can never show an epsilon above 5\..*1099"):
        require_enough_trainings(1098, 5.0, delta=1e-5, confidence=0.95)
    with pytest.raises(SettingError, match=r"10 trials per side can never show an epsilon above 0\..*1099"):
        require_enough_trainings(10, 5.0, delta=1e-5, confidence=0.95)


@pytest.mark.parametrize("epsilon", [-1.0, 101.0, math.inf, math.nan])
def test_an_epsilon_that_no_audit_reaches_is_refused(epsilon: float) -> None:
    with pytest.raises(SettingError, match="reach"):
        trainings_needed(epsilon, delta=0.0, confidence=0.95)


# --- curves ---

SCORES = st.lists(st.sampled_from([-math.inf, 0.0, 1.0, 2.0, 3.0, math.inf]), min_size=1, max_size=12)


@given(without=SCORES, with_=SCORES)
def test_the_area_counts_pairs(without: list[float], with_: list[float]) -> None:
    pairs = [(low < high) + 0.5 * (low == high) for low in without for high in with_]
    assert area_under_curve(without, with_) == pytest.approx(np.mean(pairs))
