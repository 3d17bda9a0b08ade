from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stobatch.data import fixed_disjoint_batches, pick_trainers, poisson_sample, trainer_batches
from stobatch.seeds import Seeds

seeds = st.integers(0, 2**31)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(1, 300), st.data(), seeds)
def test_batches_are_disjoint_and_cover_all_but_the_remainder(count: int, data: st.DataObject, seed: int) -> None:
    size = data.draw(st.integers(1, count))
    batches = fixed_disjoint_batches(count, size, seeded(seed))
    indices = batches.flatten().tolist()
    assert batches.shape == (count // size, size)
    assert len(set(indices)) == len(indices) == count - count % size
    assert set(indices) <= set(range(count))
    assert torch.equal(batches, fixed_disjoint_batches(count, size, seeded(seed)))


def test_the_paper_has_24_27_and_10_batches() -> None:
    counts = [(60_000, 2499), (50_000, 1851), (45_000, 4500)]
    assert [len(fixed_disjoint_batches(n, m, seeded(0))) for n, m in counts] == [24, 27, 10]


@given(st.integers(2, 200), seeds)
def test_trainers_share_no_batch(num_batches: int, seed: int) -> None:
    pairs = trainer_batches(num_batches, seeded(seed))
    indices = pairs.flatten().tolist()
    assert pairs.shape == (num_batches // 2, 2)
    assert len(set(indices)) == len(indices)
    assert set(indices) <= set(range(num_batches))


@given(st.integers(1, 50), st.data(), seeds)
def test_picked_trainers_differ(num_trainers: int, data: st.DataObject, seed: int) -> None:
    count = data.draw(st.integers(1, num_trainers))
    picked = pick_trainers(num_trainers, count, seeded(seed)).tolist()
    assert len(set(picked)) == len(picked) == count
    assert set(picked) <= set(range(num_trainers))


@given(st.integers(0, 300), st.floats(0, 1), seeds)
def test_poisson_sample_gives_ascending_indices(count: int, rate: float, seed: int) -> None:
    sample = poisson_sample(count, rate, Seeds.reproducible(seed).stream("sample"))
    assert sample.dtype == torch.int64
    assert sample.ndim == 1
    assert sample.tolist() == sorted(set(sample.tolist()))
    assert set(sample.tolist()) <= set(range(count))


def test_poisson_sample_at_both_ends() -> None:
    assert len(poisson_sample(100, 0.0, Seeds.reproducible(0).stream("sample"))) == 0
    assert len(poisson_sample(100, 1.0, Seeds.reproducible(0).stream("sample"))) == 100


def within_binomial(size: int, count: int, rate: float) -> bool:
    """Hoeffding: |size - count * rate| exceeds this with probability below 1e-9."""
    return abs(size - count * rate) <= (count * 10.8) ** 0.5


def test_poisson_sample_has_its_rate() -> None:
    """False alarms: 1e-9. The broken twin, a rate one tenth too high, is caught."""
    count, rate, seeds = 400_000, 0.3, Seeds.reproducible(1)
    assert within_binomial(len(poisson_sample(count, rate, seeds.stream("sample"))), count, rate)
    assert not within_binomial(len(poisson_sample(count, 1.1 * rate, seeds.stream("sample"))), count, rate)


@pytest.mark.parametrize("size", [0, -1, 11])
def test_batch_sizes_that_do_not_fit(size: int, fails) -> None:
    assert "from 1 to 10" in fails(fixed_disjoint_batches, 10, size, seeded(0))


def test_counts_that_do_not_fit(fails) -> None:
    assert "too few" in fails(trainer_batches, 1, seeded(0))
    assert "from 1 to 3" in fails(pick_trainers, 3, 4, seeded(0))
    assert "from 1 to 3" in fails(pick_trainers, 3, 0, seeded(0))
    for rate in (-0.1, 1.1, float("nan")):
        assert "not a probability" in fails(poisson_sample, 3, rate, Seeds.reproducible(0).stream("sample"))
