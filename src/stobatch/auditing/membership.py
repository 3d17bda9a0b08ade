"""Who was in the training set? Membership inference with shadow models, by likelihood ratio.

Many models are trained, each on its own random part of the same examples. The first of them, the shadows, show for
each example how confident a model is in its label with and without having trained on it. The others, the targets, are
attacked: which of the two normal laws explains the target's confidence better?

The targets are the independent unit. One target's guesses share its training, so that they err together: a thousand
examples of one target are not a thousand trials.

**Paper.** Carlini, Chien, Nasr, Song, Terzis, Tramèr: Membership inference attacks from first principles (2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import exp
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp
from scipy.stats import binom, chi2
from scipy.stats import t as student

from stobatch.auditing.lower_bounds import area_under_curve, check_epsilon, check_request
from stobatch.auditing.subject import Audited
from stobatch.auditing.tradeoff_curves import MOST_EPSILON
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.errors import DataError, SettingError
from stobatch.files import Columns
from stobatch.methods import method_of
from stobatch.progress import Tick
from stobatch.results import BoundCounts, EpsilonBound, Finding, MembershipDetails, MembershipRates, Rate, Roc
from stobatch.training.loop import OneByOne
from stobatch.types import Neighbours, Status, Verdict
from stobatch.votes.confidence import clopper_pearson

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Indices = NDArray[np.int64]
Measured = tuple[float, float, float]
"""A rate and its interval: value, low, high."""

ENOUGH_FOR_OWN_VARIANCE = 64
"""Shadows of each kind from which on an example has its own variances."""
LEAST_TARGETS = 4
"""Fewer say nothing of how much targets differ."""

_LEAST_POOLED, _LEAST_OWN = 2, 3
"""Shadows of each kind that an example needs, so that one can be left out of its mean, or of its variance as well."""
_LEAST_VARIANCE = 1e-12
"""Scores that never vary would make every other score infinitely unlikely."""
_CURVE_POINTS = 100
_DIRECTIONS = 2
_BISECTIONS = 60
_UNBELIEVABLE = 1e-9
_ROUNDING = 1e-12


def logit_confidence(logits: ArrayLike, labels: ArrayLike) -> Floats:
    """Return log p - log(1 - p) for the probability p that softmax gives to the label; over models it is about normal.

    It is the label's logit less the log-sum-exp of the others, so that no p is ever rounded to 0 or 1.

    >>> logit_confidence([[0.0, 0.0, 0.0], [1000.0, 0.0, -1000.0]], [2, 0]).round(4).tolist()
    [-0.6931, 1000.0]
    """
    values, classes = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    if values.ndim < 1 or values.shape[-1] < 2 or classes.shape != values.shape[:-1]:
        raise DataError(
            f"logits have the shape {values.shape} and labels {classes.shape}.",
            remedy="Give logits [..., classes] of two classes or more, and one label for each row of them.",
        )
    if not np.issubdtype(classes.dtype, np.integer) or ((classes < 0) | (classes >= values.shape[-1])).any():
        raise DataError(
            f"labels are not all classes of the {values.shape[-1]} logits.",
            remedy=f"Use whole numbers from 0 to {values.shape[-1] - 1}.",
        )
    if not np.isfinite(values).all():
        raise DataError(
            f"{int((~np.isfinite(values)).sum())} logits are infinite or not a number.",
            why="Such a confidence cannot be compared with others.",
            remedy="Count the logits of a model that diverged as 0; to leave it out may tell who its members were.",
        )
    is_label = np.arange(values.shape[-1]) == classes[..., None]
    own = np.take_along_axis(values, classes[..., None], axis=-1)[..., 0]
    return np.asarray(own - logsumexp(np.where(is_label, -np.inf, values), axis=-1))


def likelihood_ratios(
    member: ArrayLike, scores: ArrayLike, *, shadows: ArrayLike, targets: ArrayLike, pooled_variance: bool
) -> Floats:
    """Return log N(score; with the example) - log N(score; without it), for each target and example.

    Means are per example, over the shadows of either kind; variances too, unless pooled over the examples. A target
    that is itself a shadow is left out of what it is compared with, so that shadows attacked by shadows behave like
    targets. Nothing here looks at whether a target has the example, but to leave it out.

    >>> member, scores = [[True], [False]] * 2 + [[True]], [[3.0], [0.0], [5.0], [2.0], [4.0]]
    >>> likelihood_ratios(member, scores, shadows=range(4), targets=[4], pooled_variance=True).tolist()
    [[2.25]]
    """
    is_member, values = _check_models(member, scores)
    rows, attacked = np.asarray(shadows, dtype=np.int64), np.asarray(targets, dtype=np.int64)
    _require_both_kinds(is_member[rows], _LEAST_POOLED if pooled_variance else _LEAST_OWN)
    is_shadow = np.isin(attacked, rows)[:, None]
    ratios = np.zeros((len(attacked), values.shape[1]))
    for kind, sign in ((is_member, 1), (~is_member, -1)):
        mean, variance = _moments(
            kind[rows], values[rows], values[attacked], is_shadow & kind[attacked], pooled_variance
        )
        ratios -= sign * (np.log(variance) + (values[attacked] - mean) ** 2 / variance) / 2
    return ratios


def _moments(kind: Bools, scores: Floats, attacked: Floats, own: Bools, pooled: bool) -> tuple[Floats, Floats]:
    """Return mean and variance of one kind of shadows per target and example, without the target's `own` score."""
    count = kind.sum(axis=0)
    mean = np.where(kind, scores, 0).sum(axis=0) / count
    squares = np.where(kind, (scores - mean) ** 2, 0).sum(axis=0)
    away, left = np.where(own, attacked - mean, 0), count - own
    squares_left, freedom = squares - away**2 * count / left, left - 1
    if pooled:
        squares_left = squares_left.sum(axis=1, keepdims=True)
        freedom = freedom.sum(axis=1, keepdims=True)
    return mean - away / left, np.maximum(squares_left / np.maximum(freedom, 1), _LEAST_VARIANCE)


