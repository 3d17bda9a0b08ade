"""Membership inference: the scores, the attack against closed forms, and how often intervals and bounds err.

Every simulation has a fixed seed. Had it none, it would raise a false alarm with probability at most 1e-6: errors are
counted over repetitions, and refused beyond that quantile of the binomial law of the stated failure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import binom, norm

from stobatch.auditing.lower_bounds import area_under_curve
from stobatch.auditing.membership import (
    infer,
    largest_refuted,
    likelihood_ratios,
    logit_confidence,
    targets_needed,
)
from stobatch.errors import DataError, SettingError
from stobatch.results import MembershipRates
from stobatch.votes.confidence import clopper_pearson

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Draw = Callable[[np.random.Generator, int, int], Bools]

FALSE_ALARM = 1e-6
DELTA = 1e-5


def allowed(repetitions: int, failure: float) -> float:
    return float(binom.isf(FALSE_ALARM, repetitions, failure))


def coins(generator: np.random.Generator, models: int, examples: int) -> Bools:
    return generator.random((models, examples)) < 0.5


def halves(generator: np.random.Generator, models: int, examples: int) -> Bools:
    return np.argsort(generator.random((models, examples)), axis=1) < examples // 2


def margin_width(targets: int, confidence: float) -> tuple[float, float]:
    """log(2/f) and the last term of the margin for a range of width 1."""
    log_failure = math.log(4 / (1 - confidence))
    return log_failure, 7 * log_failure / (3 * (targets - 1))


# --- scores ---


def exact_confidence(logits: list[float], label: int) -> float:
    """log p - log(1 - p) from the probabilities themselves, with 320 digits: 1 - p may be 1e-260."""
    with localcontext(prec=320):
        weights = [Decimal(logit).exp() for logit in logits]
        probability = weights[label] / sum(weights)
        return float(probability.ln() - (1 - probability).ln())


@given(logits=st.lists(st.floats(-300, 300), min_size=2, max_size=6), data=st.data())
def test_confidence_is_the_exact_logit_of_the_probability(logits: list[float], data: st.DataObject) -> None:
    label = data.draw(st.integers(0, len(logits) - 1))
    expected = exact_confidence(logits, label)
    assert float(logit_confidence(logits, label)) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_confidence_survives_where_probabilities_do_not() -> None:
    """The twin takes the logarithm of a rounded probability: 1 - p is 0 from 40 on."""
    logits, labels = np.array([[1e5, 0.0, -1e5], [40.0, 0.0, 0.0], [-1e300, 1e300, 0.0]]), np.array([0, 0, 0])
    found = logit_confidence(logits, labels)
    assert found.tolist() == pytest.approx([1e5, 40 - math.log(2), -2e300])
    probability = np.exp(40) / (np.exp(40) + 2)
    with np.errstate(divide="ignore"):
        assert np.log(probability) - np.log1p(-probability) == np.inf


def test_confidence_keeps_the_shape_of_the_labels() -> None:
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=(3, 5, 10)), generator.integers(0, 10, (3, 5))
    found = logit_confidence(logits.astype(np.float32), labels)
    assert found.shape == (3, 5)
    assert found.dtype == np.float64
    assert found[1, 2] == pytest.approx(exact_confidence(logits[1, 2].tolist(), int(labels[1, 2])), rel=1e-5)


# --- ratios ---


def slow_ratio(member: Bools, scores: Floats, shadows: list[int], target: int, example: int, pooled: bool) -> float:
    """One ratio by scipy, from the shadows other than the target."""
    others = [model for model in shadows if model != target]
    terms = []
    for kind in (True, False):
        groups = [scores[others, p][member[others, p] == kind] for p in range(scores.shape[1])]
        squares = [((group - group.mean()) ** 2).sum() for group in groups]
        freedom = [len(group) - 1 for group in groups]
        variance = sum(squares) / sum(freedom) if pooled else squares[example] / freedom[example]
        terms.append(norm.logpdf(scores[target, example], groups[example].mean(), math.sqrt(variance)))
    return float(terms[0] - terms[1])


@pytest.mark.parametrize("pooled", [True, False])
def test_ratios_are_those_of_a_slow_loop_that_leaves_the_target_out(pooled: bool) -> None:
    generator = np.random.default_rng(0)
    member = coins(generator, 40, 4)
    scores = generator.normal(50, 1, (40, 4)) * [1, 2, 3, 4] + 2 * member
    shadows, targets = list(range(30)), [0, 7, 29, 30, 39]
    found = likelihood_ratios(member, scores, shadows=shadows, targets=targets, pooled_variance=pooled)
    expected = [[slow_ratio(member, scores, shadows, t, p, pooled) for p in range(4)] for t in targets]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_scores_that_never_vary_are_told_apart_or_tie() -> None:
    member = halves(np.random.default_rng(0), 60, 40)
    apart, same = (
        infer(member, scores, delta=DELTA, confidence=0.95) for scores in (member.astype(float), np.ones(member.shape))
    )
    assert (apart.auroc, same.auroc, same.bounds[0].epsilon) == (1.0, 0.5, 0.0)


# --- closed forms ---


def test_with_many_shadows_the_attack_is_as_good_as_any_can_be() -> None:
    """Two normal laws 1.5 apart have AUROC Φ(1.5/√2) and TPR Φ(1.5 + Φ^-1(FPR)); no attack does better.

    False-alarm rate 1e-6 by a normal tail of the stated spread, plus what 700 shadows of each kind miss. The twin
    does not know how hard each example is: it compares scores as they are.
    """
    generator = np.random.default_rng(0)
    targets, examples, apart = 400, 200, 1.5
    member = coins(generator, 1400 + targets, examples)
    scores = generator.normal(0, 1, member.shape) + apart * member + generator.normal(0, 2, examples)
    result = infer(member, scores, delta=DELTA, confidence=0.95, target_share=targets / len(member))
    assert (result.num_shadows, result.num_targets, result.variance) == (1400, targets, "per_example")
    pairs = targets * examples / 2
    assert result.auroc == pytest.approx(ndtr(apart / math.sqrt(2)), abs=5 * 0.41 / math.sqrt(pairs) + 0.001)
    for name, measured in result.tpr_at.items():
        rate, found = float(name), measured.value
        best = float(ndtr(apart + ndtri(rate)))
        # The threshold's own error: its quantile is of 140 000 scores, and moves the TPR by the ratio of densities.
        slope = float(norm.pdf(apart + ndtri(rate)) / norm.pdf(ndtri(rate)))
        spread = math.sqrt(best * (1 - best) / pairs + slope**2 * rate / 140_000)
        assert found == pytest.approx(best, abs=5 * spread + 0.015 * best)
    twins = [area_under_curve(row[~own], row[own]) for row, own in zip(scores[1400:], member[1400:], strict=True)]
    assert np.mean(twins) < result.auroc - 0.1


def test_a_model_that_memorises_is_caught() -> None:
    """Scores 10σ apart are on the wrong side of the middle with probability 3e-7."""
    generator = np.random.default_rng(0)
    member = coins(generator, 400, 100)
    scores = generator.normal(0, 1, member.shape) + 10 * member + generator.normal(0, 3, 100)
    result = infer(member, scores, delta=DELTA, confidence=0.95)
    assert result.auroc == pytest.approx(1.0, abs=1e-6)
    assert result.tpr_at["0.001"].value > 0.999
    assert result.fpr_at["0.001"].high < 0.01
    assert 2 < result.bounds[0].epsilon < result.bounds[0].details.most_that_could_show


@pytest.mark.parametrize(
    ("revealing", "members", "guessed"), [(1.0, 10, "members"), (0.8, 5, "members"), (0.8, 5, "non-members")]
)
def test_the_bound_is_maurer_and_pontils(revealing: float, members: int, guessed: str) -> None:
    """Some models tell all of one kind and others nothing: X is 0 or 1, Y is 0, and the equation is linear in e^ε."""
    generator = np.random.default_rng(1)
    member = np.argsort(generator.random((600, 20)), axis=1) < members
    tells = generator.random(600) < revealing
    scores = member & tells[:, None] if guessed == "members" else member | ~tells[:, None]
    result = infer(member, scores.astype(float), delta=DELTA, confidence=0.9)
    log_failure, width = margin_width(300, 0.9)
    mean, variance = tells[300:].mean(), tells[300:].var(ddof=1)
    expected = math.log((mean - math.sqrt(2 * variance * log_failure / 300) - DELTA - width) / width)
    assert result.bounds[0].epsilon == pytest.approx(expected, rel=1e-9)
    assert result.bounds[0].details.guessed_rightly == pytest.approx(mean)
    assert result.bounds[0].details.guesses_of == guessed


def test_every_epsilon_below_the_bound_is_refuted_and_none_above() -> None:
    """A slow loop over ε, on rates that rise and fall together, or against each other, or not at all."""
    generator = np.random.default_rng(0)
    common, own = generator.random((2, 1000, 1))
    log_failure, width = margin_width(1000, 0.95)
    for x, y in ((0.3 + 0.7 * common, 0.2 * common), (0.3 + 0.7 * common, 0.2 * (1 - common)), (common, 0.1 * own)):
        for delta in (0.0, 0.05):
            found = float(largest_refuted(x, y, 1000, delta, log_failure)[0][0])
            assert 0.1 < found < 3
            for epsilon in np.arange(0, 4, 0.01):
                values = x - math.exp(epsilon) * y
                margin = math.sqrt(2 * values.var(ddof=1) * log_failure / 1000) + (1 + math.exp(epsilon)) * width
                assert (values.mean() - margin > delta) == (epsilon < found)


def test_with_coins_at_most_half_of_the_examples_are_guessed() -> None:
    """Else X, which is divided by half of the examples, could exceed the 1 that the proof needs."""
    member = coins(np.random.default_rng(0), 200, 40)
    details = infer(member, member.astype(float), delta=DELTA, confidence=0.95).bounds[0].details
    right = (member if details.guesses_of == "members" else ~member)[100:].sum(axis=1)
    assert right.max() > 20
    assert details.guessed_rightly == pytest.approx(np.minimum(right, 20).mean() / 20)
    assert details.guessed_wrongly == 0


def test_the_mirrored_direction_is_found() -> None:
    """A model that betrays non-members, and never members."""
    generator = np.random.default_rng(0)
    member = halves(generator, 600, 40)
    betrayed = ~member & (generator.random(member.shape) < 0.5)
    result = infer(member, -betrayed.astype(float), delta=DELTA, confidence=0.95)
    assert result.bounds[0].details.guesses_of == "non-members"
    assert result.bounds[0].details.guessed_wrongly == 0
    assert result.bounds[0].epsilon > 2


# --- coverage ---


@pytest.mark.slow
def test_no_signal_is_found_where_there_is_none() -> None:
    """Scores know nothing of membership, but share a shift in each model. False-alarm rate 1e-6.

    The twin attacks models with means that they took part in: its 95% intervals miss every time, where 15 of 75 are
    allowed.
    """
    generator, confidences = np.random.default_rng(1), (0.5, 0.95)
    missed, bounded, twins_missed = np.zeros(2), np.zeros(2), 0
    for _ in range(75):
        member = coins(generator, 60, 40)
        scores = generator.normal(0, 1, (60, 1)) + generator.normal(0, 1, (60, 40))
        for index, confidence in enumerate(confidences):
            result = infer(member, scores, delta=DELTA, confidence=confidence)
            low, high = result.auroc_interval
            missed[index] += not low <= 0.5 <= high
            bounded[index] += result.bounds[0].epsilon > 0
        means = [np.where(kind, scores, 0).sum(axis=0) / kind.sum(axis=0) for kind in (member, ~member)]
        ratios = (scores - means[1]) ** 2 - (scores - means[0]) ** 2
        areas = [area_under_curve(row[~own], row[own]) for row, own in zip(ratios, member, strict=True)]
        twins_missed += abs(np.mean(areas) - 0.5) > 1.96 * np.std(areas) / math.sqrt(60)
    for index, confidence in enumerate(confidences):
        assert missed[index] <= allowed(75, 1 - confidence)
        assert bounded[index] <= allowed(75, 1 - confidence)
    assert twins_missed > allowed(75, 0.05)


def targets_that_differ(generator: np.random.Generator, models: int) -> tuple[Bools, Floats]:
    """Each model has its own shift, and memorises as much as it likes."""
    member = coins(generator, models, 40)
    strength, shift = generator.normal(1.5, 0.7, (models, 1)), generator.normal(0, 1, (models, 1))
    return member, generator.normal(0, 1, member.shape) + shift + strength * member


def pairs_as_units(result: MembershipRates, members: int, rate: float) -> tuple[tuple[float, float], ...]:
    """A broken twin: intervals as if every pair of a target and an example were a trial (Hanley and McNeil, 1982)."""
    area = result.auroc
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    variance = (area * (1 - area) + (members - 1) * (first + second - 2 * area**2)) / members**2
    reach = 1.96 * math.sqrt(variance)
    lower, upper = clopper_pearson(np.array([result.tpr_at[f"{rate:g}"].value * members]), members, 0.025)
    return (area - reach, area + reach), (float(lower[0]), float(upper[0]))


@pytest.mark.slow
def test_intervals_cover_what_more_targets_would_show() -> None:
    """Against 4000 more targets of the same shadows. False-alarm rate 1e-6; the twin takes pairs for trials."""
    generator, rate, share = np.random.default_rng(2), 0.1, 25 / 85
    shadows = targets_that_differ(generator, 60)

    def attack(targets: int) -> MembershipRates:
        member, scores = (
            np.concatenate(parts) for parts in zip(shadows, targets_that_differ(generator, targets), strict=True)
        )
        target_share = targets / (targets + 60)
        return infer(
            member, scores, delta=DELTA, confidence=0.95, false_positive_rates=[rate], target_share=target_share
        )

    truth = attack(4000)
    truths = truth.auroc, truth.tpr_at["0.1"].value, truth.fpr_at["0.1"].value
    missed, twins_missed = np.zeros(3), np.zeros(2)
    for _ in range(200):
        result = attack(round(share * 85))
        both = (result.tpr_at["0.1"], result.fpr_at["0.1"])
        intervals = result.auroc_interval, *((measured.low, measured.high) for measured in both)
        missed += [not low <= true <= high for true, (low, high) in zip(truths, intervals, strict=True)]
        twins = pairs_as_units(result, 25 * 20, rate)
        twins_missed += [not low <= true <= high for true, (low, high) in zip(truths[:2], twins, strict=True)]
    assert (missed <= allowed(200, 0.05)).all()
    assert (twins_missed > allowed(200, 0.05)).all()


@pytest.mark.slow
@pytest.mark.parametrize("draw", [coins, halves])
def test_the_bound_never_exceeds_a_known_epsilon(draw: Draw) -> None:
    """Randomised response tells membership with ε = 1. False-alarm rate 1e-6; the twin ignores the confidence."""
    generator, honest = np.random.default_rng(3), math.e / (1 + math.e)
    bounds = []
    for _ in range(60):
        member = draw(generator, 400, 40)
        scores = np.where(generator.random(member.shape) < honest, member, ~member).astype(float)
        bounds.append(infer(member, scores, delta=0.0, confidence=0.95).bounds[0])
    assert sum(bound.epsilon > 1 for bound in bounds) <= allowed(60, 0.05)
    assert np.median([bound.epsilon for bound in bounds]) > 0.3
    twins = [math.log(bound.details.guessed_rightly / bound.details.guessed_wrongly) for bound in bounds]
    assert sum(twin > 1 for twin in twins) > allowed(60, 0.05)


@pytest.mark.slow
def test_targets_that_tell_all_at_once_are_no_epsilon() -> None:
    """(0, 0.6)-DP: a model tells all with probability 0.6, and nothing otherwise. False-alarm rate 1e-6.

    One twin ignores δ. The other takes every guess for a trial, of which there are 400 in each target.
    """
    generator, targets, examples = np.random.default_rng(4), 80, 400
    found, without_delta, pairs = 0, 0, 0
    log_failure = math.log(4 / 0.05)
    for repetition in range(80):
        member = halves(generator, 2 * targets, examples)
        tells = generator.random((2 * targets, 1)) < 0.6
        scores = 5.0 * (member & tells) + generator.normal(0, 0.1, member.shape)
        result = infer(member, scores, delta=0.6, confidence=0.95)
        found += result.bounds[0].epsilon > 0
        if repetition < 20:
            without_delta += infer(member, scores, delta=0.0, confidence=0.95).bounds[0].epsilon > 0
        rightly, wrongly = (getattr(result.bounds[0].details, f"guessed_{how}") for how in ("rightly", "wrongly"))
        trials, variance = targets * examples, 2 * (rightly + wrongly) - (rightly - wrongly) ** 2
        margin = math.sqrt(2 * variance * log_failure / trials) + 7 * 4 * log_failure / (3 * (trials - 1))
        pairs += rightly - wrongly - margin > 0.6
    assert found <= allowed(80, 0.05)
    assert without_delta > allowed(20, 0.05)
    assert pairs > allowed(80, 0.05)


# --- rates, thresholds and the curve ---


def test_thresholds_come_from_the_shadows_and_rates_from_the_targets() -> None:
    """A slow loop, on targets that all score higher than the shadows did: their rates are their own."""
    generator = np.random.default_rng(5)
    member = coins(generator, 80, 50)
    scores = generator.normal(0, 1, member.shape) + member
    scores[40:] += 0.5
    result = infer(member, scores, delta=DELTA, confidence=0.95, false_positive_rates=[0.02, 0.2])
    loo, ratios = (
        likelihood_ratios(member, scores, shadows=range(40), targets=rows, pooled_variance=True)
        for rows in (range(40), range(40, 80))
    )
    negatives = sorted(loo[~member[:40]], reverse=True)
    for rate in (0.02, 0.2):
        threshold = negatives[math.floor(rate * len(negatives))]
        for kind, measured in ((member, result.tpr_at[f"{rate:g}"]), (~member, result.fpr_at[f"{rate:g}"])):
            each = [(row[own] > threshold).mean() for row, own in zip(ratios, kind[40:], strict=True)]
            assert measured.value == pytest.approx(np.mean(each))
            assert measured.low < measured.value < measured.high
    assert result.fpr_at["0.2"].low > 0.2
    with_, without = ratios[member[40:]], ratios[~member[40:]]
    curve = (result.roc.false_positive_rate, result.roc.true_positive_rate)
    assert [len(rates) for rates in curve] == [100, 100]
    for rate, found in zip(*curve, strict=True):
        assert found == pytest.approx(best_rate(without, with_, rate))


def best_rate(without: Floats, with_: Floats, rate: float) -> float:
    """By trying every threshold: the largest true-positive rate whose false-positive rate is at most this."""
    cuts = np.unique(np.concatenate((without, with_)))
    right = [(with_ >= cut).mean() for cut in cuts if (without >= cut).mean() <= rate + 1e-9]
    return float(max(right, default=0.0))


def test_no_success_in_any_target_is_no_proof_of_zero() -> None:
    """Student's interval would have no width."""
    generator = np.random.default_rng(0)
    member = coins(generator, 60, 40)
    scores = generator.normal(0, 1, member.shape)
    scores[:30] *= 100
    measured = infer(member, scores, delta=DELTA, confidence=0.95).tpr_at["0.001"]
    assert (measured.value, measured.low) == (0, 0)
    assert measured.high == pytest.approx(1 - 0.025 ** (1 / member[30:].sum()))


