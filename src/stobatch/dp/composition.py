"""What several releases about the same records cost together: ε of their composition, never undercounted.

Trainings by DP-SGD are composed by their privacy loss distributions on one grid; searches, whose cost is known by Rényi
divergences, by those, or as the (ε, δ) that they are. The smallest bound is returned. All of it is for mechanisms
whose numbers (rate, noise, steps) do not depend on what earlier ones released: what they compute may.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dp_accounting.pld import common, privacy_loss_distribution

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
from stobatch.dp.selection import LEAST_DELTA, RenyiAccountant, RunLaw, Search

_FINER = 8
"""A grid that laws have in common is so much finer than the coarsest that one of them asks for, at most."""
_SHARES = (0.5, 0.1)
"""Of δ, for searches that are composed as the (ε, δ) that they are, and for groups."""
_MOST_OF_A_GROUP = 500.0
"""An ε beyond it is none."""


@dataclass(frozen=True)
class Unbounded:
    """A release of which nothing is proved."""

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
    """Return the inverse of `cost_to_dict`; raises KeyError, TypeError or ValueError at anything else."""
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
    """Return the ε of releases about the same records at this δ; 0 of none, infinity where one is not bounded.

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
    """Return the ε of releases about somebody who is so many units of each, all of them added or removed together.

    Releases of which it is as many units are composed first, and then counted for the group; groups of different sizes
    are added.

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
    found = []
    for share in _SHARES if alone else (1.0,):
        groups = [_of_group(own, size, share * delta / len(by_size)) for size, own in by_size.items()]
        found.append(math.fsum([*groups, compose_epsilon(alone, (1 - share) * delta) if alone else 0.0]))
    return min(found)


def _of_group(costs: Sequence[Cost], size: int, delta: float) -> float:
    """Return k ε' for some δ' with δ' (1 + e^ε' + ... + e^((k - 1) ε')) <= δ: k neighbours in a row."""
    least = LEAST_DELTA * len(costs) / min(_SHARES) if any(isinstance(cost, Search) for cost in costs) else 1e-300
    own = delta / size
    while own >= least and (found := compose_epsilon(costs, own)) * size <= _MOST_OF_A_GROUP:
        grown = own * math.fsum(math.exp(place * found) for place in range(size))
        if grown <= delta:
            return size * found
        own *= 0.5 * delta / grown
    return math.inf


def _merged(counted: Mapping[PoissonGaussian | Search, int]) -> Iterator[tuple[PoissonGaussian | Search, int]]:
    """Join trainings with the same sampling and noise: they are one of all their steps."""
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
    found = [_by_renyi(trainings, searches, delta)]
    if searches:
        shares = [share * delta for share in _SHARES if share * delta / sum(n for _, n in searches) >= LEAST_DELTA]
        found += [_by_losses(trainings, searches, delta, share) for share in shares]
    else:
        found.append(_by_losses(trainings, [], delta, 0.0))
    return tuple(found)


def _by_losses(
    trainings: Sequence[PoissonGaussian], searches: Sequence[tuple[Search, int]], delta: float, share: float
) -> float:
    """Compose laws of privacy losses; a share of δ is for the searches, which enter as (ε, δ)."""
    spare = delta - rounding_of_delta(sum(one.steps for one in trainings) + 1)
    if spare < delta / 2:
        return math.inf
    own = [grid_interval(one, delta) for one in trainings] or [1e-4]
    interval = max(min(own), max(own) / _FINER)
    losses = [privacy_loss(one, delta, interval) for one in trainings]
    each = share / max(1, sum(times for _, times in searches))
    for search, times in searches:
        promised = common.DifferentialPrivacyParameters(search.epsilon(each), each)
        losses += [privacy_loss_distribution.from_privacy_parameters(promised, interval)] * times
    composed = losses[0]
    for loss in losses[1:]:
        composed = composed.compose(loss, tail_mass_truncation=TAIL_SHARE * delta / len(losses))
    return float(composed.get_epsilon_for_delta(spare))


def _by_renyi(trainings: Sequence[PoissonGaussian], searches: Sequence[tuple[Search, int]], delta: float) -> float:
    accountant = RenyiAccountant(orders=RENYI_ORDERS)
    for one in trainings:
        accountant.compose(one.event)
    for search, times in searches:
        accountant.compose(search.event, times)
    found = float(accountant.get_epsilon(delta))
    if found > 0:
        return found * (1 + 1e-9)
    # As in `dp.accounting`: where rounding leaves 0 open, the closed form for whole batches is an upper bound.
    size = math.sqrt(math.fsum(one.steps / one.noise_multiplier**2 for one in trainings))
    return math.inf if searches else gaussian_epsilon(1 / size, 1, delta)