def infer(
    member: ArrayLike,
    scores: ArrayLike,
    *,
    delta: float,
    confidence: float,
    false_positive_rates: Sequence[float] = (0.001, 0.01, 0.1),
    target_share: float = 0.5,
) -> MembershipRates:
    """Attack the last models, the targets, with what the first ones show, and bound ε by how well it went.

    `member` [models, examples] says which model trained on which example, `scores` how confident it is in the label
    (`logit_confidence`). Every model must be trained with its own randomness, and draw its own members: by a fair
    coin for each example, or as a uniformly random set of the same size for all. The ε bounded is that for adding or
    removing a record with coins, and that for replacing a record with sets of one size. Only some of the examples need
    be scored: a part of random halves is treated as coins are, and the ε is that for replacing.

    All thresholds come from the shadows alone, each of which is attacked by the others. So, given the shadows, what
    happens to one target is independent of the other targets and has the same law.

    **Guarantee.** The bound returned exceeds the ε of an (ε, δ)-private training with probability at most
    1 - confidence, however dependent the examples of one target are, and however the training works otherwise.

    *Proof.* Fix the shadows and an example p. Let A_p say that p is guessed to be a member: a function of the trained
    model. Given M_p = 1, drop p from the members, or with sets of one size replace it by a random non-member: the
    members then have the law that they have given M_p = 0, and one record has changed. So
    P[A_p | M_p = 1] <= e^ε P[A_p | M_p = 0] + δ. Each of P examples is a member with probability q. For
    X = Σ M_p A_p / qP and Y = Σ (1 - M_p) A_p / (1 - q)P, the mean over p gives E[X - e^ε Y] <= δ. Both lie in [0, 1]:
    with sets of one size they are the target's true- and false-positive rates; with coins at most half of the examples
    are guessed, those with the largest ratios. Maurer and Pontil (2009, theorem 4) bound the mean of T independent
    values in a range of width W: with probability at least 1 - f it is above
    average - √(2 V log(2/f) / T) - 7 W log(2/f) / (3 (T - 1)), with V the sample variance. For X - e^ε Y the width is
    1 + e^ε. An ε is refuted where this is above δ, and then so is every smaller one (`largest_refuted`). So the largest
    refuted one exceeds the true ε only if that is refuted, which happens with probability f. The mirrored guess, of
    non-members, is a second such test, and f = (1 - confidence)/2. ∎
    """
    is_member, values = _check_models(member, scores)
    check_request(delta, confidence)
    if not false_positive_rates or not all(0 < rate < 1 for rate in false_positive_rates):
        raise SettingError(
            f"false_positive_rates={list(false_positive_rates)} is not allowed.",
            remedy="Use one or more numbers between 0 and 1, such as 0.01.",
        )
    num_shadows, num_targets = _split(len(values), target_share)
    of_shadow, of_target = is_member[:num_shadows], is_member[num_shadows:]
    _require_both_kinds(of_shadow, _LEAST_POOLED)
    share, most_guesses = _sampling_scheme(is_member)
    if of_target.all(axis=1).any() or not of_target.any(axis=1).all():
        raise DataError(
            "a target has all of the examples, or none.",
            why="It has no true-positive rate, or no false-positive rate.",
            remedy=f"Score more than {is_member.shape[1]} examples: with 40 of them this never happens.",
        )
    kinds = of_shadow.sum(axis=0)
    pooled = bool(min(kinds.min(), num_shadows - kinds.max()) < ENOUGH_FOR_OWN_VARIANCE)
    shadows, targets = np.split(np.arange(len(values)), [num_shadows])
    choosing, ratios = (
        likelihood_ratios(is_member, values, shadows=shadows, targets=rows, pooled_variance=pooled)
        for rows in (shadows, targets)
    )
    cuts = _cuts(choosing[~of_shadow], np.array(false_positive_rates))
    right, wrong = _count_guesses(ratios, of_target, cuts)
    areas = np.array([area_under_curve(row[~own], row[own]) for row, own in zip(ratios, of_target, strict=True)])
    auroc, low, high = _mean_over_targets(areas, confidence)
    bounds = [
        _epsilon_bound(
            (sign * choosing, of_shadow == positive),
            (sign * ratios, of_target == positive),
            share if positive else 1 - share,
            most_guesses,
            delta,
            confidence,
            "members" if positive else "non-members",
        )
        for positive, sign in ((True, 1), (False, -1))
    ]
    return MembershipRates(
        auroc=auroc,
        auroc_interval=(low, high),
        tpr_at=_rates(false_positive_rates, right, of_target.sum(axis=1), confidence),
        fpr_at=_rates(false_positive_rates, wrong, (~of_target).sum(axis=1), confidence),
        variance="pooled" if pooled else "per_example",
        confidence=confidence,
        num_shadows=num_shadows,
        num_targets=num_targets,
        num_examples=values.shape[1],
        roc=_curve(ratios[~of_target], ratios[of_target]),
        bounds=(max(bounds, key=lambda bound: bound.epsilon),),
    )


