"""From the scores of an attack on many trainings to lower bounds on ε, with a stated confidence.

Many models are trained on D and on D', which differ in one record; an attacker gives each a score, larger where D'
seems likelier. A threshold turns the scores into guesses with a false-positive rate (D taken for D') and a
false-negative rate. Privacy forbids that both are small, so small ones bound ε from below. Any attacker gives a sound
bound: a weak one only finds less.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from stobatch.auditing.tradeoff_curves import MOST_EPSILON, AnyMechanism, Family, Floats
from stobatch.dp.accounting import check_delta
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.errors import DataError, SettingError
from stobatch.results import BoundCounts, EpsilonBound, Finding, PrivacyDetails
from stobatch.types import Verdict
from stobatch.votes.confidence import clopper_pearson

_CHOOSING_SHARE = 0.1
"""The best of many thresholds is best by luck in part: asked for more confidence, luck wins less often."""
_ROUNDING = 1e-12


def two_sided_bounds(
    without: ArrayLike,
    with_: ArrayLike,
    *,
    delta: float,
    confidence: float,
    family: Family | None = None,
    threshold: float | None = None,
    split_seed: int = 0,
) -> tuple[EpsilonBound, ...]:
    """Return bounds on ε from the scores of independent trainings on D (`without`) and on D' (`with_`).

    A random half of each side chooses a threshold for each bound, the one whose bound would be largest there, computed
    alike but with a tenth of the failure probability. The other half, which the threshold knows nothing of, counts
    the errors, and Clopper-Pearson bounds both rates.

    A `threshold` that was fixed before the trainings needs no choosing: all of them count errors. Scores that are
    log-likelihood ratios have one, 0.

    The first bound holds for any mechanism; a family adds a second. **Guarantee.** Each of the two rates of each of
    the b bounds fails with probability at most (1 - confidence)/2b, so all b hold at once as stated. With a fixed
    threshold all bounds rest on the same two rates, so that b counts once.
    """
    out, in_ = check_scores("without", without, least=2), check_scores("with_", with_, least=2)
    check_request(delta, confidence)
    families: list[Family] = [AnyMechanism()]
    if family is not None:
        check_delta(delta)
        families.append(family)
    if threshold is None:
        failure, generator = (1 - confidence) / (2 * len(families)), np.random.default_rng(split_seed)
        (out_choosing, out_held), (in_choosing, in_held) = _halves(out, generator), _halves(in_, generator)
        cuts = [_choose_threshold(member, out_choosing, in_choosing, delta, failure) for member in families]
    else:
        failure, out_held, in_held, cuts = (1 - confidence) / 2, out, in_, [threshold] * len(families)

    def bound(member: Family, cut: float) -> EpsilonBound:
        false_positives, false_negatives = _errors(out_held, in_held, np.array([cut]))
        fpr = float(_upper_rates(false_positives, len(out_held), failure)[0])
        fnr = float(_upper_rates(false_negatives, len(in_held), failure)[0])
        counts = BoundCounts(
            trainings_without=len(out),
            trainings_with=len(in_),
            trials_without=len(out_held),
            trials_with=len(in_held),
            false_positives=int(false_positives[0]),
            true_positives=len(in_held) - int(false_negatives[0]),
            false_positive_rate=float(false_positives[0]) / len(out_held),
            false_positive_rate_at_most=fpr,
            false_negative_rate=float(false_negatives[0]) / len(in_held),
            false_negative_rate_at_most=fnr,
            failure_of_each_rate=failure,
            chosen_on="the other half of the trainings" if threshold is None else "nothing: fixed beforehand",
            direction="with" if fpr <= fnr else "without",
        )
        return EpsilonBound(
            epsilon=member.epsilon(fpr, fnr, delta),
            delta=delta,
            confidence=confidence,
            name=member.name,
            assumes=member.assumes,
            details=counts,
        )

    return tuple(bound(member, cut) for member, cut in zip(families, cuts, strict=True))


def two_sample_bound(
    without: ArrayLike, with_: ArrayLike, delta: float, confidence: float = 0.95, *, threshold: float | None = None
) -> EpsilonBound:
    """Bound ε from below by many independent trainings of any mechanism, on D (`without`) and on D' (`with_`).

    The scores are an attacker's, larger where the training seems to have been on D'. **Guarantee.** That of
    `two_sided_bounds`: a mechanism that is (ε, δ)-differentially private for D and D' gets a bound above ε with
    probability at most 1 - confidence. A `threshold` has to be fixed before the trainings.

    >>> print(two_sample_bound([0.0] * 500, [1.0] * 500, delta=1e-5))  # the attacker is never wrong
    ε ≥ 4.21 at δ = 1e-05 with 95% confidence
    """
    return two_sided_bounds(without, with_, delta=delta, confidence=confidence, threshold=threshold)[0]


def _choose_threshold(member: Family, without: Floats, with_: Floats, delta: float, failure: float) -> float:
    """Return the threshold that promises this family the largest bound."""
    thresholds = _thresholds(np.concatenate((without, with_)))
    false_positives, false_negatives = _errors(without, with_, thresholds)
    fpr = _upper_rates(false_positives, len(without), _CHOOSING_SHARE * failure)
    fnr = _upper_rates(false_negatives, len(with_), _CHOOSING_SHARE * failure)
    return float(thresholds[member.strongest(fpr, fnr, delta)])


def _halves(scores: Floats, generator: np.random.Generator) -> tuple[Floats, Floats]:
    """Return the half that chooses and the half that tests, which gets the odd one."""
    shuffled, half = generator.permutation(scores), len(scores) // 2
    return shuffled[:half], shuffled[half:]


def _thresholds(scores: Floats) -> Floats:
    """Return every way to cut the scores in two: midpoints, so that new scores fall on the right side.

    "With" is guessed from the threshold on. Where no middle exists, as next to an infinity, the larger score cuts.
    """
    values = np.unique(scores)
    lower, upper = values[:-1], values[1:]
    with np.errstate(invalid="ignore"):
        middle = lower / 2 + upper / 2
    return np.concatenate((values[:1], np.where(middle > lower, middle, upper)))


def _errors(without: Floats, with_: Floats, thresholds: Floats) -> tuple[Floats, Floats]:
    """Return the numbers of false positives and false negatives at each threshold."""
    negatives = [np.searchsorted(np.sort(side), thresholds).astype(np.float64) for side in (without, with_)]
    return len(without) - negatives[0], negatives[1]


def _upper_rates(errors: Floats, trials: int, failure: float) -> Floats:
    return clopper_pearson(errors, trials, failure)[1]


def trainings_needed(epsilon: float, *, delta: float, confidence: float, bounds: int = 1) -> int:
    """Return the trainings per side below which not even a perfect attacker gets `clopper_pearson` above this ε.

    Without an error in h trials both rates are at most u = 1 - failure^(1/h), and log((1 - δ - u)/u) > ε where
    u < (1 - δ)/(1 + e^ε). One training less than h chooses the threshold. `bounds` is how many share the failure
    probability: 2 with a family.

    >>> trainings_needed(0.2, delta=0.0, confidence=0.95), trainings_needed(5.0, delta=1e-5, confidence=0.95)
    (13, 1099)
    """
    check_request(delta, confidence)
    check_epsilon(epsilon)
    rate = (1 - delta) * float(expit(-epsilon))
    failure = (1 - confidence) / (2 * bounds)
    return 2 * (math.floor(math.log(failure) / math.log1p(-rate)) + 1) - 1


def require_enough_trainings(
    trainings: int, epsilon: float, *, delta: float, confidence: float, bounds: int = 1
) -> None:
    """Raise where no outcome of the audit could refute this ε."""
    needed, least = (
        trainings_needed(value, delta=delta, confidence=confidence, bounds=bounds) for value in (epsilon, 0.0)
    )
    if trainings < needed:
        unreached = 0.0 if trainings < least else epsilon
        refuse_too_few(f"{trainings} trials per side", f"{2 * needed} trials, {needed} per side,", unreached, epsilon)


def refuse_too_few(given: str, needed: str, unreached: float, epsilon: float) -> NoReturn:
    raise SettingError(
        f"{given} can never show an epsilon above {unreached:g}.",
        why="Even if the attacker never erred, so few trials could be luck.",
        remedy=f"Use at least {needed} to be able to refute epsilon={epsilon:g}, or lower the confidence.",
    )


def area_under_curve(without: ArrayLike, with_: ArrayLike) -> float:
    """Return the probability that a score of `with_` is above one of `without`, ties counted half.

    >>> area_under_curve([0, 1], [1, 2])
    0.875
    """
    below, above = np.sort(check_scores("without", without)), check_scores("with_", with_)
    ranks = np.searchsorted(below, above, side="left") + np.searchsorted(below, above, side="right")
    return float(ranks.mean() / (2 * len(below)))


def check_scores(name: str, values: ArrayLike, *, least: int = 1) -> Floats:
    """Return one-dimensional scores, which may be infinite and must not be NaN."""
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or len(scores) < least:
        raise DataError(
            f"{name} has the shape {scores.shape}.",
            why="It must be one score for each trial, and enough of them to split." if least > 1 else "",
            remedy=f"Give a flat list of at least {least} scores.",
        )
    if np.isnan(scores).any():
        raise DataError(
            f"{name} has {int(np.isnan(scores).sum())} scores that are not a number.",
            why="They cannot be compared, and leaving them out would bias the rates.",
            remedy="Let the attack score such a model -inf or inf by a rule that does not look at the data.",
        )
    return scores


def check_request(delta: float, confidence: float) -> None:
    """Raise unless the request makes sense. δ may be 0 here: pure differential privacy is a claim like any other."""
    if delta != 0:
        check_delta(delta)
    if not 0 < confidence < 1:
        raise SettingError(
            f"confidence={confidence:g} is not allowed.",
            why="It is the probability with which all bounds hold.",
            remedy="Use a number between 0 and 1, such as 0.95.",
        )


def check_epsilon(epsilon: float) -> None:
    if not 0 <= epsilon <= MOST_EPSILON:
        raise SettingError(
            f"epsilon={epsilon:g} is out of an audit's reach.",
            why="The trials needed grow as e^epsilon.",
            remedy=f"Ask about a number from 0 to {MOST_EPSILON:g}.",
        )


def privacy_finding(
    instrument: str,
    claim: PrivacyGuarantee,
    bounds: tuple[EpsilonBound, ...],
    *,
    tried: str,
    threat_model: str,
    attack: str,
    confidence: float,
    **details: Any,
) -> Finding:
    """Return the finding, refuted where a bound lies above the claim: all bounds hold at once with its confidence."""
    best = max(bounds, key=lambda bound: bound.epsilon)
    return Finding(
        instrument=instrument,
        about="privacy",
        claim=str(claim),
        claim_status=claim.status,
        verdict=Verdict.REFUTED if best.epsilon > claim.epsilon else Verdict.CONSISTENT,
        statement=f"{tried} {best}, where {claim.epsilon:.4g} is {claim.status}",
        threat_model=threat_model,
        attack=attack,
        confidence=confidence,
        details=PrivacyDetails(
            claimed_epsilon=claim.epsilon,
            claimed_delta=claim.delta,
            neighbours=claim.neighbours,
            **details,
            bounds=bounds,
        ),
    )