def test_variances_are_per_example_with_enough_shadows() -> None:
    """Noise that differs between examples is worth knowing: pooled, they cost 0.07 of AUROC."""
    generator = np.random.default_rng(0)
    member = coins(generator, 400, 60)
    scores = (generator.normal(0, 1, member.shape) + 1.5 * member) * generator.permutation(np.geomspace(0.01, 100, 60))
    many = infer(member, scores, delta=DELTA, confidence=0.95)
    few = infer(member[:200], scores[:200], delta=DELTA, confidence=0.95)
    assert (many.variance, few.variance) == ("per_example", "pooled")
    assert many.auroc > few.auroc + 0.05


def test_a_result_can_be_repeated_and_written_down() -> None:
    generator = np.random.default_rng(0)
    member = coins(generator, 60, 40)
    scores = generator.normal(0, 1, member.shape) + member
    first, again = (infer(member.astype(int), scores.tolist(), delta=DELTA, confidence=0.9) for _ in range(2))
    assert first == again
    written = json.loads(json.dumps(first.to_dict()))
    assert written["tpr_at"]["0.01"]["value"] == first.tpr_at["0.01"].value
    assert written["bounds"][0]["epsilon_at_least"] == first.bounds[0].epsilon
    assert written["roc"]["false_positive_rate"][-1] == pytest.approx(1)
    assert written["num_shadows"] == written["num_targets"] == 30