def targets_needed(epsilon: float, *, delta: float, confidence: float) -> int:
    """Return the targets below which not even a perfect attacker gets the bound above this ε.

    It has X = 1 and Y = 0 always, so that only the last term of the margin is left: it must be below 1 - δ.

    >>> targets_needed(0.0, delta=1e-5, confidence=0.95), targets_needed(3.0, delta=1e-5, confidence=0.95)
    (22, 217)
    """
    check_request(delta, confidence)
    check_epsilon(epsilon)
    return math.floor(7 * _log_failure(confidence) * (1 + math.exp(epsilon)) / (3 * (1 - delta))) + 2


def _log_failure(confidence: float) -> float:
    """Return log(2/f) of the proof."""
    return math.log(2 * _DIRECTIONS / (1 - confidence))


def _epsilon_bound(
    choosing: tuple[Floats, Bools],
    held: tuple[Floats, Bools],
    share: float,
    most_guesses: int,
    delta: float,
    confidence: float,
    guessed: str,
) -> EpsilonBound:
    """Return the bound in one direction, at the threshold that would give the largest one on the shadows."""
    num_targets, num_examples = held[0].shape
    log_failure = _log_failure(confidence)

    def averages(part: tuple[Floats, Bools], cuts: Floats) -> tuple[Floats, Floats]:
        right, wrong = _count_guesses(*part, cuts, most_guesses)
        return right / (share * num_examples), wrong / ((1 - share) * num_examples)

    ratios, positive = choosing
    low_errors = np.geomspace(1 / ratios.size, 1, _CURVE_POINTS)
    # Either error may be the one to avoid. Where the two kinds lie apart, a cut at the lowest of its own avoids both.
    cuts = np.unique(np.concatenate((_cuts(ratios[~positive], low_errors), -_cuts(-ratios[positive], low_errors))))
    epsilons, surplus = largest_refuted(*averages(choosing, cuts), num_targets, delta, log_failure)
    best = np.lexsort((surplus, epsilons))[-1]
    x, y = averages(held, cuts[best : best + 1])
    epsilon = float(largest_refuted(x, y, num_targets, delta, log_failure)[0][0])
    counts = BoundCounts(
        targets=num_targets,
        guesses_of=guessed,
        guessed_rightly=float(x.mean()),
        guessed_wrongly=float(y.mean()),
        most_that_could_show=_most_epsilon(num_targets, delta, log_failure),
        failure_of_each_direction=(1 - confidence) / _DIRECTIONS,
    )
    return EpsilonBound(
        epsilon=epsilon, delta=delta, confidence=confidence, name="membership", assumes="", details=counts
    )


