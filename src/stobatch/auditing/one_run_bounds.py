"""Lower bounds on ε from a single training, in which a fair coin decides for each of m canaries whether it takes part.

The attacker guesses the coins of the canaries with the highest scores (in) and the lowest (out) and says nothing of
the rest. Privacy limits how many of the guesses can be right. Let the number of guesses be fixed and C count the
right ones.

* **Any mechanism** (Steinke, Nasr and Jagielski, 2023). With δ = 0 each guess is right with probability at most
  e^ε/(1 + e^ε), given any earlier coins, so C is dominated by a binomial W. δ > 0 adds to W a number F of
  guesses that the bound does not cover, with E F <= 2mδ. The worst F is 0 or one value i, which gives
  P[C >= c] <= P[W >= c] + 2mδ max_i P[c - i <= W < c]/i.
* **A known trade-off curve** (Mahloujifar, Melis and Chaudhuri, 2024). Take a canary at random and flip its coin:
  what was "it is guessed rightly and C >= i" becomes "it is guessed wrongly and C >= i - 1". Under f-DP the first has
  probability at most 1 - f of the second's, and as f is convex, Jensen's inequality allows to average.
  `_is_impossible` follows that chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, log_expit

from stobatch.auditing.lower_bounds import check_epsilon, check_request, check_scores, refuse_too_few
from stobatch.auditing.tradeoff_curves import Curve, CurveFamily, most_refuted
from stobatch.dp.accounting import check_delta
from stobatch.errors import DataError, SettingError
from stobatch.results import BoundCounts, EpsilonBound

GUESSED_SHARES = (1.0, 0.2, 0.05)
"""Of the canaries, where no numbers of guesses are given: against little noise many guesses are right, and show most;
against much only the clearest few are, and however many canaries there are, guessing them all shows a third of ε."""
LEAST_GUESSES = 20
DEFAULT_TESTS = 2 * len(GUESSED_SHARES)

Claim = TypeVar("Claim")
"""What guesses may refute: an ε, or a trade-off curve."""

_UNFAIR = 1e-9
_ROUNDING = 1e-9


def one_run_bounds(
    scores: ArrayLike,
    included: ArrayLike,
    *,
    delta: float,
    confidence: float,
    guess_counts: Sequence[int] | None = None,
    family: CurveFamily | None = None,
    tie_seed: int = 0,
) -> tuple[EpsilonBound, ...]:
    """Return bounds on ε from the scores of m canaries, larger where the canary seems to be included.

    Of each number of guesses, fixed beforehand, one half is "in" and one half "out" (an odd one is rounded down).
    Equal scores are put in a random order: in the order given, they could betray the coins.

    **Guarantee.** If the coins are fair and independent, and nothing but the training links them to the scores, all
    bounds hold at once as stated: each pair of a number of guesses and a bound fails with probability at most
    1 - confidence over the number of pairs.
    """
    values = check_scores("scores", scores, least=2)
    coins = _check_coins(included, len(values))
    check_request(delta, confidence)
    if family is not None:
        check_delta(delta)
    counts = _check_counts(guess_counts, len(values))
    ranking = np.lexsort((np.random.default_rng(tie_seed).permutation(len(values)), values))
    correct = [_count_correct(coins[ranking], guesses) for guesses in counts]
    return bounds_of_guesses(
        counts, correct, canaries=len(values), included=int(coins.sum()), delta=delta, confidence=confidence,
        family=family,
    )  # fmt: skip


def one_run_bound(
    scores: ArrayLike,
    included: ArrayLike,
    delta: float,
    confidence: float = 0.95,
    *,
    guess_counts: Sequence[int] | None = None,
) -> EpsilonBound:
    """Bound ε from below by one training of any mechanism, in which fair coins decided which canaries took part.

    `scores` are larger where a canary seems to have taken part, `included` are the coins. **Guarantee.** That of
    `one_run_bounds`: if the coins were fair and independent, and nothing but the training links them to the scores, a
    mechanism that is (ε, δ)-differentially private gets a bound above ε with probability at most 1 - confidence.

    >>> coins = np.arange(400) % 2
    >>> print(one_run_bound(coins, coins, delta=1e-5))  # the attacker is never wrong
    ε ≥ 4.56 at δ = 1e-05 with 95% confidence
    """
    return one_run_bounds(scores, included, delta=delta, confidence=confidence, guess_counts=guess_counts)[0]


def bounds_of_guesses(
    counts: Sequence[int],
    correct: Sequence[int],
    *,
    canaries: int,
    included: int,
    delta: float,
    confidence: float,
    family: CurveFamily | None,
) -> tuple[EpsilonBound, ...]:
    """Return the bounds that numbers of guesses give, with how many of each were right: all that evidence keeps."""
    failure = (1 - confidence) / (len(counts) * (1 if family is None else 2))

    def bound(
        name: str,
        assumes: str,
        search: Callable[[Callable[[Claim], bool]], float],
        impossible: Callable[[Claim, int, int], bool],
    ) -> EpsilonBound:
        """Search once for the most that any number of guesses refutes; a search for each would ask more questions."""
        best = 0

        def refuted(claim: Claim) -> bool:
            nonlocal best
            for test, (guesses, right) in enumerate(zip(counts, correct, strict=True)):
                if impossible(claim, guesses, right):
                    best = test  # the last claim refuted is the one that the search returns
                    return True
            return False

        epsilon = search(refuted)
        behind = BoundCounts(
            canaries=canaries,
            included=included,
            guesses=counts[best],
            correct_guesses=correct[best],
            guesses_tried=tuple(counts),
            correct_guesses_of_each=tuple(correct),
            failure_of_each_test=failure,
        )
        return EpsilonBound(
            epsilon=epsilon, delta=delta, confidence=confidence, name=name, assumes=assumes, details=behind
        )

    def impossible_for_any(epsilon: float, guesses: int, right: int) -> bool:
        return _p_value(canaries, guesses, right, epsilon, delta) < failure

    def impossible_for_curve(curve: Curve, guesses: int, right: int) -> bool:
        return _is_impossible(curve, canaries, guesses, right, failure)

    bounds = [bound("one_run", "", most_refuted, impossible_for_any)]
    if family is not None:
        of_family = partial(family.most_refuted, delta=delta)
        bounds.append(
            bound(f"one_run_{family.name.partition('_')[0]}", family.assumes, of_family, impossible_for_curve)
        )
    return tuple(bounds)


def _count_correct(coins_by_score: NDArray[np.bool_], guesses: int) -> int:
    half = guesses // 2
    return int(coins_by_score[-half:].sum()) + half - int(coins_by_score[:half].sum())


def _p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return the most that (ε, δ)-DP allows for the probability of at least `correct` correct guesses."""
    from scipy.stats import binom

    share = float(expit(epsilon))
    by_luck = float(binom.sf(correct - 1, guesses, share))
    if delta == 0:
        return by_luck
    # Beyond the i where W >= c - i is all but certain, a larger i only divides the same probability.
    furthest = max(1, correct - int(binom.ppf(1e-12, guesses, share)))
    helped = np.arange(1, furthest + 1)
    spread = (binom.sf(correct - helped - 1, guesses, share) - by_luck) / helped
    return by_luck + 2 * canaries * delta * max(0.0, float(spread.max()))


