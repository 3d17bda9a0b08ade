"""What a search costs, against the definition: exact laws of the best of a random number of runs.

The best of K runs that each say y with distribution function F has the distribution function G(F(y)), G(z) = E z^K. So
δ(ε) of simple mechanisms is a sum or an integral, and the ε that is claimed for a δ must keep it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, dp_event, rdp
from scipy.stats import norm

from stobatch.dp.accounting import RENYI_ORDERS, PoissonGaussian, noise_for
from stobatch.dp.selection import AnyOfDpEvent, RenyiAccountant, RunLaw, Search, budget_of_candidates
from stobatch.errors import SettingError
from stobatch.seeds import Seeds

LAWS = [RunLaw(6.0, math.inf), RunLaw(6.0, 0.0), RunLaw(6.0, 0.5), RunLaw(6.0, 1.0), RunLaw(40.0, 1.0)]
DELTAS = (1e-2, 1e-3, 1e-4)
HARMLESS = PoissonGaussian(1e-6, 1e4, 1)

Claim = Callable[[float], float]
"""ε of a δ."""


def probabilities(law: RunLaw) -> np.ndarray:
    return np.array([p for _, p in zip(range(4000), law.probabilities(), strict=False)])


def generating(law: RunLaw, z: np.ndarray) -> np.ndarray:
    """E z^K."""
    return np.polynomial.polynomial.polyval(z, probabilities(law))


def hockey_stick(one: np.ndarray, other: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(one - math.exp(epsilon) * other, 0).sum())


def best_of_coins(law: RunLaw, heads: float) -> np.ndarray:
    """Return the law of the best of K coins: nothing, tails, heads."""
    none = next(law.probabilities())
    tails = float(generating(law, np.array([1 - heads]))[0]) - none
    return np.array([none, tails, 1 - none - tails])


def require_claim_of_coins(law: RunLaw, pure: float, claim: Claim) -> None:
    heads = math.exp(pure) / (1 + math.exp(pure))
    pair = best_of_coins(law, heads), best_of_coins(law, 1 - heads)
    for delta in DELTAS:
        for one, other in (pair, pair[::-1]):
            assert hockey_stick(one, other, claim(delta)) <= delta * (1 + 1e-9)


def claim_of_coins(law: RunLaw, pure: float, repeated: bool = True) -> Claim:
    """By the accountant, from randomised response of dp-accounting's own."""
    noise = 2 / (1 + math.exp(pure))
    event = AnyOfDpEvent([dp_event.RandomizedResponseDpEvent(noise, 2)])
    accountant = RenyiAccountant(RENYI_ORDERS, NeighboringRelation.REPLACE_ONE)
    accountant.compose(dp_event.RepeatAndSelectDpEvent(event, law.mean, law.shape) if repeated else event)
    return accountant.get_epsilon


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("pure", [0.1, 0.5, 1.0])
def test_the_best_of_many_coins_keeps_its_claim(law: RunLaw, pure: float):
    require_claim_of_coins(law, pure, claim_of_coins(law, pure))


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("pure", [0.1, 0.5, 1.0])
def test_a_claim_for_one_run_alone_is_refuted_by_coins(law: RunLaw, pure: float):
    with pytest.raises(AssertionError):
        require_claim_of_coins(law, pure, claim_of_coins(law, pure, repeated=False))


def best_score(law: RunLaw, noise: float, count: float, edges: np.ndarray) -> np.ndarray:
    """Return the law of the best of K noisy counts in cells, nothing included: processing that only loses a little."""
    below = generating(law, norm.cdf((edges - count) / noise))
    return np.diff(np.concatenate([[0.0, next(law.probabilities())], below, [1.0]]))


def require_claim_of_scores(law: RunLaw, noise: float, claim: Claim) -> None:
    edges = np.linspace(-8 * noise, 8 * noise + 1, 20_001)
    pair = best_score(law, noise, 0.0, edges), best_score(law, noise, 1.0, edges)
    for delta in DELTAS:
        for one, other in (pair, pair[::-1]):
            assert hockey_stick(one, other, claim(delta)) <= delta * (1 + 1e-6)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("noise", [1.0, 4.0])