def largest_refuted(x: Floats, y: Floats, num_targets: int, delta: float, log_failure: float) -> tuple[Floats, Floats]:
    """Return, for each column, the ε up to which all are refuted, and by how much X - e^ε Y is above δ at ε = 0.

    The bound on the mean falls as u = e^ε grows, so bisection finds where it crosses δ. Indeed its slope is at most
    -mean(Y) + √(2 L var(Y) / T) - 7 L / (3 (T - 1)) with L = log(2/f). As var(Y) <= mean(Y) T / (T - 1), the square
    root is at most mean(Y) + L / (2 (T - 1)), less than the two others. With other rows than the targets' own, it is a
    forecast of what this number of targets will show.
    """
    width = 7 * log_failure / (3 * (num_targets - 1))
    mean_x, mean_y = x.mean(axis=0), y.mean(axis=0)
    var_x, var_y = x.var(axis=0, ddof=1), y.var(axis=0, ddof=1)
    covariance = ((x - mean_x) * (y - mean_y)).sum(axis=0) / (len(x) - 1)

    def surplus(u: Floats) -> Floats:
        variance = np.maximum(var_x - 2 * u * covariance + u**2 * var_y, 0)
        margin = np.sqrt(2 * variance * log_failure / num_targets) + (1 + u) * width
        return np.asarray(mean_x - u * mean_y - margin - delta)

    at_zero = surplus(np.ones_like(mean_x))
    low, high = np.zeros_like(mean_x), np.full_like(mean_x, max(-math.log(width), 0.0))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        refuted = surplus(np.exp(middle)) > 0
        low, high = np.where(refuted, middle, low), np.where(refuted, high, middle)
    return low, at_zero


def _most_epsilon(num_targets: int, delta: float, log_failure: float) -> float:
    perfect = np.ones((2, 1)), np.zeros((2, 1))
    return float(largest_refuted(*perfect, num_targets, delta, log_failure)[0][0])


def _cuts(negatives: Floats, rates: Floats) -> Floats:
    """Return the lowest thresholds that at most these shares of the scores are above; -∞ is for all."""
    falling = np.append(np.sort(negatives)[::-1], -np.inf)
    return np.asarray(falling[np.floor(rates * len(negatives) * (1 + _ROUNDING)).astype(np.int64)])


def _count_guesses(ratios: Floats, positive: Bools, cuts: Floats, most: int | None = None) -> tuple[Floats, Floats]:
    """Count right and wrong guesses of each row above each threshold, at most those with the `most` largest ratios."""
    right, guesses = np.empty((len(ratios), len(cuts))), np.empty((len(ratios), len(cuts)))
    for index, (row, own) in enumerate(zip(ratios, positive, strict=True)):
        order = np.argsort(-row, kind="stable")  # ties by position, which knows nothing of membership
        count = np.searchsorted(-row[order], -cuts, side="left")
        count = np.minimum(count, len(row) if most is None else most)
        right[index] = np.append(0, np.cumsum(own[order]))[count]
        guesses[index] = count
    return right, guesses - right


def _mean_over_targets(values: Floats, confidence: float) -> Measured:
    mean = float(values.mean())
    reach = float(student.ppf((1 + confidence) / 2, len(values) - 1)) * float(values.std(ddof=1)) / len(values) ** 0.5
    return mean, max(mean - reach, 0.0), min(mean + reach, 1.0)


def _rates(rates: Sequence[float], counts: Floats, totals: Indices, confidence: float) -> dict[str, Rate]:
    """Return the mean of each target's rate.

    Its interval is no narrower than that of as many independent pairs: rare guesses may be right in no target at all,
    and no spread over targets is no proof of 0.
    """
    measured = {}
    for rate, column in zip(rates, counts.T, strict=True):
        mean, low, high = _mean_over_targets(column / totals, confidence)
        lower, upper = clopper_pearson(column.sum(keepdims=True), int(totals.sum()), (1 - confidence) / 2)
        low, high = min(low, float(lower[0])), max(high, float(upper[0]))
        measured[f"{rate:g}"] = Rate(value=mean, low=low, high=high)
    return measured


