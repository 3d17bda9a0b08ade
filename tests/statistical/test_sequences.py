"""Bounds that hold at every look: they miss as rarely as they say however often one looks, and stopping saves draws.

Coverage over time is computed exactly, by following the law of the number of successes draw by draw, so there is no
chance of a false alarm. Tests with random draws state theirs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.special import xlogy
from scipy.stats import binom, norm

from stobatch.votes.confidence import (
    LOOK_EVERY,
    clopper_pearson,
    draw_until_decided,
    log_wealth,
    lower_sequence,
    rules_out,
)

Floats = NDArray[np.float64]
Rejects = Callable[[Floats, int], NDArray[np.bool_]]
MEANS = (0.03, 0.3, 0.5, 0.8, 0.97, 0.999)


def chance_of_ever_rejecting(rejects: Rejects, mean: float, looks: list[int]) -> float:
    """Exactly: the law of the successes among those who were not rejected yet, carried from look to look."""
    law, drawn, rejected = np.ones(1), 0, 0.0
    for look in looks:
        law = np.convolve(law, binom.pmf(np.arange(look - drawn + 1), look - drawn, mean))
        drawn = look
        out = rejects(np.arange(look + 1, dtype=np.float64), look)
        rejected += float(law[out].sum())
        law = np.where(out, 0.0, law)
    return rejected


EVERY_DRAW = list(range(1, 501))
GEOMETRIC = [int(50 * 1.25**k) for k in range(22)]


@pytest.mark.parametrize("failure", [0.001, 0.05, 0.5])
@pytest.mark.parametrize("mean", MEANS)
def test_the_true_mean_is_ever_ruled_out_as_rarely_as_stated(mean: float, failure: float) -> None:
    for looks in (EVERY_DRAW, GEOMETRIC):
        ever = chance_of_ever_rejecting(lambda won, n: rules_out(won, n, mean, failure), mean, looks)
        assert ever <= failure


@pytest.mark.parametrize("mean", MEANS)
def test_the_same_holds_for_too_large_a_mean(mean: float) -> None:
    ever = chance_of_ever_rejecting(lambda won, n: rules_out(n - won, n, 1 - mean, 0.05), mean, GEOMETRIC[:12])
    assert ever <= 0.05


def test_a_smaller_mean_is_ruled_out_even_more_rarely() -> None:
    chances = [
        chance_of_ever_rejecting(lambda won, n: rules_out(won, n, 0.9, 0.05), mean, GEOMETRIC)
        for mean in (0.8, 0.85, 0.9)
    ]
    assert chances == sorted(chances)


def test_not_much_is_wasted() -> None:
    """Over 500 looks the exact chance is a sizeable part of what is allowed."""
    assert chance_of_ever_rejecting(lambda won, n: rules_out(won, n, 0.8, 0.05), 0.8, EVERY_DRAW) > 0.25 * 0.05


@pytest.mark.parametrize("looks", [EVERY_DRAW, GEOMETRIC], ids=["every draw", "geometric"])
@pytest.mark.parametrize("mean", [0.5, 0.8, 0.97])
def test_peeking_with_a_bound_for_one_look_is_caught(looks: list[int], mean: float) -> None:
    """The broken twin: Clopper-Pearson at every look."""
    ever = chance_of_ever_rejecting(lambda won, n: clopper_pearson(won, n, 0.05)[0] > mean, mean, looks)
    assert ever > 2 * 0.05


def test_stakes_that_do_not_add_up_to_one_are_caught() -> None:
    """Another twin: forgetting to divide by the mass above p, that is, staking more than one owns."""
    owned = 20

    def rejects(won: Floats, n: int) -> NDArray[np.bool_]:
        return log_wealth(won, n, 0.97) + np.log(owned) >= np.log(1 / 0.05)

    assert chance_of_ever_rejecting(rejects, 0.97, EVERY_DRAW) > 0.05


@pytest.mark.parametrize(
    ("won", "n", "p"), [(8, 10, 0.5), (97, 100, 0.9), (30, 100, 0.25), (0, 7, 0.2), (50, 50, 0.99)]
)
def test_the_closed_form_is_the_integral(won: int, n: int, p: float) -> None:
    lost = n - won

    def bet(u: float) -> float:
        """q = 1 - (1-p)u², which has the law of the stakes for uniform u."""
        q = 1 - (1 - p) * u**2
        return float(np.exp(xlogy(won, q / p) + xlogy(lost, (1 - q) / (1 - p))))

    expected = quad(bet, 0, 1, epsabs=0, epsrel=1e-10)[0]
    assert float(log_wealth(won, n, p)) == pytest.approx(np.log(expected), abs=1e-7)


def test_a_success_never_lowers_the_wealth() -> None:
    for p in (0.2, 0.6, 0.99):
        won, n = np.meshgrid(np.arange(60.0), np.arange(60.0, 120.0))
        assert (log_wealth(won + 1, n + 1, p) >= log_wealth(won, n, p) - 1e-8).all()


@pytest.mark.parametrize("failure", [0.001, 0.05, 0.5, 0.9])
def test_what_is_ruled_out_is_everything_up_to_the_bound(failure: float) -> None:
    grid = np.linspace(1e-4, 1 - 1e-4, 5001)
    for n in (1, 5, 100, 3000):
        for won in {0, 1, n // 2, n - n // 10, n - 1, n}:
            out = rules_out(won, n, grid, failure) & (won > 0)
            bound = float(lower_sequence(won, n, failure))
            assert not out[grid > bound + 1e-9].any()
            assert out[grid < bound - 1e-9].all()


def test_bounds_are_ordered_and_grow_with_the_successes() -> None:
    for n in (1, 30, 1000):
        won = np.arange(n + 1, dtype=np.float64)
        lower = lower_sequence(won, n, 0.01)
        assert ((lower >= 0) & (lower <= won / n)).all()
        assert (np.diff(lower) >= 0).all()
        assert (lower <= clopper_pearson(won, n, 0.01)[0] + 1e-12).all()


def test_no_draws_prove_nothing() -> None:
    assert float(lower_sequence(0, 0, 0.01)) == 0


@pytest.mark.parametrize("n", [1000, 100_000])
def test_unanimous_votes_cost_little_more_than_with_a_fixed_sample(n: int) -> None:
    fixed = 1 - float(clopper_pearson(np.array([float(n)]), n, 0.001)[0][0])
    assert 1 - float(lower_sequence(n, n, 0.001)) < 1.2 * fixed


class NormalSampler:
    """Draws for trials of known success probability."""

    def __init__(self, means: Floats, seed: int) -> None:
        self.means, self.random = means, np.random.default_rng(seed)

    def __call__(self, which: NDArray[np.int64], more: int) -> Floats:
        return self.random.binomial(more, self.means[which]).astype(np.float64)


def radii_in_deviations(*sizes: float) -> Floats:
    return np.asarray(norm.cdf(sizes), dtype=np.float64)


@pytest.mark.parametrize("gap", [0.0, 0.02])
def test_settling_rarely_claims_what_is_not_so(gap: float) -> None:
    """The hardest mean is the needed one itself.

    4000 trials; the alarm sounds beyond the 1e-9 quantile of a binomial law with the stated failure probability.
    """
    trials, failure, needed = 4000, 0.05, np.array([0.7, 0.8])
    for mean in (0.7 - gap, 0.8 - gap):
        lower, _ = draw_until_decided(NormalSampler(np.full(trials, mean), 0), trials, needed, 2000, failure)
        assert (lower > mean + 1e-12).sum() <= binom.isf(1e-9, trials, failure)
        assert (lower[:, None] >= needed[needed > mean]).any(1).sum() <= binom.isf(1e-9, trials, failure)


def test_settling_by_peeking_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the test above, with Clopper-Pearson at every look; the same alarm has to sound."""
    trials, failure, needed = 4000, 0.05, np.array([0.7])

    def peek(won: Floats, n: int, mean: Floats, failure: float) -> NDArray[np.bool_]:
        return clopper_pearson(np.asarray(won), n, failure)[0] >= mean

    monkeypatch.setattr("stobatch.votes.confidence.rules_out", peek)
    monkeypatch.setattr("stobatch.votes.confidence.lower_sequence", lambda won, n, failure: np.zeros(len(won)))
    lower, _ = draw_until_decided(NormalSampler(np.full(trials, 0.7), 0), trials, needed, 2000, failure)
    assert (lower >= 0.7).sum() > binom.isf(1e-9, trials, failure)


