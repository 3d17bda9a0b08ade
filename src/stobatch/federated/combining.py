"""Combine answers whose senders may lie: clip each to a public bound, then take the mean or the median.

All of it is computed from answers, which are private already, and from public numbers: it costs nobody any privacy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, sqrt

import torch
from scipy.stats import binom
from torch import Tensor

from stobatch.privacy.dpsgd_plan import DpSgdPlan
from stobatch.training.engines import Gradients

FAILURE = 1e-9
"""The probability that a bound touches any answer of honest parties in a whole federation."""


def answer_bound(plan: DpSgdPlan, num_parameters: int, num_answers: int) -> float:
    """Return a bound on the norm of a party's answer that honest answers keep.

    **Guarantee.** Over all `num_answers` of a federation, honest answers exceed their bounds with probability at most
    `FAILURE`. An answer is (Σ clipped / C + σZ) / B: the sum has norm at most n, the size of a Poisson sample, and
    ‖Z‖ is at most √d + t but for a chance of e^(-t²/2), since the norm is 1-Lipschitz and its mean is at most √d. Half
    of an answer's share of `FAILURE` goes to the binomial tail of n, half to the Gaussian one.
    """
    half = FAILURE / num_answers / 2
    most = min(plan.num_examples, int(binom.isf(half, plan.num_examples, plan.sampling_rate)))
    noise = plan.noise_multiplier * (sqrt(num_parameters) + sqrt(2 * log(1 / half)))
    return (most + noise) / plan.expected_batch_size


def norm_of(answer: Gradients) -> float:
    """The norm of all of an answer as one vector, in float64: float32 squares overflow from 1e19 on."""
    return sqrt(sum(float(value.double().square().sum()) for value in answer.values()))


def clip_answer(answer: Gradients, bound: float) -> Gradients:
    """Return the answer, scaled down to the bound where it is longer; to the bit where it is not."""
    size = norm_of(answer)
    return answer if size <= bound else {name: value * (bound / size) for name, value in answer.items()}


def weighted_mean(answers: Sequence[Gradients], weights: Sequence[int], like: Mapping[str, Tensor]) -> Gradients:
    """Return Σ B_i g_i / Σ B_i, in the order given."""
    total = sum(weights)
    average = {key: torch.zeros_like(value) for key, value in like.items()}
    for answer, weight in zip(answers, weights, strict=True):
        for key, value in answer.items():
            average[key] += value.to(average[key]) * (weight / total)
    return average


def median(answers: Sequence[Gradients], like: Mapping[str, Tensor]) -> Gradients:
    """Return the median of each coordinate, one vote for each party; of an even number the mean of the middle two.

    **Guarantee.** Where fewer than half of the answers are hostile, every coordinate lies between the smallest and the
    largest of the honest answers: of the middle two, each has an honest answer on either side, or is one.

    >>> [value.tolist() for value in median([{"w": torch.tensor([x])} for x in (1.0, 9e30, 3.0)], {"w": torch.zeros(1)}
    ... ).values()]
    [[3.0]]
    """
    found = {}
    for key, value in like.items():
        ordered = torch.stack([answer[key].to(value) for answer in answers]).sort(dim=0).values
        found[key] = (ordered[(len(answers) - 1) // 2] + ordered[len(answers) // 2]) / 2
    return found