def _is_impossible(curve: Curve, canaries: int, guesses: int, correct: int, failure: float) -> bool:
    """Return whether `correct` guesses or more have a probability below `failure` under a trade-off curve f.

    **Guarantee.** Where the answer is yes, that holds for any mechanism whose own curve lies on or above this one.

    Let R_i and W_i be the probabilities that a random canary is guessed rightly, or wrongly, while C >= i. They grow
    as i falls: P[C = i] = p adds p i/m to R and p (k - i)/m to W. Flipping the canary's coin gives
    R_i <= 1 - f(W_{i-1}), so W_{i-1} >= f(1 - R_i) and P[C = i - 1] with it. Suppose P[C >= c] >= `failure`.
    The least R and W start with that mass all at C = c and take the least mass at each step: more mass at i, or mass
    further up, raises R by at least i/m of what it adds, and the masses saved below are worth less than that. If even
    so the whole, (R_0 + W_0) m/k = P[C >= 0], exceeds 1, the supposition was wrong.
    """
    rightly, wrongly = failure * correct / canaries, failure * (guesses - correct) / canaries
    whole = guesses / canaries * (1 + _ROUNDING)
    for count in range(correct, 0, -1):
        least = curve(rightly / (1 + _ROUNDING))  # less what rounding may have added, and so never above 1
        if least <= wrongly:
            return False  # no mass is needed here, so none below
        # At C = i - 1 a mass p adds p (k - i + 1)/m to W and p (i - 1)/m to R, so R grows with W by their ratio.
        rightly += (least - wrongly) * (count - 1) / (guesses - count + 1)
        wrongly = least
        if rightly + wrongly > whole:
            return True
    return False


