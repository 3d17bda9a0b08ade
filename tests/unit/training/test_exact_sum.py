"""Sums that have the same bits in any order: what lets one process and four train the same model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stobatch.training import exact_sum
from stobatch.training.exact_sum import ExactSum

DTYPES = {"float32": torch.float32, "float64": torch.float64}
WIDTH = 3
Part = dict[str, Tensor]


def parameters(dtype: torch.dtype = torch.float64) -> Part:
    """Two, so that parts may name one alone; the first is a matrix."""
    return {"weight": torch.zeros(WIDTH, 1, dtype=dtype), "bias": torch.zeros(WIDTH, dtype=dtype)}


def numbers(dtype: torch.dtype) -> st.SearchStrategy[float]:
    """All that such a gradient can hold, within what the sum of forty of them may be."""
    width = 32 if dtype is torch.float32 else 64
    ordinary, tiny = st.floats(-(2.0**24), 2.0**24, width=width), st.floats(-(2.0**-30), 2.0**-30, width=width)
    return ordinary | tiny | st.sampled_from([2.0**24, -(2.0**24), 1.0, 2.0**-23, 2.0**-64, 2.0**-65])


@st.composite
def some_parts(draw: st.DrawFn, dtype: torch.dtype) -> list[Part]:
    """Each of one parameter, the other, or both."""
    made = []
    for _ in range(draw(st.integers(1, 40))):
        names = draw(st.sampled_from([("weight",), ("bias",), ("bias", "weight")]))
        values = {name: draw(st.lists(numbers(dtype), min_size=WIDTH, max_size=WIDTH)) for name in names}
        made.append({name: torch.tensor(value, dtype=dtype) for name, value in values.items()})
    return [{name: value.view(-1, 1) if name == "weight" else value for name, value in part.items()} for part in made]


def summed(parts: Sequence[Part], like: Part) -> ExactSum:
    total = ExactSum(like)
    for part in parts:
        total.add(part)
    return total


def same(one: Part, other: Part) -> bool:
    """Bit for bit; the sign of a zero says nothing."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", DTYPES)
@given(data=st.data())
def test_no_order_grouping_or_number_of_processes_changes_a_bit(name: str, data: st.DataObject) -> None:
    """Processes add what they have in an order of their own, and their sums are added in yet another."""
    dtype = DTYPES[name]
    parts, like = data.draw(some_parts(dtype)), parameters(dtype)
    count = data.draw(st.integers(1, 7))
    expected = summed(parts, like).mean(count)
    order = data.draw(st.permutations(parts))
    processes = data.draw(st.integers(1, 5))
    owners = data.draw(st.lists(st.integers(0, processes - 1), min_size=len(parts), max_size=len(parts)))
    sums = [
        summed([part for part, owner in zip(order, owners, strict=True) if owner == process], like)
        for process in range(processes)
    ]
    # As an all-reduce may do it: any two of them are added until one is left.
    while len(sums) > 1:
        one, other = (sums.pop(data.draw(st.integers(0, len(sums) - 1))) for _ in range(2))
        one.buffer += other.buffer
        sums.append(one)
    assert same(sums[0].mean(count), expected)


FEW = st.lists(st.floats(-(2.0**18), 2.0**18, width=32).filter(lambda x: not 0 < abs(x) < 2.0**-40), min_size=1)


@given(FEW, st.integers(1, 9))
def test_float32_parts_above_2_to_the_minus_40_are_summed_without_rounding(values: list[float], count: int) -> None:
    like = {"bias": torch.zeros(1)}
    total = summed([{"bias": torch.tensor([value])} for value in values], like)
    exact = sum(Fraction(value) for value in values)
    assert sum(Fraction(float(row)) for row in total.buffer) == exact
    # fsum rounds the exact sum once, to float64.
    rounded = torch.tensor(math.fsum(values) / count, dtype=torch.float64)
    assert torch.equal(total.mean(count)["bias"], rounded.float().view(1))
    in_double = ExactSum({"bias": torch.zeros(1, dtype=torch.float64)})
    in_double.buffer.copy_(total.buffer)
    assert torch.equal(in_double.mean(count)["bias"], rounded.view(1))


