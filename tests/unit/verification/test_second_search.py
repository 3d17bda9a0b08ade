"""ε of a search by a second way: both ways agree, and one that forgets something is told from the other."""

from __future__ import annotations

import math

import pytest

from stobatch.dp.accounting import PoissonGaussian
from stobatch.dp.selection import RunLaw, Search
from stobatch.verification.second_accountant import search_epsilon

TRAININGS = [((0.07, 10.0, 400),), ((0.01, 1.0, 200), (0.5, 20.0, 50)), ((1.0, 5.0, 3),)]
DELTA = 1e-5


@pytest.mark.parametrize("trainings", TRAININGS)
@pytest.mark.parametrize("law", [(5.0, None), (5.0, 0.0), (30.0, 1.0)])
@pytest.mark.parametrize("noise", [1.0, 10.0])
def test_two_accountants_agree(
    trainings: tuple[tuple[float, float, int], ...], law: tuple[float, float | None], noise: float
):
    mean, shape = law
    mechanisms = tuple(PoissonGaussian(*one) for one in trainings)
    first = Search(mechanisms, noise, RunLaw(mean, math.inf if shape is None else shape)).epsilon(DELTA)
    assert first == pytest.approx(search_epsilon(trainings, noise, mean, shape, DELTA), rel=1e-6)


def test_what_is_forgotten_shows():
    trainings = TRAININGS[1]
    whole = search_epsilon(trainings, 3.0, 5.0, None, DELTA)
    assert search_epsilon(trainings, 3.0, 1.0001, None, DELTA) < 0.8 * whole, "the search"
    assert search_epsilon(trainings, 1e3, 5.0, None, DELTA) < 0.8 * whole, "the scores"
    assert search_epsilon(trainings[1:], 1e3, 5.0, None, DELTA) < 0.9 * search_epsilon(trainings, 1e3, 5.0, None, DELTA)