def canaries_needed(epsilon: float, *, delta: float, confidence: float, tests: int = DEFAULT_TESTS) -> int:
    """Return the canaries below which not even a perfect attacker gets `one_run` above this ε.

    It guesses all m, rightly. `tests` is how many pairs of a number of guesses and a bound share the failure
    probability. The part of δ in the p-value hardly shrinks with m: from some ε on, no number is enough.

    >>> canaries_needed(0.0, delta=0.0, confidence=0.95), canaries_needed(3.0, delta=1e-5, confidence=0.95)
    (8, 100)
    """
    check_request(delta, confidence)
    check_epsilon(epsilon)
    failure, log_share = (1 - confidence) / tests, float(log_expit(epsilon))
    canaries = _next_even(math.log(failure) / log_share)
    while True:
        # The part of δ grows with m from here on, so what it leaves gives the next m to look at, never one too large.
        part = _p_value(canaries, canaries, canaries, epsilon, delta) - math.exp(canaries * log_share) if delta else 0.0
        if part >= failure:
            raise SettingError(
                f"no number of canaries in one training can show an epsilon above {epsilon:g}.",
                why=f"At delta={delta:g} and a confidence of {confidence:g}, each canary may be given away by delta.",
                remedy="Ask about a smaller epsilon or delta, lower the confidence, or audit with many trainings.",
            )
        enough = _next_even(math.log(failure - part) / log_share)
        if enough <= canaries:
            return canaries
        canaries = enough


def _next_even(number: float) -> int:
    return 2 * (math.floor(number / 2) + 1)


def require_enough_canaries(
    canaries: int, epsilon: float, *, delta: float, confidence: float, tests: int = DEFAULT_TESTS
) -> None:
    """Raise where no outcome of the audit could refute this ε."""
    needed, least = (
        canaries_needed(value, delta=delta, confidence=confidence, tests=tests) for value in (epsilon, 0.0)
    )
    if canaries < needed:
        unreached = 0.0 if canaries < least else epsilon
        refuse_too_few(f"{canaries} canaries", f"{needed} canaries", unreached, epsilon)


def _check_counts(guess_counts: Sequence[int] | None, canaries: int) -> list[int]:
    """Return even numbers of guesses; there are always as many defaults, so that m alone decides what can be shown."""
    if guess_counts is None:
        guess_counts = [max(round(share * canaries), min(canaries, LEAST_GUESSES)) for share in GUESSED_SHARES]
    if not guess_counts or not all(2 <= guesses <= canaries for guesses in guess_counts):
        raise SettingError(
            f"guess_counts={list(guess_counts)} is not allowed.",
            why="Half of the guesses are for the highest scores and half for the lowest.",
            remedy=f"Use one or more numbers from 2 to the {canaries} canaries.",
        )
    return [2 * (int(guesses) // 2) for guesses in guess_counts]


def _check_coins(included: ArrayLike, canaries: int) -> NDArray[np.bool_]:
    from scipy.stats import binom

    coins = np.asarray(included, dtype=np.float64)
    if coins.shape != (canaries,) or not np.isin(coins, (0, 1)).all():
        raise DataError(
            f"included, of shape {coins.shape}, is not one coin for each of the {canaries} canaries with a score.",
            remedy="Give a flat list of true and false, one for each score.",
        )
    heads = int(coins.sum())
    if binom.cdf(min(heads, canaries - heads), canaries, 0.5) < _UNFAIR:
        raise DataError(
            f"{heads} of {canaries} canaries are included.",
            why="The bounds hold for fair and independent coins, and fair ones fall so once in a thousand million.",
            remedy="Toss a fair coin for each canary.",
        )
    return coins.astype(np.bool_)
