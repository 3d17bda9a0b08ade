"""Choosing the class on the same draws as its bounds: the joint failure stays below the stated probability.

Ten tied classes and 200 draws are the hardest case: the winner is a winner by luck. The alarm sounds if the misses in
40,000 trials exceed the 1e-9 quantile of a binomial law with the stated failure probability.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import binom
from torch import nn

from stobatch.config import CertificationConfig
from stobatch.models import from_layers
from stobatch.published.monte_carlo import Tally
from stobatch.published.verified_inference import VerifiedInference
from stobatch.votes.confidence import clopper_pearson

CLASSES, DRAWS, TRIALS, FALSE_ALARM = 10, 200, 40_000, 1e-9
Floats = NDArray[np.float64]


def votes(chances: Floats) -> Floats:
    return np.random.default_rng(0).multinomial(DRAWS, chances, TRIALS).astype(np.float64)


def misses(label: NDArray[np.int64], top: Floats, runner_up: Floats, chances: Floats) -> int:
    """How often the bound of the named class is too high, or that of all the others too low."""
    others = np.tile(chances, (len(label), 1))
    others[np.arange(len(label)), label] = 0
    return int(((top > chances[label]) | (runner_up < others.max(1))).sum())


def allowed(failure: float) -> float:
    return float(binom.isf(FALSE_ALARM, TRIALS, failure))


def judged(
    counts: Floats, failure: float, interval: str = "clopper_pearson"
) -> tuple[NDArray[np.int64], Floats, Floats]:
    network = from_layers(nn.Linear(3, 2), nn.Identity(), nn.Linear(2, CLASSES), (3,))
    config = CertificationConfig(failure_probability=failure, interval=interval)
    verifier = VerifiedInference(network, config, input_noise_scale=1.0, hidden_noise_scale=2.0)
    tensor = torch.from_numpy(counts)
    verdicts = verifier.judge(Tally(tensor.long(), tensor, DRAWS))
    return verdicts.label, verdicts.score_lower, verdicts.runner_up_upper


TIED = np.full(CLASSES, 0.1)
LED = np.array([0.4, 0.4, *[0.025] * 8])


@pytest.mark.parametrize("chances", [TIED, LED], ids=["ten tied", "two tied"])
@pytest.mark.parametrize("interval", ["clopper_pearson", "hoeffding"])
@pytest.mark.parametrize("failure", [0.05, 0.3])
def test_the_proved_bounds_fail_together_as_rarely_as_stated(chances: Floats, interval: str, failure: float) -> None:
    label, top, runner_up = judged(votes(chances), failure, interval)
    assert misses(label, top, runner_up, chances) <= allowed(failure)


def test_bounds_that_pay_nothing_for_the_choice_are_caught() -> None:
    """The twin: every bound at the full failure probability, as if the class had been named beforehand."""
    counts = votes(TIED)
    label = counts.argmax(1)
    lower, upper = clopper_pearson(counts, DRAWS, 0.05)
    rows = np.arange(TRIALS)
    upper[rows, label] = 0
    assert misses(label, lower[rows, label], upper.max(1), TIED) > allowed(0.05)
