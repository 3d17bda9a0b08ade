"""ε of several releases about the same records: against closed forms, from above and not far off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from stobatch.dp.accounting import PoissonGaussian, gaussian_epsilon
from stobatch.dp.composition import Cost, Unbounded, compose_epsilon, cost_from_dict, cost_to_dict
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
