"""ε of several releases about the same records: against closed forms, from above and not far off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy.stats import binom, norm

from stobatch.dp.accounting import PoissonGaussian, gaussian_epsilon
from stobatch.dp.composition import Cost, Unbounded, compose_epsilon, compose_groups, cost_from_dict, cost_to_dict
from stobatch.dp.selection import RunLaw, Search

DELTA = 1e-5
WHOLE = [
    [PoissonGaussian(1.0, 8.0, 10), PoissonGaussian(1.0, 5.0, 3)],
    [PoissonGaussian(1.0, 4.0, 1), PoissonGaussian(1.0, 60.0, 100), PoissonGaussian(1.0, 4.0, 2)],
]
SEARCH = Search((PoissonGaussian(0.07, 10.0, 400),), 10.0, RunLaw(5.0, math.inf))

Compose = Callable[[Sequence[Cost], float], float]


def require_closed_form(compose: Compose) -> None:
    """Releases of whole batches are Gaussian: their composition is known exactly."""
    for mechanisms in WHOLE:
        size = math.sqrt(sum(one.steps / one.noise_multiplier**2 for one in mechanisms))
        exact = gaussian_epsilon(1 / size, 1, DELTA)
        found = compose(mechanisms, DELTA)
        assert exact <= found * (1 + 1e-9), "undercounted"
        assert found <= 1.01 * exact, "loose"


def test_whole_batches_have_the_closed_form():
    require_closed_form(compose_epsilon)


@pytest.mark.parametrize(
    "broken",
    [
        lambda costs, delta: max(compose_epsilon([one], delta) for one in costs),
        lambda costs, delta: compose_epsilon(costs[:-1], delta),
        lambda costs, delta: sum(compose_epsilon([one], delta) for one in costs),
    ],
    ids=["the largest alone", "one forgotten", "epsilons added up"],
)
def test_broken_compositions_are_caught(broken: Compose):
    with pytest.raises(AssertionError):
        require_closed_form(broken)


def test_a_training_in_two_parts_costs_as_much_as_the_whole():
    first, rest = PoissonGaussian(0.02, 1.1, 300), PoissonGaussian(0.02, 1.1, 700)
    whole = PoissonGaussian(0.02, 1.1, 1000).epsilon(DELTA)
    assert compose_epsilon([first, rest], DELTA) == whole
    # Noise that differs a little takes the way over a common grid.
    other = PoissonGaussian(0.02, 1.1 * (1 + 1e-9), 700)
    assert compose_epsilon([first, other], DELTA) == pytest.approx(whole, rel=5e-3)


def test_mechanisms_on_very_different_grids_stay_between_the_largest_and_the_sum():
    one, other = PoissonGaussian(1e-3, 1.0, 10_000), PoissonGaussian(0.5, 20.0, 50)
    alone = [compose_epsilon([cost], DELTA) for cost in (one, other)]
    assert max(alone) < compose_epsilon([one, other], DELTA) < sum(alone)


def test_searches_are_composed_with_trainings_and_with_each_other():
    training = SEARCH.mechanisms[0]
    alone, both = SEARCH.epsilon(DELTA), compose_epsilon([SEARCH, training], DELTA)
    assert max(alone, training.epsilon(DELTA)) < both < alone + training.epsilon(DELTA)
    assert alone < compose_epsilon([SEARCH, SEARCH], DELTA) < 2 * alone


def test_what_is_not_bounded_has_no_end_and_nothing_costs_nothing():
    assert compose_epsilon([WHOLE[0][0], Unbounded("public seed")], DELTA) == math.inf
    assert compose_epsilon([], DELTA) == 0.0


@pytest.mark.parametrize(
    "cost", [WHOLE[0][0], SEARCH, Unbounded("why"), Search(SEARCH.mechanisms, 3.0, RunLaw(4.0, 0.5))]
)
def test_a_cost_is_read_back_as_it_was_written(cost: Cost):
    assert cost_from_dict(cost_to_dict(cost)) == cost


Groups = Callable[[Sequence[tuple[Cost, int]], float], float]


def require_groups_bounded(compose: Groups) -> None:
    """Of one step, k of whose units are somebody's, the law is known: k coins, and a normal number behind them."""
    delta = 1e-4
    for rate, noise, size in ((0.3, 2.0, 2), (0.1, 3.0, 4), (1.0, 8.0, 4), (0.02, 1.0, 8)):
        grid = np.linspace(-12 * noise, size + 12 * noise, 400_001)
        without = norm.pdf(grid, 0, noise)
        coins = binom.pmf(np.arange(size + 1), size, rate)
        having = sum(weight * norm.pdf(grid, place, noise) for place, weight in enumerate(coins))
        epsilon = compose([(PoissonGaussian(rate, noise, 1), size)], delta)
        for one, other in ((having, without), (without, having)):
            exact = float(np.maximum(one - math.exp(epsilon) * other, 0).sum() * (grid[1] - grid[0]))
            assert exact <= delta, "undercounted"
    # Whole batches, beside a training of which it is one unit: a normal number, as far away as both together.
    both = [(PoissonGaussian(1.0, 6.0, 1), 1), (PoissonGaussian(1.0, 20.0, 1), 4)]
    exact = gaussian_epsilon(1 / math.sqrt(1 / 6**2 + 4**2 / 20**2), 1, delta)
    assert exact <= (found := compose(both, delta)), "undercounted"
    assert found < 2.5 * exact, "loose"


def test_groups_are_never_undercounted():
    require_groups_bounded(compose_groups)


@pytest.mark.parametrize(
    "broken",
    [
        lambda costs, delta: compose_epsilon([cost for cost, _ in costs], delta),
        lambda costs, delta: sum(size * compose_epsilon([cost], delta) for cost, size in costs),
    ],
    ids=["one unit of each", "the same delta"],
)
def test_broken_counts_of_groups_are_caught(broken: Groups):
    with pytest.raises(AssertionError, match="undercounted"):
        require_groups_bounded(broken)


def test_a_group_of_hopeless_size_and_one_of_a_search_have_answers():
    assert compose_groups([(PoissonGaussian(0.1, 1.0, 100), 4096)], DELTA) == math.inf
    once, twice = (compose_groups([(SEARCH, size)], DELTA) for size in (1, 2))
    assert 2 * once < twice < math.inf
    assert compose_groups([(Unbounded("no"), 2), (SEARCH, 1)], DELTA) == math.inf