def test_the_best_noisy_score_keeps_the_claim_of_a_search(law: RunLaw, noise: float):
    require_claim_of_scores(law, noise, Search((HARMLESS,), noise, law).epsilon)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("noise", [1.0, 4.0])
def test_a_claim_for_one_score_alone_is_refuted(law: RunLaw, noise: float):
    from stobatch.dp.accounting import gaussian_epsilon

    with pytest.raises(AssertionError):
        require_claim_of_scores(law, noise, lambda delta: gaussian_epsilon(noise, 1, delta))


def test_of_one_kind_of_candidate_the_event_is_that_of_dp_accounting():
    training, law = PoissonGaussian(0.07, 10.0, 400), RunLaw(5.0, 0.5)
    accountant = rdp.RdpAccountant(RENYI_ORDERS)
    accountant.compose(dp_event.RepeatAndSelectDpEvent(training.event, law.mean, law.shape))
    search = Search((training,), 1e3, law)  # a score so noisy that the training decides at every order
    assert search.epsilon(1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)


def test_of_several_kinds_every_candidate_is_covered():
    quiet, loud = PoissonGaussian(0.07, 10.0, 400), PoissonGaussian(0.01, 1.0, 200)
    law = RunLaw(5.0, math.inf)
    both = Search((quiet, loud), 10.0, law).epsilon(1e-5)
    assert both >= max(Search((one,), 10.0, law).epsilon(1e-5) for one in (quiet, loud))
    assert Search((quiet,), 0.5, law).epsilon(1e-5) > Search((quiet,), 10.0, law).epsilon(1e-5)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_laws_are_laws_with_their_mean(law: RunLaw):
    found = probabilities(law)
    assert found.sum() == pytest.approx(1, abs=1e-9)
    assert (found * np.arange(len(found))).sum() == pytest.approx(law.mean, rel=1e-6)


def require_law(law: RunLaw, draw: Callable[[int], int]) -> None:
    """Dvoretzky, Kiefer and Wolfowitz: draws of the law fail with probability 1e-9 at most."""
    count = 4000
    drawn = np.bincount([draw(number) for number in range(count)], minlength=200)
    off = np.abs(drawn.cumsum()[:200] / count - probabilities(law).cumsum()[:200]).max()
    assert off <= math.sqrt(math.log(2 / 1e-9) / (2 * count))


@pytest.mark.parametrize("law", LAWS[:4], ids=str)
def test_numbers_of_candidates_have_their_law(law: RunLaw):
    seeds = Seeds.secret()
    require_law(law, lambda number: law.draw(seeds.stream("number", number)))


@pytest.mark.parametrize("law", LAWS[:4], ids=str)
def test_a_number_that_is_always_the_mean_is_caught(law: RunLaw):
    with pytest.raises(AssertionError):
        require_law(law, lambda number: round(law.mean))


def test_the_budget_of_candidates_is_the_largest_within_the_target():
    law, trainings = RunLaw(5.0, math.inf), [(0.07, 400), (0.04, 800)]
    own = budget_of_candidates(1.0, 1e-5, trainings, 10.0, law)

    def whole(epsilon: float) -> float:
        found = tuple(PoissonGaussian(q, noise_for(epsilon, 1e-5, q, steps), steps) for q, steps in trainings)
        return Search(found, 10.0, law).epsilon(1e-5)

    assert whole(own) <= 1.0 < whole(1.01 * own)


def test_what_cannot_be_searched_is_refused():
    with pytest.raises(SettingError, match="nothing to choose from"):
        RunLaw(1.0, math.inf)
    with pytest.raises(SettingError, match="scores of a search alone cost"):
        budget_of_candidates(0.1, 1e-5, [(0.07, 400)], 1.0, RunLaw(5.0, math.inf))
    search = Search((HARMLESS,), 10.0, RunLaw(5.0, 1.0))
    with pytest.raises(SettingError, match="too small for a search"):
        search.epsilon(1e-12)
    with pytest.raises(SettingError, match="score_noise=0 is not allowed"):
        replace(search, score_noise=0.0)