# --- refusals ---


def small_world(models: int = 60, examples: int = 40) -> tuple[Bools, Floats]:
    generator = np.random.default_rng(0)
    return coins(generator, models, examples), generator.normal(0, 1, (models, examples))


@pytest.mark.parametrize("epsilon", [0.0, 2.0])
def test_so_many_targets_and_no_fewer_can_show_an_epsilon(epsilon: float) -> None:
    needed = targets_needed(epsilon, delta=DELTA, confidence=0.95)
    member = halves(np.random.default_rng(0), 60 + needed, 40)
    few, enough = (
        infer(rows, rows.astype(float), delta=DELTA, confidence=0.95, target_share=(len(rows) - 60) / len(rows))
        for rows in (member[:-1], member)
    )
    assert few.bounds[0].epsilon <= epsilon < enough.bounds[0].epsilon
    assert enough.bounds[0].details.most_that_could_show == pytest.approx(enough.bounds[0].epsilon)


def test_models_that_share_a_draw_are_refused() -> None:
    """As the paper draws: each example in exactly half of the models, so that one target gives away the others."""
    member, scores = small_world()
    balanced = np.argsort(np.argsort(scores, axis=0), axis=0) < 30
    with pytest.raises(DataError, match=r"more equally often than by chance.*Draw for each model"):
        infer(balanced, scores, delta=DELTA, confidence=0.95)
    unfair = np.random.default_rng(0).random(member.shape) < 0.7
    with pytest.raises(DataError, match="too often or too rarely"):
        infer(unfair, scores, delta=DELTA, confidence=0.95)