def _curve(negatives: Floats, positives: Floats) -> Roc:
    rates = np.geomspace(1 / len(negatives), 1, _CURVE_POINTS)
    above = len(positives) - np.searchsorted(np.sort(positives), _cuts(negatives, rates), side="right")
    hits = (above / len(positives)).tolist()
    return Roc(false_positive_rate=tuple(rates.tolist()), true_positive_rate=tuple(hits))


def _check_models(member: ArrayLike, scores: ArrayLike) -> tuple[Bools, Floats]:
    flags, values = np.asarray(member), np.asarray(scores, dtype=np.float64)
    if values.ndim != 2 or not values.size or flags.shape != values.shape or not np.isin(flags, (0, 1)).all():
        raise DataError(
            f"member has the shape {flags.shape} and scores {values.shape}.",
            remedy="Give a true or false and a score for each model (row) and example (column).",
        )
    if not np.isfinite(values).all():
        raise DataError(
            f"{int((~np.isfinite(values)).sum())} scores are infinite or not a number.",
            why="No normal law explains them.",
            remedy="Score a model that diverged 0 everywhere; to leave it out may tell who its members were.",
        )
    return flags.astype(np.bool_), values


def _split(models: int, target_share: float) -> tuple[int, int]:
    if not 0 < target_share < 1:
        raise SettingError(
            f"target_share={target_share:g} is not allowed.",
            why="Some models show what membership looks like, and others are attacked.",
            remedy="Use a number between 0 and 1, such as 0.5.",
        )
    num_targets = round(target_share * models)
    if num_targets < LEAST_TARGETS:
        raise SettingError(
            f"{models} models with target_share={target_share:g} leave {num_targets} targets.",
            why="Targets are the independent trials, and so few say nothing of how much they differ.",
            remedy=f"Use at least {math.ceil(LEAST_TARGETS / target_share)} models, for {LEAST_TARGETS} targets.",
        )
    return models - num_targets, num_targets


def _sampling_scheme(member: Bools) -> tuple[float, int]:
    """Return the probability of being a member, and how many of a target's examples may be guessed."""
    models, examples = member.shape
    sizes = member.sum(axis=1)
    one_size = bool((sizes == sizes[0]).all()) and 0 < sizes[0] < examples
    share = float(sizes[0]) / examples if one_size else 0.5
    # Sets of one size have one degree of freedom less: all examples together are members a fixed number of times.
    freedom = examples - one_size
    away, spread = np.abs(member.sum(axis=0) - share * models), share * (1 - share) * models * examples / freedom
    if chi2.sf((away**2).sum() / spread, freedom) < _UNBELIEVABLE:
        _raise_sampling("Some examples are members too often or too rarely for chance.")
    # Half a count more makes the law of the counts continuous.
    if chi2.cdf(((away + 0.5) ** 2).sum() / spread, freedom) < _UNBELIEVABLE:
        _raise_sampling(
            "Examples are members more equally often than by chance, so the models' draws are not independent."
        )
    return share, examples if one_size else examples // 2


def _raise_sampling(what: str) -> NoReturn:
    raise DataError(
        what,
        why="The bound on epsilon holds for targets whose members are drawn independently of the other models.",
        remedy="Draw for each model a fair coin for each example, or one uniformly random half of the examples.",
    )


def _require_both_kinds(member: Bools, least: int) -> None:
    """Raise unless every example has enough shadows of both kinds to estimate their laws from."""
    shadows, examples = member.shape
    with_it = member.sum(axis=0)
    rarer = np.minimum(with_it, shadows - with_it)
    if rarer.min() >= least:
        return
    enough = max(shadows, 2 * least)
    while 2 * examples * binom.cdf(least - 1, enough, 0.5) > 0.01:
        enough += 1
    raise DataError(
        f"example {int(rarer.argmin())} is in {int(with_it[rarer.argmin()])} of the {shadows} shadows.",
        why=f"Its scores with and without it are learnt from at least {least} shadows of each kind.",
        remedy=f"Use at least {enough} shadows, each with a random half of the examples: "
        f"then all {examples} have that many, 99 times in 100.",
    )