@given(st.lists(numbers(torch.float64), min_size=1, max_size=40))
def test_each_part_is_missed_by_2_to_the_minus_65_at_most(values: list[float]) -> None:
    like = {"bias": torch.zeros(1, dtype=torch.float64)}
    total = summed([{"bias": torch.tensor([value], dtype=torch.float64)} for value in values], like)
    found = sum(Fraction(float(row)) for row in total.buffer)
    assert abs(found - sum(Fraction(value) for value in values)) <= len(values) * Fraction(1, 2**65)


def wide_parts(count: int, dtype: torch.dtype, seed: int = 0) -> list[Part]:
    """Of sizes from 2⁻⁷⁰ up to a share of 2³⁰: what is left over on the way is as large as it gets."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(count, 50, generator=generator, dtype=torch.float64) * (100 - math.log2(count)) - 70
    signs = torch.randint(0, 2, (count, 50), generator=generator) * 2 - 1
    return [{"bias": row.to(dtype)} for row in signs * 2**exponents]


Summing = Callable[[Sequence[Part], Part], Tensor]


def exactly(parts: Sequence[Part], like: Part) -> Tensor:
    return summed(parts, like).mean(1)["bias"]


def plainly(parts: Sequence[Part], like: Part) -> Tensor:
    """The broken twin: numbers added as they come."""
    total = torch.zeros_like(like["bias"])
    for part in parts:
        total += part["bias"]
    return total


def plainly_in_double(parts: Sequence[Part], like: Part) -> Tensor:
    """The broken twin with twice the digits: it errs less, and still depends on the order."""
    total = torch.zeros_like(like["bias"], dtype=torch.float64)
    for part in parts:
        total += part["bias"]
    return total.to(like["bias"].dtype)


def on_one_grid(parts: Sequence[Part], like: Part) -> Tensor:
    """The broken twin whose leftovers are added as they are: those of float64 parts reach below any grid."""
    coarse, fine = (torch.zeros_like(like["bias"], dtype=torch.float64) for _ in range(2))
    for part in parts:
        value = part["bias"].double()
        near = (value * 2.0**22).round() / 2.0**22
        coarse += near
        fine += value - near
    return (coarse + fine).to(like["bias"].dtype)


def order_matters(summing: Summing, parts: Sequence[Part], orders: int = 6) -> bool:
    like = {"bias": torch.zeros_like(parts[0]["bias"])}
    found = [summing(random.Random(seed).sample(parts, len(parts)), like) for seed in range(orders)]
    return any(not torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("count", [10, 4096])
def test_up_to_4096_parts_of_every_size_are_independent_of_their_order(count: int, name: str) -> None:
    parts = wide_parts(count, DTYPES[name])
    assert float(sum(part["bias"].abs() for part in parts).max()) <= 2.0**30
    assert not order_matters(exactly, parts)


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("float32", plainly),
        ("float64", plainly),
        ("float64", plainly_in_double),
    ],
)
def test_sums_that_depend_on_the_order_are_caught(name: str, twin: Summing) -> None:
    assert order_matters(twin, wide_parts(200, DTYPES[name]))


def test_leftovers_without_a_grid_of_their_own_are_caught() -> None:
    """They show where nothing larger stands in front of them."""
    parts = [{"bias": part["bias"] * 2.0**-52} for part in wide_parts(200, torch.float64)]
    assert order_matters(on_one_grid, parts)
    assert not order_matters(exactly, parts)


@pytest.mark.parametrize("twin", [plainly, plainly_in_double])
def test_ordinary_gradients_are_enough_to_catch_a_plain_sum(twin: Summing) -> None:
    """No far-fetched numbers are needed: two hundred normal ones, of float64 where the sum is in it."""
    dtype = torch.float32 if twin is plainly else torch.float64
    generator = torch.Generator().manual_seed(1)
    parts = [{"bias": torch.randn(50, generator=generator, dtype=dtype)} for _ in range(200)]
    assert order_matters(twin, parts)
    assert not order_matters(exactly, parts)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_number_stays_none_and_spoils_nothing_else(place: int, bad: float, name: str) -> None:
    """The loop looks for it in the sum, after the message: it must arrive there from whichever process had it."""
    like = parameters(DTYPES[name])
    parts = [{key: torch.full_like(value, 0.5) for key, value in like.items()} for _ in range(3)]
    parts[place]["bias"][1] = bad
    one, other = summed(parts[:2], like), summed(parts[2:], like)
    one.buffer += other.buffer
    found = one.mean(3)
    assert found["bias"].isfinite().tolist() == [True, False, True]
    assert torch.equal(found["weight"], torch.full_like(like["weight"], 0.5))
    assert found["bias"][0] == 0.5


def test_infinities_of_both_signs_do_not_cancel() -> None:
    like = {"bias": torch.zeros(1)}
    found = summed([{"bias": torch.tensor([value])} for value in (math.inf, -math.inf, 1.0)], like).mean(1)
    assert not found["bias"].isfinite().any()


def test_what_a_part_leaves_out_counts_as_zero() -> None:
    like = parameters(torch.float32)
    weight = torch.arange(3.0).view(3, 1)
    parts: list[Part] = [{"weight": weight}, {}, {"bias": torch.ones(3)}, {"weight": weight}]
    found = summed(parts, like).mean(4)
    assert torch.equal(found["weight"], weight / 2)
    assert torch.equal(found["bias"], torch.full((3,), 0.25))
    nothing = summed([{}], like).mean(1)
    assert same(nothing, like)


def test_means_have_the_shapes_and_precisions_of_the_parameters() -> None:
    like = {"half": torch.zeros(2, 3), "matrix": torch.zeros(4, 2, dtype=torch.float64), "one": torch.zeros(())}
    found = summed([{name: torch.full_like(value, 0.1) for name, value in like.items()}], like).mean(1)
    for name, value in like.items():
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype)
        assert torch.equal(found[name], torch.full_like(value, 0.1))


def test_parameters_longer_than_a_block_and_oddly_laid_out_are_summed_place_by_place() -> None:
    """Blocks are cut in the order of the axes, whatever the order in memory."""
    generator = torch.Generator().manual_seed(2)
    shape = (5, 7, 61, 67)  # 143 045 numbers, more than two blocks
    like = {"plain": torch.zeros(shape), "last": torch.zeros(3)}
    parts = [torch.randn(shape, generator=generator) for _ in range(3)]
    laid_out = [parts[0].to(memory_format=torch.channels_last), parts[1].permute(3, 0, 2, 1), parts[2]]
    laid_out[1] = laid_out[1].contiguous().permute(1, 3, 2, 0)
    assert not laid_out[0].is_contiguous()
    assert not laid_out[1].is_contiguous()
    found = summed([{"plain": part, "last": torch.ones(3)} for part in laid_out], like).mean(1)
    expected = (parts[0].double() + parts[1].double() + parts[2].double()).float()
    assert torch.equal(found["plain"], expected)
    assert torch.equal(found["last"], torch.full((3,), 3.0))


def test_a_sum_keeps_no_graph_and_changes_no_part() -> None:
    leaf = torch.ones(3, requires_grad=True)
    part = leaf * 2
    total = summed([{"bias": part}, {"bias": part}], {"bias": torch.zeros(3)})
    assert not total.mean(1)["bias"].requires_grad
    assert torch.equal(part, torch.full((3,), 2.0))


@given(st.lists(st.floats(-1e30, 1e30, width=64), min_size=1, max_size=20))
def test_larger_gradients_are_summed_as_well_as_float64_can(values: list[float]) -> None:
    like = {"bias": torch.zeros(1, dtype=torch.float64)}
    total = summed([{"bias": torch.tensor([value], dtype=torch.float64)} for value in values], like)
    size = math.fsum(abs(value) for value in values)
    allowed = len(values) * torch.finfo(torch.float64).eps * size + len(values) * 2.0**-65
    assert abs(float(total.mean(1)["bias"]) - math.fsum(values)) <= allowed


def test_blocks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU large tensors are added block by block, on a GPU whole."""
    like = {"weight": torch.zeros(7, 11), "bias": torch.zeros(5)}
    draws = torch.Generator().manual_seed(0)
    parts = [{"weight": torch.randn(7, 11, generator=draws) * 10.0 ** (i - 4)} for i in range(9)]
    whole = summed(parts, like).mean(1)
    monkeypatch.setattr(exact_sum, "_BLOCK", 4)
    assert same(summed(parts, like).mean(1), whole)
