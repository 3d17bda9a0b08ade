"""Streams of different names are independent, streams of one name are equal.

For independent continuous streams that are symmetric about 0 the number of equal signs is binomial(n, 1/2), exactly;
over all pairs together the alarm is false with probability 1e-9.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.stats import binom

from stobatch.dp.noise import laplace
from stobatch.published.noise import PrivateNoise
from stobatch.seeds import Seeds

FALSE_ALARM, DRAWS = 1e-9, 20_000


def dependent(streams: list[torch.Tensor]) -> bool:
    pairs = list(combinations([stream.flatten() > 0 for stream in streams], 2))
    low, high = binom.ppf(FALSE_ALARM / len(pairs) / 2, DRAWS, 0.5), binom.isf(FALSE_ALARM / len(pairs) / 2, DRAWS, 0.5)
    return any(not low <= int((first == second).sum()) <= high for first, second in pairs)


PATHS = [
    *[("step", step, "trainer", trainer) for step in range(4) for trainer in range(4)],
    *[("step", step, "pick") for step in range(4)],
    ("noise", "input"),
    ("noise", "hidden"),
    ("noise", "label"),
    ("batches",),
    ("trainers",),
    ("1",),
    (1,),
    ("1", "2"),
    ("12",),
]


def test_streams_of_different_paths_are_independent() -> None:
    seeds = Seeds.reproducible(0)
    assert not dependent([laplace((DRAWS,), 1.0, seeds.generator(*path)) for path in PATHS])


def test_streams_of_different_roots_are_independent() -> None:
    assert not dependent([Seeds.reproducible(root).normal((DRAWS,), "noise") for root in range(20)])


def test_the_same_path_twice_is_caught() -> None:
    seeds = Seeds.reproducible(0)
    assert dependent([laplace((DRAWS,), 1.0, seeds.generator(*path)) for path in [*PATHS[:5], PATHS[2]]])


@pytest.mark.parametrize("share", [0.1, -0.1])
def test_a_weak_correlation_is_caught(share: float) -> None:
    first, second = (Seeds.reproducible(0).normal((DRAWS,), name) for name in "ab")
    assert dependent([first, second + share * first])


def test_a_path_names_the_same_numbers_for_ever() -> None:
    seeds = Seeds.reproducible(5)
    first = seeds.normal((10,), "x", 1)
    seeds.normal((1000,), "something", "else")
    assert torch.equal(first, seeds.normal((10,), "x", 1))


def test_input_hidden_and_label_noise_are_independent() -> None:
    shapes = {"input_shape": (DRAWS,), "hidden_shape": (DRAWS,), "label_shape": (DRAWS,)}
    noise = PrivateNoise.draw(Seeds.reproducible(9), input_scale=1, hidden_scale=2, label_scale=3, **shapes)
    assert not dependent([noise.input_noise, noise.hidden_noise, noise.label_noise])


def test_secret_roots_differ_and_are_not_shown() -> None:
    roots = [Seeds.secret() for _ in range(50)]
    assert len({seeds.root for seeds in roots}) == 50
    assert not any(seeds.public or str(seeds.root) in repr(seeds) for seeds in roots)
    assert np.mean([seeds.root.bit_length() > 64 for seeds in roots]) > 0.9