def test_clear_cases_are_decided_as_with_a_fixed_sample() -> None:
    """Means at least 0.3 deviations away from every needed one, decided at failure probability 1e-9.

    A wrong decision has probability at most 1e-9 per needed mean and trial by the guarantee, and no decision within
    10,000 draws less than that (the gap is more than 13 standard errors): false alarm below 1e-5.
    """
    needed = radii_in_deviations(0.5, 1.0, 1.5)
    means = np.repeat(norm.cdf([0.0, 0.2, 0.8, 1.2, 1.85, 2.5, 3.5]), 100)
    means = means[np.abs(norm.ppf(means)[:, None] - [0.5, 1.0, 1.5]).min(1) >= 0.3]
    lower, used = draw_until_decided(NormalSampler(means, 1), len(means), needed, 10_000, 1e-9)
    fixed, _ = clopper_pearson(NormalSampler(means, 2)(np.arange(len(means)), 10_000), 10_000, 1e-9)
    decided, expected = lower[:, None] >= needed, means[:, None] >= needed
    assert (decided == expected).all()
    assert (decided == (fixed[:, None] >= needed)).all()
    assert used.max() <= 10_000


@pytest.mark.parametrize(("most", "saving"), [(10_000, 3.0), (100_000, 6.0)])
def test_stopping_saves_draws_on_inputs_as_they_come(most: int, saving: float) -> None:
    """Margins |N(2.2, 1.2²)| in deviations: most inputs are clear, some are close, as on MNIST; three radii asked.

    The mean of 2000 independent shares in [0, 1] is off by 0.08 with probability below 1e-11 (Hoeffding); about 1/4.6
    and 1/12 are found, further than that from the limits. About 6 of 2000 inputs lie where the two procedures differ;
    more than 40 do with probability below 1e-15 (Poisson).
    """
    means = norm.cdf(np.abs(np.random.default_rng(3).normal(2.2, 1.2, 2000)))
    needed = radii_in_deviations(0.5, 1.0, 1.5)
    lower, used = draw_until_decided(NormalSampler(means, 4), len(means), needed, most, 0.001)
    fixed, _ = clopper_pearson(NormalSampler(means, 5)(np.arange(len(means)), most), most, 0.001)
    selection = 100
    assert (most + selection) / (used.mean() + selection) > saving
    assert np.abs((lower[:, None] >= needed).mean(0) - (fixed[:, None] >= needed).mean(0)).max() < 0.02


def test_what_cannot_be_proved_any_more_is_given_up_at_once() -> None:
    """A needed mean that even unanimous votes do not prove within the draws costs one look."""
    lower, used = draw_until_decided(NormalSampler(np.ones(3), 0), 3, np.array([0.9999]), 1000, 0.001)
    assert (used == LOOK_EVERY).all()
    assert (lower < 0.9999).all()


def test_a_proof_once_made_stays_made() -> None:
    """The bound never falls below a needed mean that was proved at an earlier look."""

    def lucky_then_not(which: NDArray[np.int64], more: int) -> Floats:
        lucky_then_not.calls += 1  # type: ignore[attr-defined]
        return np.full(len(which), float(more) if lucky_then_not.calls == 1 else 0.6 * more)  # type: ignore[attr-defined]

    lucky_then_not.calls = 0  # type: ignore[attr-defined]
    lower, used = draw_until_decided(lucky_then_not, 1, np.array([0.85, 0.95]), 5000, 0.001)
    assert used[0] > LOOK_EVERY
    assert lower[0] >= 0.85