def membership_finding(
    member: NDArray[np.bool_], scores: NDArray[np.float64], claim: PrivacyGuarantee, confidence: float
) -> Finding:
    """Return the finding from which model was trained on which record, and how sure each is of each.

    Models are trained on halves of one size, so the bound is for replacing a record. A claim for adding or removing
    one is one for replacing it with 2ε and (1 + e^ε)δ: one record is removed, then another added.
    """
    epsilon, delta = claim.epsilon, claim.delta
    if claim.status is Status.NONE:
        epsilon, delta = float("inf"), 0.0
    elif claim.neighbours is Neighbours.ADD_REMOVE:
        epsilon, delta = 2 * epsilon, (1 + exp(epsilon)) * delta
    result = infer(member, scores, delta=delta, confidence=confidence)
    (low, high), (bound,) = result.auroc_interval, result.bounds
    rates = ", ".join(
        f"{measured.value:.2%} at a false-positive rate of {rate}" for rate, measured in result.tpr_at.items()
    )
    against, needed, powerless = "nothing is claimed", None, "nothing is claimed"
    if claim.status is not Status.NONE:
        needed = targets_needed(min(epsilon, MOST_EPSILON), delta=delta, confidence=confidence)
        too_few = result.num_targets < needed
        powerless = f"fewer than {needed} attacked models can never refute it" if too_few else ""
        reach = f", which fewer than {needed} attacked models can never refute" if too_few else ""
        against = f"{epsilon:.4g} is {claim.status} for replacing one{reach}"
    refuted = bound.epsilon > epsilon
    return Finding(
        instrument="membership",
        about="privacy",
        claim=str(claim),
        claim_status=claim.status,
        verdict=Verdict.REFUTED if refuted else Verdict.NOT_TESTED if powerless else Verdict.CONSISTENT,
        statement=f"members are told from others with an AUROC of {result.auroc:.3f} ({low:.3f} to {high:.3f}); true "
        f"positives: {rates}; {bound}, where {against}",
        threat_model="the attacker queries the trained model, and trains models of its own on records like these",
        attack=f"likelihood ratio with {result.num_shadows} shadow models on {result.num_targets} others",
        confidence=confidence,
        details=MembershipDetails(
            **dict(result),
            claimed_epsilon=None if claim.status is Status.NONE else epsilon,
            claimed_delta=delta,
            targets_needed=needed,
            could_not_refute=None if refuted else powerless or None,
            neighbours=Neighbours.REPLACE_ONE,
        ),
    )


def of_membership(audited: Audited) -> list[Finding]:
    """Train shadow models on random halves of the training data; bound ε by the likelihood ratios of membership."""
    settings, pool = audited.settings, audited.data().train.in_memory()
    if pool.groups is not None:
        raise SettingError(
            "membership is about single records, and the claim is about persons.",
            why="Its shadow models are trained on random halves of the records, which cut persons in two.",
            remedy="Audit with many_runs or one_run: their canaries are persons.",
        )
    half = len(pool) // 2
    if half < 2:
        raise DataError(f"{len(pool)} records have no halves to train on.", remedy="Raise data.train_limit.")
    plan = audited.plan_for(half)

    def rows_of(start: int, count: int, tick: Tick) -> Columns:
        seeds = [audited.root.child("membership", index) for index in range(start, start + count)]
        members = torch.stack([torch.randperm(len(pool), generator=each.generator("half"))[:half] for each in seeds])
        networks = [audited.fresh_network(each) for each in seeds]
        models = method_of(audited.config).stack(audited.config, plan, networks, pool, members, seeds) or OneByOne(
            audited.config,
            (audited.fresh(plan, pool.take(own), each) for own, each in zip(members, seeds, strict=True)),
            count,
        )
        models.train(tick)
        logits = models.logits(pool.inputs).numpy()
        scores = logit_confidence(logits, pool.labels.expand(count, -1).numpy())
        within = torch.zeros(count, len(pool), dtype=torch.bool).scatter_(1, members, True)
        return {"member": within.tolist(), "score": scores.tolist()}

    identity = [settings.models_at_once, pool.fingerprint()]
    table = audited.table("membership", identity, settings.shadow_models, settings.models_at_once, rows_of)
    member, score = np.asarray(table["member"]), np.asarray(table["score"])
    return [membership_finding(member, score, audited.claim, audited.confidence)]
