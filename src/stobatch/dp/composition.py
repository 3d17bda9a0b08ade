"""Composition: ε of several releases about the same records, always an upper bound.

DP-SGD trainings are composed by their privacy loss distributions on one grid; searches, accounted by Rényi divergences,
by those or as (ε, δ). The smallest bound is returned. It holds for mechanisms whose parameters (rate, noise, steps) do
not depend on earlier releases; their computations may.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stobatch.dp.accounting import (
    RENYI_ORDERS,
    TAIL_SHARE,
    PoissonGaussian,
    check_delta,
    gaussian_epsilon,
    grid_interval,
    privacy_loss,
    rounding_of_delta,
)
from stobatch.dp.library import common, privacy_loss_distribution
from stobatch.dp.selection import LEAST_DELTA, RenyiAccountant, RunLaw, Search

_FINER = 8
"""The common grid is at most this much finer than the coarsest grid of a single distribution."""
_SHARES = (0.5, 0.1)
"""Shares of δ to try for searches that are composed as (ε, δ), and for groups."""
_LARGEST_GROUP_EPSILON = 500.0
"""A larger ε of a group counts as infinite."""


@dataclass(frozen=True)
class Unbounded:
    """A release without any guarantee."""

    why: str


Cost = PoissonGaussian | Search | Unbounded


def cost_to_dict(cost: Cost) -> dict[str, Any]:
    """Return plain data, ready for JSON."""
    if isinstance(cost, Unbounded):
        return {"kind": "unbounded", "why": cost.why}
    if isinstance(cost, PoissonGaussian):
        return {"kind": "dp_sgd", **vars(cost)}
    shape = None if cost.law.is_poisson else cost.law.shape
    trainings = [vars(one) for one in cost.mechanisms]
    return {
        "kind": "search",
        "trainings": trainings,
        "score_noise": cost.score_noise,
        "mean": cost.law.mean,
        "shape": shape,
    }


def cost_from_dict(plain: Mapping[str, Any]) -> Cost:
    """Return the inverse of `cost_to_dict`; raise KeyError, TypeError or ValueError on anything else."""
    kind = plain["kind"]
    if kind == "unbounded":
        return Unbounded(str(plain["why"]))
    if kind == "dp_sgd":
        return _mechanism({name: value for name, value in plain.items() if name != "kind"})
    if kind == "search":
        shape = math.inf if plain["shape"] is None else float(plain["shape"])
        mechanisms = tuple(_mechanism(one) for one in plain["trainings"])
        return Search(mechanisms, float(plain["score_noise"]), RunLaw(float(plain["mean"]), shape))
    raise ValueError(f"{kind!r} is no kind of cost")


def _mechanism(plain: Mapping[str, Any]) -> PoissonGaussian:
    rate, noise, steps = plain["sampling_rate"], plain["noise_multiplier"], plain["steps"]
    return PoissonGaussian(float(rate), float(noise), int(steps))


def compose_epsilon(costs: Sequence[Cost], delta: float) -> float:
    """Return ε of all releases together at this δ; 0 for none, infinity if one is unbounded.

    >>> one = PoissonGaussian(0.01, 1.0, 1000)
    >>> both = compose_epsilon([one, one], 1e-5)
    >>> 0 <= both - PoissonGaussian(0.01, 1.0, 2000).epsilon(1e-5) < 0.01
    True
    """
    check_delta(delta)
    if any(isinstance(cost, Unbounded) for cost in costs):
        return math.inf
    if not costs:
        return 0.0
    counted = Counter(cost for cost in costs if not isinstance(cost, Unbounded))
    merged = tuple(sorted(_merged(counted), key=repr))
    return min(_bounds(merged, float(delta)))


def compose_groups(costs: Sequence[tuple[Cost, int]], delta: float) -> float:
    """Return ε for a group that makes up the given number of units of each release, added or removed together.

    Releases with the same number of units are composed first and then converted by group privacy; the results for
    different numbers are added.

    >>> one = PoissonGaussian(1.0, 10.0, 1)
    >>> 1 < compose_groups([(one, 2)], 1e-5) / PoissonGaussian(1.0, 5.0, 1).epsilon(1e-5) < 1.2  # twice as far apart
    True
    """
    by_size: dict[int, list[Cost]] = {}
    for cost, size in costs:
        by_size.setdefault(size, []).append(cost)
    alone = by_size.pop(1, [])
    if not by_size:
        return compose_epsilon(alone, delta)
    bounds = []
    for share in _SHARES if alone else (1.0,):
        groups = [_group_epsilon(of_size, size, share * delta / len(by_size)) for size, of_size in by_size.items()]
        bounds.append(math.fsum([*groups, compose_epsilon(alone, (1 - share) * delta) if alone else 0.0]))
    return min(bounds)


def _group_epsilon(costs: Sequence[Cost], size: int, delta: float) -> float:
    """Return k ε' for some (ε', δ') of one unit with δ' (1 + e^ε' + ... + e^((k - 1) ε')) <= δ: group privacy."""
    least = LEAST_DELTA * len(costs) / min(_SHARES) if any(isinstance(cost, Search) for cost in costs) else 1e-300
    unit_delta = delta / size
    while unit_delta >= least and (epsilon := compose_epsilon(costs, unit_delta)) * size <= _LARGEST_GROUP_EPSILON:
        group_delta = unit_delta * math.fsum(math.exp(index * epsilon) for index in range(size))
        if group_delta <= delta:
            return size * epsilon
        unit_delta *= 0.5 * delta / group_delta
    return math.inf


def _merged(counted: Mapping[PoissonGaussian | Search, int]) -> Iterator[tuple[PoissonGaussian | Search, int]]:
    """Merge trainings with the same sampling rate and noise into one with all their steps."""
    steps: Counter[tuple[float, float]] = Counter()
    for cost, times in counted.items():
        if isinstance(cost, PoissonGaussian):
            steps[cost.sampling_rate, cost.noise_multiplier] += times * cost.steps
        else:
            yield cost, times
    for (rate, noise), total in steps.items():
        yield PoissonGaussian(rate, noise, total), 1


@lru_cache(maxsize=1024)
def _bounds(merged: tuple[tuple[PoissonGaussian | Search, int], ...], delta: float) -> tuple[float, ...]:
    trainings = [cost for cost, _ in merged if isinstance(cost, PoissonGaussian)]
    searches = [(cost, times) for cost, times in merged if isinstance(cost, Search)]
    if len(merged) == 1 and merged[0][1] == 1:
        return (merged[0][0].epsilon(delta),)
    bounds = [_by_renyi(trainings, searches, delta)]
    if searches:
        shares = [share * delta for share in _SHARES if share * delta / sum(n for _, n in searches) >= LEAST_DELTA]
        bounds += [_by_losses(trainings, searches, delta, share) for share in shares]
    else:
        bounds.append(_by_losses(trainings, [], delta, 0.0))
    return tuple(bounds)


def _by_losses(
    trainings: Sequence[PoissonGaussian], searches: Sequence[tuple[Search, int]], delta: float, share: float
) -> float:
    """Return ε by composing privacy loss distributions; searches enter as (ε, δ) with this share of δ together."""
    reduced_delta = delta - rounding_of_delta(sum(one.steps for one in trainings) + 1)
    if reduced_delta < delta / 2:
        return math.inf
    intervals = [grid_interval(one, delta) for one in trainings] or [1e-4]
    interval = max(min(intervals), max(intervals) / _FINER)
    losses = [privacy_loss(one, delta, interval) for one in trainings]
    search_delta = share / max(1, sum(times for _, times in searches))
    for search, times in searches:
        parameters = common.DifferentialPrivacyParameters(search.epsilon(search_delta), search_delta)
        losses += [privacy_loss_distribution.from_privacy_parameters(parameters, interval)] * times
    composed = losses[0]
    for loss in losses[1:]:
        composed = composed.compose(loss, tail_mass_truncation=TAIL_SHARE * delta / len(losses))
    return float(composed.get_epsilon_for_delta(reduced_delta))


def _by_renyi(trainings: Sequence[PoissonGaussian], searches: Sequence[tuple[Search, int]], delta: float) -> float:
    accountant = RenyiAccountant(orders=RENYI_ORDERS)
    for one in trainings:
        accountant.compose(one.event)
    for search, times in searches:
        accountant.compose(search.event, times)
    epsilon = float(accountant.get_epsilon(delta))
    if epsilon > 0:
        return epsilon * (1 + 1e-9)
    # As in `dp.accounting`: an ε of 0 may be rounding, and the closed form without sampling is an upper bound.
    mu = math.sqrt(math.fsum(one.steps / one.noise_multiplier**2 for one in trainings))
    return math.inf if searches else gaussian_epsilon(1 / mu, 1, delta)
