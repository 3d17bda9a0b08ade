"""T-tests over seeds between every two of several settings, for whatever was measured of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any, TypeVar

from stobatch.evaluation.statistics import TTest, compare_over_seeds

K = TypeVar("K", bound=tuple[Any, ...])


def t_tests_between(groups: Mapping[str, Mapping[int, Mapping[K, float]]]) -> Iterator[tuple[str, str, K, TTest]]:
    """Two-tailed tests between every two groups with two seeds or more, measure by measure.

    `groups` has for each setting and each of its seeds what was measured. A measure that one of the two lacks for some
    seed is not tested between them.
    """
    several = {name: seeds for name, seeds in groups.items() if len(seeds) > 1}
    for (first, one), (second, two) in combinations(several.items(), 2):
        for measure in sorted(set.intersection(*(set(found) for seeds in (one, two) for found in seeds.values()))):
            a, b = ({seed: found[measure] for seed, found in seeds.items()} for seeds in (one, two))
            yield first, second, measure, compare_over_seeds(a, b)