@pytest.mark.slow
def test_fair_draws_are_never_refused() -> None:
    """False-alarm rate 1e-6: each of the two checks refuses one fair draw in 1e9."""
    generator = np.random.default_rng(0)
    for draw, models, examples in ((coins, 100, 40), (halves, 100, 40), (halves, 100, 3), (halves, 200, 11)):
        for _ in range(30):
            member = draw(generator, models, examples)
            infer(member, generator.normal(0, 1, member.shape), delta=DELTA, confidence=0.95)


def test_too_few_models_are_refused() -> None:
    member, scores = small_world()
    with pytest.raises(SettingError, match=r"60 models .* leave 3 targets.*at least 80 models"):
        infer(member, scores, delta=DELTA, confidence=0.95, target_share=0.05)
    member[:30, 7] = False
    with pytest.raises(DataError, match=r"example 7 is in 0 of the 30 shadows.*at least 2 .* at least 30 shadows"):
        infer(member, scores, delta=DELTA, confidence=0.95)
    member[:8, 7] = np.arange(8) == 0
    with pytest.raises(DataError, match=r"example 7 is in 1 of the 8 shadows.*at least 18 shadows.*all 40"):
        infer(member[:16], scores[:16], delta=DELTA, confidence=0.95)


def test_a_target_with_all_or_none_is_refused() -> None:
    member, scores = small_world()
    member[45] = True
    with pytest.raises(DataError, match="a target has all of the examples, or none"):
        infer(member, scores, delta=DELTA, confidence=0.95)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"target_share": 1.0}, "target_share=1 is not allowed"),
        ({"false_positive_rates": []}, r"false_positive_rates=\[\] is not allowed"),
        ({"false_positive_rates": [0.1, 1.0]}, r"false_positive_rates=\[0.1, 1.0\] is not allowed"),
        ({"confidence": 1.0}, "confidence=1 is not allowed"),
        ({"delta": 1.0}, "delta=1"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, float], message: str) -> None:
    member, scores = small_world()
    with pytest.raises(SettingError, match=message):
        infer(member, scores, **{"delta": DELTA, "confidence": 0.95, **setting})  # type: ignore[arg-type]


def test_data_that_does_not_fit_is_refused() -> None:
    member, scores = small_world()
    with pytest.raises(DataError, match=r"member has the shape \(60, 39\)"):
        infer(member[:, 1:], scores, delta=DELTA, confidence=0.95)
    scores[3, 3] = np.nan
    with pytest.raises(DataError, match="1 scores are infinite or not a number"):
        infer(member, scores, delta=DELTA, confidence=0.95)
    for logits, labels, message in (
        ([[1.0]], [0], "two classes"),
        ([[1.0, 2.0]], [0, 1], "one label for each row"),
        ([[1.0, 2.0]], [2], "from 0 to 1"),
        ([[1.0, 2.0]], [0.5], "whole numbers"),
        ([[1.0, math.inf]], [0], "1 logits are infinite"),
    ):
        with pytest.raises(DataError, match=message):
            logit_confidence(logits, labels)
